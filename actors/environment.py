"""The environment actor: owns one environment object and runs every call to it under a deadline.

An attempt and its environment actor meet by rendezvous: one call, one answer. A call that raises, hangs or returns
nonsense is a failure of infrastructure: the object is thrown away, the failure is recorded under its class, and the
attempt is cancelled from outside, so agent code never sees it and cannot turn it into a reward.
"""

import copy
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import trio

from trouper.actors.backoff import Backoff
from trouper.actors.config import Environment as Deadlines
from trouper.actors.process import ProcessEnvironment
from trouper.actors.threads import Threads
from trouper.channels import EnvironmentFailure, Reply, RunError, Task
from trouper.envs import StepResult, Tool, ToolResult
from trouper.envs.checked import CheckedEnvironment

LIMITS = {"call_tool": "step", "score": "reward"}
"""Calls whose deadline goes by another name than their own."""


class _Call:
    """A call on its way: who asked for what, and the scope by which the asker takes it back."""

    def __init__(self, what: str, arguments: tuple[Any, ...], attempt_scope: trio.CancelScope) -> None:
        self.what = what
        self.arguments = arguments
        self.attempt_scope = attempt_scope
        self.reply: Reply[Any] = Reply()
        self.scope = trio.CancelScope()


class EnvironmentActor:
    """One environment in its slot; also the `World` that the agent sees.

    Args:
        make: makes an environment object, or, with `isolation = "process"`, a `ProcessEnvironment`; called again after
            every failure.
        deadlines: the `[environment]` section.
        threads: where plain code runs.
        backoff: waits between failures that follow each other.
        note: told what is worth a line in the log.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        deadlines: Deadlines,
        threads: Threads,
        backoff: Backoff,
        note: Callable[[str], None],
    ) -> None:
        self._make = make
        self._deadlines = deadlines
        self._threads = threads
        self._backoff = backoff
        self._note = note
        self._environment: CheckedEnvironment | ProcessEnvironment | None = None
        self._call: _Call | None = None
        self._called = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()
        self._attempt_scope = trio.CancelScope()
        self._fruitless = 0  # lives in a row that answered nothing
        self.restarts = 0
        self.tools: tuple[Tool, ...] = ()
        self.begin(Task(id="none"), 0, self._attempt_scope)

    def begin(self, task: Task, seed: int, attempt_scope: trio.CancelScope) -> None:
        """A new attempt begins.

        Args:
            task: of the attempt.
            seed: of the attempt.
            attempt_scope: what a failure of the environment cancels.
        """
        self.task = copy.deepcopy(task)
        self._seed = seed
        self._attempt_scope = attempt_scope
        self.done = self.truncated = False
        self.failure: EnvironmentFailure | None = None
        self.reward_sum = 0.0
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0

    async def prepare(self) -> None:
        """Have the environment made, if it is not there, so that its tools are known."""
        await self._ask("prepare")

    # ------------------------------------------------------------------ the world: called by the agent

    async def reset(self) -> str:
        """Begin; returns the first observation."""
        observation: str = await self._ask("reset", self.task, self._seed)
        return observation

    async def step(self, action: str) -> str:
        """Act; returns the observation."""
        result: StepResult = await self._ask("step", action)
        self.done = result.done or result.truncated
        self.truncated = result.truncated
        self.reward_sum += result.reward
        self.metrics.update(result.metrics)
        return result.observation

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool; a call that does not fit is a result the model reads."""
        result: ToolResult = await self._ask("call_tool", name, arguments)
        return result

    async def score(self) -> float | None:
        """What the environment gives for the episode: its `reward()`, else the sum of the step rewards."""
        score: float | None = await self._ask("score", self.reward_sum)
        return score

    async def _ask(self, what: str, *arguments: Any) -> Any:
        started = trio.current_time()
        while self._call is not None:  # an earlier attempt was cancelled in the middle of a call
            await self._idle.park()
        self._call = call = _Call(what, arguments, self._attempt_scope)
        self._called.unpark_all()
        try:
            return await call.reply.wait()
        except trio.Cancelled:
            call.scope.cancel()
            raise
        finally:
            self.seconds += trio.current_time() - started

    # ------------------------------------------------------------------ the actor

    async def serve(self) -> None:
        """Answer calls until cancelled, then close the environment."""
        try:
            while True:
                while self._call is None:
                    await self._called.park()
                call = self._call
                if not call.scope.cancel_called:  # else the asker has gone before anything was touched
                    await self._handle(call)
                self._call = None
                self._idle.unpark_all()
        finally:
            with trio.CancelScope(shield=True):  # bounded by close_timeout
                await self._close()

    async def _handle(self, call: _Call) -> None:
        failure: EnvironmentFailure | None = None
        with call.scope:
            failure = await self._answer(call)
        if call.reply.answered:
            return
        self.restarts += 1  # nobody knows the object's state
        if call.scope.cancel_called:
            failure = EnvironmentFailure("agent_error", f"the agent left {call.what} before it was answered")
        # An attempt that is over, or was cancelled from outside, has an end of its own already.
        if call.attempt_scope is self._attempt_scope and not call.attempt_scope.cancel_called:
            self.failure = failure
            call.attempt_scope.cancel()
        await self._close()

    async def _answer(self, call: _Call) -> EnvironmentFailure | None:
        failure: EnvironmentFailure | None = None
        doing = call.what
        try:
            if self._environment is None:
                doing = "create"
                await self._create()
                doing = call.what
            value = None
            if call.what != "prepare":  # which asks for nothing more than being there
                value = await self._limited(call.what, partial(getattr(self._environment, call.what), *call.arguments))
                self._fruitless = 0
            call.reply.set(value)
        except* RunError:
            raise
        except* Exception as group:  # user code may raise anything; here that is an outcome, not a crash
            error = first_leaf(group)
            if isinstance(error, EnvironmentFailure):
                failure = error
            else:
                failure = EnvironmentFailure("env_error", f"{doing}: {type(error).__name__}: {error}")
                failure.__cause__ = error
        return failure

    async def _create(self) -> None:
        if self._fruitless:
            await trio.sleep(self._backoff.delay(math.inf if self._fruitless == 1 else 0.0))
        self._fruitless += 1
        self._environment = await self._limited("create", self._made)
        self.tools = self._environment.tools

    async def _made(self) -> CheckedEnvironment | ProcessEnvironment:
        if self._deadlines.isolation == "process":
            environment: ProcessEnvironment = await self._make()
            return environment
        return CheckedEnvironment(await self._threads.call(self._make), self._threads.call)

    async def _limited(self, what: str, function: Callable[[], Awaitable[Any]]) -> Any:
        key = f"{LIMITS.get(what, what)}_timeout"
        limit: float = getattr(self._deadlines, key)
        with trio.move_on_after(limit):
            return await function()
        raise EnvironmentFailure("env_timeout", f"{what} took longer than environment.{key} = {limit:g} s")

    async def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        try:
            await self._limited("close", environment.close)
        except* Exception as group:  # what is thrown away may be broken; the log says so
            error = first_leaf(group)
            cause = str(error) if isinstance(error, EnvironmentFailure) else f"{type(error).__name__}: {error}"
            self._note(f"{environment.name}.close failed: {cause}")


def first_leaf(error: BaseException) -> BaseException:
    """The first exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

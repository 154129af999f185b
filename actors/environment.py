"""The environment actor: owns one environment object and runs every call to it under a deadline.

An attempt and its environment actor meet by rendezvous: one call, one answer. A call that raises, hangs or returns
nonsense is a failure of infrastructure: the object is thrown away, the failure is recorded under its class, and the
attempt is cancelled from outside, so agent code never sees it and cannot turn it into a reward.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from trouper.actors.backoff import Backoff
from trouper.actors.config import Environment as Deadlines
from trouper.actors.threads import Threads
from trouper.channels import EnvironmentFailure, Reply, RunError, Task
from trouper.envs import (
    StepResult,
    Tool,
    ToolResult,
    call_tool,
    checked_observation,
    checked_score,
    checked_step,
    tools_of,
)


class EnvironmentActor:
    """One environment in its slot; also the `World` that the agent sees.

    Args:
        make: makes an environment object; called again after every failure.
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
        self._environment: Any = None
        self._call: tuple[str, tuple[Any, ...], Reply[Any]] | None = None
        self._call_scope = trio.CancelScope()
        self._called = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()
        self._attempt_scope = trio.CancelScope()
        self._answered = True
        self._healthy = True
        self._steps = 0
        self.restarts = 0
        self.tools: tuple[Tool, ...] = ()
        self.begin(Task(id="none"), self._attempt_scope)

    def begin(self, task: Task, attempt_scope: trio.CancelScope) -> None:
        """A new attempt begins; `attempt_scope` is what a failure of the environment cancels."""
        self.task = copy.deepcopy(task)
        self._attempt_scope = attempt_scope
        self._steps = 0
        self.done = self.truncated = False
        self.failure: EnvironmentFailure | None = None
        self.reward_sum = 0.0
        self.metrics: dict[str, float] = {}
        self.tool_calls = self.tool_failures = 0
        self.seconds = 0.0

    async def prepare(self) -> None:
        """Have the environment made, if it is not there, so that its tools are known."""
        await self._ask("prepare")

    # ------------------------------------------------------------------ the world: called by the agent

    async def reset(self) -> str:
        """Begin; returns the first observation."""
        observation: str = await self._ask("reset")
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
        self.tool_calls += 1
        self.tool_failures += result.failed
        return result

    async def score(self) -> float | None:
        """What the environment gives for the episode: its `reward()`, else the sum of the step rewards."""
        score: float | None = await self._ask("score")
        return score

    async def _ask(self, what: str, *arguments: Any) -> Any:
        started = trio.current_time()
        while self._call is not None:  # an earlier attempt was cancelled in the middle of a call
            await self._idle.park()
        reply: Reply[Any] = Reply()
        self._call = (what, arguments, reply)
        self._called.unpark_all()
        try:
            return await reply.wait()
        except trio.Cancelled:
            if self._call is not None and self._call[2] is reply:
                self._call_scope.cancel()
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
                what, arguments, reply = self._call
                with trio.CancelScope() as self._call_scope:
                    await self._answer(what, arguments, reply)
                if not reply.answered:  # it failed, or its asker has gone: nobody knows the object's state
                    self.restarts += 1
                    if self.failure is not None:
                        self._attempt_scope.cancel()
                    await self._close()
                self._call = None
                self._idle.unpark_all()
        finally:
            with trio.CancelScope(shield=True):  # bounded by close_timeout
                await self._close()

    async def _answer(self, what: str, arguments: tuple[Any, ...], reply: Reply[Any]) -> None:
        try:
            if self._environment is None:
                await self._create()
            reply.set(await getattr(self, f"_{what}")(*arguments))
            self._answered = self._healthy = what != "prepare" or self._answered
        except* RunError:
            raise
        except* Exception as group:  # user code may raise anything; here that is an outcome, not a crash
            error = first_leaf(group)
            if not isinstance(error, EnvironmentFailure):
                failure = EnvironmentFailure("env_error", f"{what}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                error = failure
            self.failure = error

    async def _create(self) -> None:
        if not self._answered:  # the last object, if there was one, failed before it did anything
            await trio.sleep(self._backoff.delay(math.inf if self._healthy else 0.0))
            self._healthy = False
        self._answered = False
        self._environment = await self._limited("create", self._deadlines.create_timeout, self._make)
        self.tools = tools_of(self._environment)

    async def _prepare(self) -> None:
        """Nothing more than being there."""

    async def _reset(self) -> str:
        call = partial(self._environment.reset, self.task)
        value = await self._limited("reset", self._deadlines.reset_timeout, call)
        return checked_observation(self._environment, value, 0)

    async def _step(self, action: str) -> StepResult:
        self._steps += 1
        call = partial(self._environment.step, action)
        value = await self._limited("step", self._deadlines.step_timeout, call)
        return checked_step(self._environment, value, self._steps)

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        invoke = partial(self._limited, "step", self._deadlines.step_timeout)
        return await call_tool(self._environment, name, arguments, invoke)

    async def _score(self) -> float | None:
        if not hasattr(self._environment, "reward"):
            return self.reward_sum
        value = await self._limited("reward", self._deadlines.reward_timeout, self._environment.reward)
        return checked_score(self._environment, value, self._steps)

    async def _limited(self, what: str, limit: float, function: Callable[[], Any]) -> Any:
        try:
            with trio.fail_after(limit):
                return await self._threads.call(function)
        except trio.TooSlowError:
            message = f"{what} took longer than environment.{what}_timeout = {limit:g} s"
            raise EnvironmentFailure("env_timeout", message) from None

    async def _close(self) -> None:
        environment, self._environment = self._environment, None
        if not hasattr(environment, "close"):
            return
        try:
            await self._limited("close", self._deadlines.close_timeout, environment.close)
        except* Exception as group:  # what is thrown away may be broken; the log says so
            error = first_leaf(group)
            self._note(f"{type(environment).__qualname__}.close failed: {type(error).__name__}: {error}")


def first_leaf(error: BaseException) -> BaseException:
    """The first exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

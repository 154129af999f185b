"""The environment actor: owns one environment object and runs every call to it under a deadline.

An attempt and its environment actor meet by rendezvous: one call, one answer. A call that raises, hangs or returns
nonsense is a failure of infrastructure: the object is thrown away, the failure is recorded under its class, and the
attempt is cancelled from outside, so agent code never sees it and cannot turn it into a reward.

A call that cannot be cancelled takes the actor with it: it is `lost`, and whoever has the slot makes another one.
"""

import copy
import math
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import trio

from trouper.actors.account import CallTimes
from trouper.actors.alarms import Alarms, Deadline
from trouper.actors.aside import Aside
from trouper.actors.backoff import Backoff
from trouper.actors.config import Environment as Deadlines
from trouper.actors.process import ProcessEnvironment
from trouper.actors.threads import StillRuns, Threads, as_failure
from trouper.actors.trace import NO_TRACK, Track
from trouper.channels import EnvironmentFailure, Reply, RunError, Task, first_leaf
from trouper.envs import StepResult, Tool, ToolResult
from trouper.envs.checked import CheckedEnvironment

LIMITS = {"call_tool": "step", "score": "reward"}
"""Calls whose deadline goes by another name than their own."""

CALL_GRACE = 2.0
"""Seconds that a call has to end after its deadline; it is more than one of asyncio's has."""


class _Call:
    """A call on its way, and how far it has come."""

    __slots__ = ("arguments", "attempt_scope", "left", "reply", "stage", "what")

    def __init__(self, what: str, arguments: tuple[Any, ...], attempt_scope: trio.CancelScope) -> None:
        self.what = what
        self.arguments = arguments
        self.attempt_scope = attempt_scope
        self.reply: Reply[Any] = Reply()
        self.stage: Literal["asked", "begun", "over"] = "asked"
        self.left = False  # by its asker, before it was answered


class EnvironmentActor:
    """One environment in its slot; also the `World` that the agent sees.

    Args:
        make: makes an environment object, or, with `isolation = "process"`, a `ProcessEnvironment`; called again after
            every failure.
        deadlines: the `[environment]` section.
        threads: where plain code runs.
        alarms: wakes for calls that are too slow; somebody else has it run.
        backoff: waits between failures that follow each other.
        note: told what is worth a line in the log.
        times: told how long each call took.
        track: of this environment.

    Attributes:
        lost: a call hangs that cannot be cancelled, or it was closed; this one answers nothing any more.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        deadlines: Deadlines,
        threads: Threads,
        alarms: Alarms,
        backoff: Backoff,
        note: Callable[[str], None],
        times: CallTimes | None = None,
        track: Track = NO_TRACK,
    ) -> None:
        self._make = make
        self._deadlines = deadlines
        self._threads = threads
        self._backoff = backoff
        self._note = note
        self._times = times or CallTimes()
        self._track = track
        self._environment: CheckedEnvironment | ProcessEnvironment | None = None
        self._call: _Call | None = None
        self._called = trio.lowlevel.ParkingLot()
        self._idle = trio.lowlevel.ParkingLot()
        self._attempt_scope = trio.CancelScope()
        self._fruitless = 0  # lives in a row that answered nothing
        # Around all calls until one is given up: a scope for each would be the dearest part of a call.
        self._scope = trio.CancelScope()
        self._doing = ""
        self._limit = Deadline(alarms, self._too_late)  # when what runs here is given up
        self._due = math.inf  # when it must have ended
        self._task: Aside | None = None
        self._closed = False
        self.lost = False
        self.restarts = 0
        self.tools: tuple[Tool, ...] = ()
        self.begin(Task(id="none"), 0, self._attempt_scope)

    def begin(self, task: Task, seed: int, attempt_scope: trio.CancelScope) -> None:
        """A new attempt begins.

        Args:
            task: of the attempt.
            seed: of the attempt.
            attempt_scope: what a failure of the environment cancels.

        Raises:
            EnvironmentFailure: the task cannot be copied.
        """
        self._seed = seed
        self._attempt_scope = attempt_scope
        self.done = self.truncated = False
        self.failure: EnvironmentFailure | None = None
        self.reward_sum = 0.0
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0
        try:
            self.task = copy.deepcopy(task)
        except BaseException as error:  # the payload's own code
            failure = as_failure(error)
            if not isinstance(failure, Exception):
                raise
            raise EnvironmentFailure(
                "env_error",
                f"task {task.id!r} cannot be copied, and every attempt gets a copy of its own: "
                f"{type(failure).__name__}: {failure}; keep plain data in its payload",
                retry=False,
            ) from error

    async def settle(self) -> None:
        """Wait until what earlier attempts have left here has ended, or is `lost`."""
        while self._call is not None and not self.lost:
            with trio.CancelScope(deadline=self._due):
                await self._idle.park()
            if self._call is not None and trio.current_time() >= self._due:
                self._too_late()

    async def prepare(self) -> None:
        """Have the environment made, if it is not there, so that its tools are known."""
        if self._environment is None or self._call is not None:
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
        world = self._environment
        if world is not None and self._call is None and not world.judges and math.isfinite(self.reward_sum):
            return self.reward_sum
        score: float | None = await self._ask("score", self.reward_sum)
        return score

    async def _ask(self, what: str, *arguments: Any) -> Any:
        started = trio.current_time()
        if self._call is not None:
            await self.settle()  # the attempt's own: a call that it has left, or made beside this one
        if self._closed:  # with the attempt, whose agent goes on although it was cancelled
            await trio.lowlevel.checkpoint()
            raise _over(what)
        if self.lost:  # so is the attempt
            await trio.sleep_forever()
        self._call = call = _Call(what, arguments, self._attempt_scope)
        self._due = math.inf
        self._called.unpark_all()
        try:
            return await call.reply.wait()
        except trio.Cancelled:
            if call.stage == "asked":  # nothing was touched
                self._free()
            elif call.stage == "begun":
                call.left = True
                self._scope.cancel()
                self._due = min(self._due, trio.current_time() + CALL_GRACE)
            raise
        finally:
            self.seconds += trio.current_time() - started

    def _free(self) -> None:
        self._call = None
        if self._idle:
            self._idle.unpark_all()

    # ------------------------------------------------------------------ the actor

    def start(self, failed: Callable[[BaseException], None]) -> None:
        """Have `serve` run, in a task that can be left behind; `failed` is told what it raises."""

        def at_end(task: Aside) -> None:
            if task.error is not None:
                failed(as_failure(task.error))

        self._task = self._threads.start(self.serve, "an environment", at_end)

    async def close(self) -> None:
        """End what `start` began, in bounded time; one that is `lost` is ended already."""
        if self._task is None or self.lost:
            return
        self._closed = self.lost = True
        left = await self._threads.end(self._task, self._deadlines.close_timeout + 2 * CALL_GRACE)
        if isinstance(left, StillRuns):
            self._note(f"an environment was not closed and is left behind: {left} does not end")
        if self._call is not None:
            self._call.reply.fail(_over(self._call.what))

    def _lose(self, call: _Call) -> None:
        self.lost = True
        self.restarts += 1
        failure = self._given_up(call)
        self._fail(EnvironmentFailure(failure.kind, f"{failure}, and it goes on although it was cancelled"))
        if self._task is not None:
            self._threads.leave(self._task)
        self._idle.unpark_all()

    def _given_up(self, call: _Call) -> EnvironmentFailure:
        if call.left:
            return EnvironmentFailure("agent_error", f"the agent left {call.what} before it was answered")
        return EnvironmentFailure("env_timeout", self._too_slow(self._doing))

    def _fail(self, failure: EnvironmentFailure | None) -> None:
        if not self._attempt_scope.cancel_called:  # else it has an end of its own already
            self.failure = failure
            self._attempt_scope.cancel()

    async def serve(self) -> None:
        """Answer calls until cancelled, then close the environment."""
        try:
            while True:
                failure: EnvironmentFailure | None = None
                try:
                    with trio.CancelScope() as self._scope:
                        failure = await self._answer_calls()
                except RuntimeError:
                    # Of Trio's, where a scope was left open: `_limited` has found that, or the call was given up.
                    if failure is None and not self._scope.cancel_called:
                        raise
                call = self._call
                if call is None:
                    continue
                call.stage = "over"
                if not call.reply.answered:
                    await self._give_up(call, failure)
                self._free()
        finally:
            with trio.CancelScope(shield=True):  # bounded by close_timeout
                await self._close()

    async def _answer_calls(self) -> EnvironmentFailure | None:
        """Until one of them fails, or was given up."""
        while not self._scope.cancel_called:
            while self._call is None:
                await self._called.park()
            call = self._call
            call.stage = "begun"
            failure = await self._answer(call)
            if failure is not None:
                return failure
            call.stage = "over"
            self._free()
        return None

    async def _give_up(self, call: _Call, failure: EnvironmentFailure | None) -> None:
        if not self.lost:  # else it has ended after all
            self.restarts += 1  # nobody knows the object's state
            if call.left or failure is None:
                failure = self._given_up(call)
            if call.attempt_scope is self._attempt_scope:  # else that attempt is over
                self._fail(failure)
        await self._close()

    async def _answer(self, call: _Call) -> EnvironmentFailure | None:
        failure: EnvironmentFailure | None = None
        try:
            if self._environment is None:
                await self._create()
            value = None
            if call.what != "prepare":  # which asks for nothing more than being there
                function = partial(getattr(self._environment, call.what), *call.arguments)
                value = await self._limited(call.what, function, self._label(call))
                self._fruitless = 0
            call.reply.set(value)
        except* RunError:
            raise
        except* Exception as group:  # user code may raise anything; here that is an outcome, not a crash
            error = first_leaf(group)
            if isinstance(error, EnvironmentFailure):
                failure = error
            else:
                failure = EnvironmentFailure("env_error", f"{self._doing}: {type(error).__name__}: {error}")
                failure.__cause__ = error
        return failure

    async def _create(self) -> None:
        if self._fruitless:
            await trio.sleep(self._backoff.delay(math.inf if self._fruitless == 1 else 0.0))
        self._fruitless += 1
        # Processes that start at the same time share the cores: each one's deadline begins with its turn.
        async with self._threads.starting if self._deadlines.isolation == "process" else nullcontext():
            self._environment = await self._limited("create", self._made)
        self.tools = self._environment.tools

    async def _made(self) -> CheckedEnvironment | ProcessEnvironment:
        if self._deadlines.isolation == "process":
            environment: ProcessEnvironment = await self._make()
            return environment
        return CheckedEnvironment(await self._threads.call(self._make), self._threads.call)

    def _label(self, call: _Call) -> str:
        """What account and trace call it: a tool by its name, unless the model has made it up."""
        if call.what != "call_tool":
            return call.what
        name = call.arguments[0]
        return f"tool:{name if any(tool.name == name for tool in self.tools) else 'unknown'}"

    async def _limited(self, what: str, function: Callable[[], Awaitable[Any]], label: str = "") -> Any:
        started = trio.current_time()
        limit = started + getattr(self._deadlines, _key(what))
        self._doing, self._due = what, limit + CALL_GRACE
        self._limit.set(limit)
        task, scopes = trio.lowlevel.current_task(), trio.lowlevel.current_task()._cancel_status
        try:
            with self._track.span(label or what):
                value = await function()
        finally:
            self._limit.moment = math.inf
            self._times.add(label or what, trio.current_time() - started)
        if task._cancel_status is not scopes:  # it would be around all later calls, and what ends them outside of it
            raise EnvironmentFailure(
                "env_error",
                f"{what} has left a nursery or a cancel scope open; close it in the call that opens it, or open it "
                "in a task of your own (trio.lowlevel.spawn_system_task)",
            )
        return value

    def _too_late(self) -> None:
        if not self._scope.cancel_called and self._call is not None and self._call.stage == "begun":
            self._scope.cancel()
            # The whole process may have stood still: whatever the time is, what was never cancelled could not end.
            self._due = max(self._due, trio.current_time() + CALL_GRACE)
        if trio.current_time() < self._due:
            self._limit.set(self._due)
        elif self._call is not None and not self.lost:
            self._lose(self._call)

    def _too_slow(self, what: str) -> str:
        limit: float = getattr(self._deadlines, _key(what))
        return f"{what} took longer than environment.{_key(what)} = {limit:g} s"

    async def _close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is None:
            return
        limit = self._deadlines.close_timeout
        started = trio.current_time()
        self._due = started + limit + CALL_GRACE
        try:
            with self._track.span("close"), trio.CancelScope(deadline=started + limit) as scope:
                await environment.close()
            if scope.cancelled_caught:
                raise EnvironmentFailure("env_timeout", self._too_slow("close"))
        except* Exception as group:  # what is thrown away may be broken; the log says so
            error = first_leaf(group)
            cause = str(error) if isinstance(error, EnvironmentFailure) else f"{type(error).__name__}: {error}"
            self._note(f"{environment.name}.close failed: {cause}")
        finally:
            self._times.add("close", trio.current_time() - started)


def _over(what: str) -> EnvironmentFailure:
    return EnvironmentFailure("agent_error", f"{what} was called in an attempt that is over")


def _key(what: str) -> str:
    return f"{LIMITS.get(what, what)}_timeout"

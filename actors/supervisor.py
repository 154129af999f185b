"""Supervision in the manner of Erlang/OTP: starts children in order, restarts them by rule, stops them in reverse.

Knows nothing of channels, graphs or what its children do. A supervisor is itself a child of another one.

All decisions are taken synchronously at the moment a child ends, so no exit waits behind another one's restart;
whatever takes time (stopping a group, backoff, starting) runs in a task of its own, the recovery.
"""

import logging
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal, TypeVar

import trio

from trouper.actors.backoff import Backoff, RestartWindow
from trouper.actors.child import ALWAYS, NEVER, ON_ERROR, Child, Life, Restart, Slot, brief, how
from trouper.channels import Exited, RestartLimit, StartError, TrouperError

__all__ = ["ALWAYS", "NEVER", "ON_ERROR", "Child", "Restart", "Strategy", "Supervisor"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class Strategy(Enum):
    """Who is restarted together with a child that ended."""

    ONE_FOR_ONE = "one_for_one"
    """Nobody."""
    ONE_FOR_ALL = "one_for_all"
    """Every sibling."""
    REST_FOR_ONE = "rest_for_one"
    """Those declared after it."""

    def group(self, children: Sequence[T], index: int) -> Sequence[T]:
        """Those of `children`, in the order of declaration, that restart when the one at `index` ended."""
        match self:
            case Strategy.ONE_FOR_ONE:
                return children[index : index + 1]
            case Strategy.ONE_FOR_ALL:
                return children
            case Strategy.REST_FOR_ONE:
                return children[index:]


class Supervisor:
    """Runs children until they have all ended, one of them is significant and ends, or one fails for good.

    Args:
        name: how errors and log lines call it.
        children: started in this order, each after the one before it is up; stopped in reverse.
        strategy: who is restarted together.
        max_restarts: restarts allowed within `window`, of all children together.
        window: seconds.
        backoff: makes the `Backoff` of one child from a seed.
        seed: makes the jitter reproducible.
        patience: seconds a cancelled child may take to end before it is reported as `stuck`.
        on_exit: called with every `Exited`. It must neither raise nor take long: it runs inside the supervisor.

    Attributes:
        restarts: how many restarts it has made, over all its own lives.
    """

    def __init__(
        self,
        name: str,
        children: Sequence[Child],
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        max_restarts: int = 3,
        window: float = 60.0,
        backoff: Callable[[str], Backoff] = Backoff,
        seed: int = 0,
        patience: float = 5.0,
        on_exit: Callable[[Exited], None] = lambda exited: None,
    ) -> None:
        names = [child.name for child in children]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"supervisor {name!r} has several children of the same name: {', '.join(twice)}")
        RestartWindow(max_restarts, window)  # refuses bad numbers now, not in the middle of a run
        self.name = name
        self.children = tuple(children)
        self.strategy = strategy
        self.max_restarts = max_restarts
        self.window = window
        self.patience = patience
        self.restarts = 0
        self._make_backoff = backoff
        self._seed = seed
        self._on_exit = on_exit
        self._running = False

    async def run(
        self, stop: trio.Event | None = None, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Start the children and supervise them.

        Args:
            stop: when it is set, the children are stopped gracefully and `run` returns.
            task_status: told once every child has been up.

        Raises:
            StartError: a child did not come up the first time.
            RestartLimit: children had to be restarted too often.
            Exception: what a child with `Restart.NEVER` raised, or a final error of any child.
            ExceptionGroup: one of these first, and then what other children raised while they were stopped.
        """
        if self._running:
            raise RuntimeError(f"supervisor {self.name!r} runs already; make another one for a second run")
        self._running = True
        try:
            await _Supervision(self, task_status).run(stop)
        finally:
            self._running = False


class _Supervision:
    """One run of a supervisor."""

    def __init__(self, supervisor: Supervisor, task_status: trio.TaskStatus[None]) -> None:
        self._of = supervisor
        self._task_status = task_status
        self._announced = False
        self._slots = [
            Slot(child, index, supervisor._make_backoff(f"{supervisor._seed}/{supervisor.name}/{child.name}"))
            for index, child in enumerate(supervisor.children)
        ]
        self._window = RestartWindow(supervisor.max_restarts, supervisor.window)
        self._over = trio.Event()
        self._errors: list[Exception] = []
        self._group_recovery: trio.CancelScope | None = None

    async def run(self, stop: trio.Event | None) -> None:
        try:
            async with trio.open_nursery() as self._lives:
                async with trio.open_nursery() as self._recoveries:
                    if stop is not None:
                        self._recoveries.start_soon(self._watch, stop)
                    if self._slots:
                        self._begin_recovery(self._slots, None)
                        await self._over.wait()
                    self._recoveries.cancel_scope.cancel()
                await self._stop_all()
        except BaseException as interrupt:
            # Cancellation from outside, or a child's KeyboardInterrupt: it goes on its way, but takes along what
            # had gone wrong before.
            if self._errors:
                raise BaseExceptionGroup(self._summary(), [*self._errors, interrupt]) from None
            raise
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ExceptionGroup(self._summary(), self._errors)
        self._announce()  # one that ended well before all were up has not failed to start

    def _summary(self) -> str:
        return f"supervisor {self._of.name!r} failed, and more failed while it stopped its children"

    async def _watch(self, stop: trio.Event) -> None:
        await stop.wait()
        self._over.set()

    # One life ------------------------------------------------------------------------------------------------

    def _launch(self, slot: Slot) -> Life:
        slot.life = life = Life(slot, self._on_up)
        self._lives.start_soon(self._host, life, name=f"{self._of.name}/{slot.child.name}")
        return life

    async def _host(self, life: Life) -> None:
        try:
            with life.scope:
                await life.slot.child.run(life.stop, task_status=life)
        # Any error of a child is the supervisor's to judge. Groups that also hold a Cancelled or an interrupt are
        # not `Exception`s and pass through whole; this scope's own Cancelled is already taken out of them.
        except Exception as error:
            cause = _leaf(error)
            cause.add_note(f"raised by {life.slot.child.name!r} (life {life.number}) under {self._of.name!r}")
            if trio.current_effective_deadline() == -math.inf:  # everything is being cancelled from outside
                self._close(life, "failed", cause)
                raise
            self._ended(life, cause)
        except BaseException:
            self._close(life, "stopped", None)
            raise
        else:
            self._ended(life, None)

    def _on_up(self) -> None:
        if all(slot.was_up or slot.over for slot in self._slots):
            self._announce()

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            self._task_status.started()

    def _close(
        self, life: Life, reason: Literal["returned", "failed", "stopped"], error: BaseException | None
    ) -> Exited:
        life.settled.set()
        life.done.set()
        return self._report(life, reason, error)

    def _report(
        self, life: Life, reason: Literal["returned", "failed", "stopped", "stuck"], error: BaseException | None
    ) -> Exited:
        exited = Exited(
            name=life.slot.child.name, reason=reason, attempt=life.number, error=error, at=trio.current_time()
        )
        self._of._on_exit(exited)
        return exited

    # What an end leads to ------------------------------------------------------------------------------------

    def _ended(self, life: Life, error: Exception | None) -> None:
        slot, child = life.slot, life.slot.child
        final = error is not None and _is_final(error)
        if life.late is not None and not final:
            life.late.__cause__ = error
            error = life.late
        elif life.up_at is None and not life.retired and not final:
            ending = f"raised {brief(error)}" if error is not None else "returned"
            late = StartError(
                f"{child.name!r} under {self._of.name!r} {ending} before it was up; "
                "a child must call task_status.started() once it is ready, and go on running"
            )
            late.__cause__ = error
            error = late
        reason: Literal["returned", "failed", "stopped"] = (
            "failed" if error is not None else "stopped" if life.stop.is_set() else "returned"
        )
        done = reason == "returned" and child.restart is not Restart.ALWAYS and life.up_at is not None
        exited = self._close(life, reason, error)
        if self._over.is_set():
            if error is not None and (final or life.stop.is_set() or child.restart is Restart.NEVER):
                self._errors.append(error)
            elif error is not None:  # what a restart would have mended does not spoil a graceful end
                log.warning("%r failed while its supervisor was ending", child.name, exc_info=error)
        elif error is not None and final:
            self._fail(error)
        elif done and (child.significant or not life.retired):
            self._settle(slot)
            if child.significant:
                self._over.set()
        elif life.retired:  # however it ended, what becomes of it is decided when all of its group have ended
            if error is not None:
                log.warning("%r failed while its group was stopped for a restart", child.name, exc_info=error)
        elif error is not None and (child.restart is Restart.NEVER or not slot.was_up):
            self._fail(error)
        elif not self._window.allows(exited):
            self._fail(self._restart_limit(exited))
        else:
            self._of.restarts += 1
            log.warning("restarting %r under %r: it %s", child.name, self._of.name, how(exited), exc_info=error)
            _let_go(error)
            self._begin_recovery(self._of.strategy.group(self._slots, slot.index), life)

    def _settle(self, slot: Slot) -> None:
        slot.over = True
        slot.child.ended()
        self._on_up()  # one that is over before it was up holds up nobody
        if all(slot.over for slot in self._slots):
            self._over.set()

    def _fail(self, error: Exception) -> None:
        self._errors.append(error)
        self._over.set()

    def _restart_limit(self, last: Exited) -> RestartLimit:
        history = self._window.history
        first_cause = next((exited.error for exited in history if exited.error is not None), None)
        return RestartLimit(
            f"supervisor {self._of.name!r} would need {len(history)} restarts within {self._of.window:g} s, and "
            f"max_restarts = {self._of.max_restarts}: {last.name!r} {how(last)}. "
            f"First cause: {brief(first_cause) if first_cause else 'none, every child returned'}. "
            "Mend that, or raise max_restarts.",
            history,
            first_cause,
        )

    # Restarting ----------------------------------------------------------------------------------------------

    def _begin_recovery(self, group: Sequence[Slot], ended: Life | None) -> None:
        """(Re)start a group; `ended` is the life whose end is the reason, None at the very start."""
        delay = 0.0
        if ended is not None:
            uptime = 0.0 if ended.up_at is None else trio.current_time() - ended.up_at
            delay = ended.slot.backoff.delay(uptime)
        scope = trio.CancelScope()
        if self._of.strategy is not Strategy.ONE_FOR_ONE:
            # The newest failure is before or at whatever the last recovery still had to start, so that its group
            # holds everything the last recovery leaves behind.
            if self._group_recovery is not None:
                self._group_recovery.cancel()
            self._group_recovery = scope
            # Now, not when the recovery runs: a sibling that ends in between must not count as a second failure.
            for slot in group:
                if slot.alive is not None:
                    slot.alive.retired = True
        self._recoveries.start_soon(self._recover, group, None if ended is None else ended.slot, delay, scope)

    async def _recover(self, group: Sequence[Slot], cause: Slot | None, delay: float, scope: trio.CancelScope) -> None:
        with scope:
            for slot in reversed(group):
                if slot.alive is not None:
                    slot.alive.retire(slot.child.grace)
                    await self._join(slot.alive)
            for life in [slot.life for slot in group if slot.life is not None]:
                await life.done.wait()  # two lives of one child never overlap, however stuck the first is
            await trio.sleep(delay)
            if cause is not None:
                self._renew(group, cause)
            for slot in group:
                if slot.over:
                    continue
                await trio.lowlevel.checkpoint_if_cancelled()  # a newer recovery may have taken over meanwhile
                if not await self._start(slot):
                    return

    def _renew(self, group: Sequence[Slot], cause: Slot) -> None:
        """Between the old lives of a group and the new: who may not restart is over, who had returned no longer is."""
        for slot in group:
            if slot.child.restart is not Restart.NEVER:
                slot.over = False
            elif slot.lives and not slot.over:
                self._settle(slot)
        cause.child.restarting()

    async def _start(self, slot: Slot) -> bool:
        life = self._launch(slot)
        with trio.move_on_after(slot.child.start_timeout):
            await life.settled.wait()
        if not life.settled.is_set():
            life.late = StartError(
                f"{slot.child.name!r} under {self._of.name!r} was not up within start_timeout = "
                f"{slot.child.start_timeout:g} s; it must call task_status.started(), or be given more time"
            )
            life.scope.cancel()
            await self._join(life)
            return False
        return life.up_at is not None

    # Stopping ------------------------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        failed = bool(self._errors)
        for slot in reversed(self._slots):
            if slot.alive is not None:
                # A failure leaves nothing to wait for; a graceful end gives everyone their time.
                slot.alive.retire(0.0 if failed else slot.child.grace)
                await self._join(slot.alive)

    async def _join(self, life: Life) -> None:
        """Wait for a life that was told to stop, and name it if it outlives its cancellation."""
        cancelled_at = -math.inf if life.scope.cancel_called else life.scope.deadline
        with trio.move_on_at(max(cancelled_at, trio.current_time()) + self._of.patience):
            await life.done.wait()
        if not life.done.is_set():
            log.error("%r under %r is stuck: cancelled, but it does not end", life.slot.child.name, self._of.name)
            self._report(life, "stuck", None)


def _leaf(error: Exception) -> Exception:
    """The error itself, out of groups that hold nothing else."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _is_final(error: Exception) -> bool:
    """Whether it, or anything in the group it is, says that doing the same again would end the same way."""
    if isinstance(error, ExceptionGroup):
        return any(_is_final(inner) for inner in error.exceptions)
    return isinstance(error, TrouperError) and error.final


def _let_go(error: BaseException | None) -> None:
    """Drop the tracebacks, and with them all that the frames of a dead life hold.

    An engine's cache must not lie beside that of the next one. Clearing the frames would not do: they keep their
    functions, and those what they close over.
    """
    if error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
            _let_go(other)

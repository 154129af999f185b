"""A supervised child: what is declared of it, its place in a supervisor, and each of its lives.

Knows Trio's scopes and events; the rules by which a life ends or begins are the supervisor's.
"""

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

import trio
from msgspec import Struct

from trouper.actors.backoff import Backoff
from trouper.channels import Exited, StartError


class Restart(Enum):
    """When a child that ended is started again.

    One that raised a final error (`TrouperError.final`) never is: its error fails the supervisor at once, whatever the
    rule. A supervisor that is itself restarted starts all its children, whatever became of them in its last life.
    """

    ALWAYS = "always"
    """Whatever the reason."""
    ON_ERROR = "on_error"
    """When it raised. One that returned is over, and is started again only if its group restarts."""
    NEVER = "never"
    """Not at all: its error fails the supervisor, and a restart of its group ends it for good."""


ALWAYS, ON_ERROR, NEVER = Restart


class Child(Struct, frozen=True, eq=False):
    """What a supervisor needs to know of a child.

    Attributes:
        name: how errors and metrics call it.
        run: the child, called as `run(stop, task_status=...)` for each life. It is up once it has called
            `task_status.started()`, and should end soon after the event `stop` is set.
        restart: when to start it again; never after a final error.
        grace: seconds between the stop event and cancellation.
        start_timeout: seconds it may take to come up.
        significant: when it ends for good, its supervisor ends and stops the others gracefully.
        ended: called once it is over: only a restart of its group could start it again.
        restarting: called when its end makes its group restart, after all of them have ended and before the first is
            started again.
    """

    name: str
    run: Callable[..., Awaitable[Any]]
    restart: Restart
    grace: float = 5.0
    start_timeout: float = 60.0
    significant: bool = False
    ended: Callable[[], None] = lambda: None
    restarting: Callable[[], None] = lambda: None


class Slot:
    """A child's place in its supervisor, through all its lives."""

    def __init__(self, child: Child, index: int, backoff: Backoff) -> None:
        self.child = child
        self.index = index
        self.backoff = backoff
        self.life: Life | None = None
        self.lives = 0
        self.was_up = False
        self.over = False

    @property
    def alive(self) -> "Life | None":
        """The life that has not ended yet."""
        return self.life if self.life is not None and not self.life.done.is_set() else None


class Life:
    """One run of a child; its own task status."""

    def __init__(self, slot: Slot, on_up: Callable[[], None]) -> None:
        slot.lives += 1
        self.slot = slot
        self.number = slot.lives
        self.stop = trio.Event()
        self.scope = trio.CancelScope()
        self.settled = trio.Event()  # up or done
        self.done = trio.Event()
        self.up_at: float | None = None
        self.late: StartError | None = None
        self.retired = False  # stopped by the supervisor: its end is no event to react to
        self._on_up = on_up

    def started(self, value: object = None) -> None:
        """The child is up."""
        if self.up_at is not None:
            raise RuntimeError(f"child {self.slot.child.name!r} called started() twice in one life; call it once")
        self.up_at = trio.current_time()
        self.slot.was_up = True
        self.settled.set()
        self._on_up()

    def retire(self, grace: float) -> None:
        """Ask it to stop, and have it cancelled when the grace is over; asking again never prolongs the grace."""
        self.retired = True
        self.stop.set()
        self.scope.deadline = min(self.scope.deadline, trio.current_time() + grace)


def brief(error: BaseException | None) -> str:
    """Type and message; of a group, those of its first error."""
    if isinstance(error, BaseExceptionGroup):
        return f"{brief(error.exceptions[0])} (the first of {len(error.exceptions)})"
    return f"{type(error).__name__}: {error}"


def how(exited: Exited) -> str:
    """How a life ended, for the middle of a sentence."""
    return "returned" if exited.error is None else f"raised {brief(exited.error)}"

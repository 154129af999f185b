"""Who waits for whom: read off the suspended tasks of a running graph, without their help and at no cost to them.

Knows Trio's primitives, the channels, and the pacer; which actor uses which channel it is told. What it cannot place
counts as something that the outside world may end, so an unknown wait is never taken for a stall.
"""

import math
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

import trio
from msgspec import Struct

from trouper.actors.child import Life
from trouper.actors.pacer import Pacer
from trouper.actors.wiring import Ends
from trouper.channels import Latest, Receiver, Reply, Sender

Ender: TypeAlias = Literal["actor", "anyone", "world", "stop"]
"""Who can end a wait: only another task of the graph; any code that holds the event, in a foreign thread too; a
timer, thread, socket, process or something unknown; or only the end of its children, a stop or a cancellation."""

_PARK = trio.lowlevel.ParkingLot.park.__code__
_EVENT = trio.Event.wait.__code__
_LOCK = trio.Lock.acquire.__code__
_LIMITER = trio.CapacityLimiter.acquire_on_behalf_of.__code__
_SEMAPHORE = trio.Semaphore.acquire.__code__
_CONDITION = trio.Condition.wait.__code__
_RECEIVE = trio.MemoryReceiveChannel.receive.__code__
_SEND = trio.MemorySendChannel.send.__code__
_CHILDREN = trio.Nursery._nested_child_finished.__code__
_FOREVER = trio.sleep_forever.__code__
_UNTIL = trio.sleep_until.__code__

_ENTRY_QUEUE = "<TrioToken.run_sync_soon task>"
"""Trio's own task: it is always there, and what comes through it is seen as a step that a task takes."""


class Wait(Struct, frozen=True):
    """What a task waits for.

    Attributes:
        ender: who can end it.
        what: in words, without time.
        on: what it waits on, as an edge of the wait graph calls it.
        targets: names of the actors that could end it; unknown when empty.
        since: when it began, where its code keeps that.
    """

    ender: Ender
    what: str = ""
    on: str = ""
    targets: tuple[str, ...] = ()
    since: float | None = None


WORLD = Wait("world")
STOP = Wait("stop")


class Picture(Struct, frozen=True):
    """All waits at one moment.

    Attributes:
        waits: (actor, wait) of each task of an actor.
        running: the actors that have a task.
        open_world: whether a timer, or something outside of the loop, may still change anything.
    """

    waits: tuple[tuple[str, Wait], ...]
    running: frozenset[str]
    open_world: bool

    @property
    def stalled(self) -> Literal["no", "perhaps", "yes"]:
        """Whether actors wait for each other only; `perhaps` when one waits for an event that others may set."""
        enders = {wait.ender for _, wait in self.waits}
        if self.open_world or not enders & {"actor", "anyone"}:
            return "no"
        return "perhaps" if "anyone" in enders else "yes"

    def lines(self, now: float | None = None) -> list[str]:
        """One line for each different wait of an actor; with durations when `now` is given."""
        counts = Counter((actor, wait.what, wait.targets) for actor, wait in self.waits if wait.what)
        begun: dict[tuple[str, str, tuple[str, ...]], float] = {}
        for actor, wait in self.waits:
            if wait.since is not None:
                key = (actor, wait.what, wait.targets)
                begun[key] = min(wait.since, begun.get(key, math.inf))
        lines = []
        for key, count in counts.items():
            actor, what, targets = key
            line = f"{actor}: {what}" if count == 1 else f"{actor}: {count} tasks {what}"
            if now is not None and key in begun:
                line += f", {'for' if count == 1 else 'longest'} {now - begun[key]:.1f} s"
            if targets:
                line += f"; waits for: {', '.join(map(self._called, targets))}"
            lines.append(line)
        return lines

    def _called(self, actor: str) -> str:
        return actor if actor in self.running else f"{actor} (not running)"

    def path(self) -> str:
        """The shortest cycle of actors that wait for each other, else the longest chain of waits."""
        edges: dict[str, list[tuple[str, str]]] = {actor: [] for actor in sorted(self.running)}
        dead_ends: dict[str, str] = {}
        for actor, wait in self.waits:
            for target in wait.targets:
                if target != actor and (wait.on, target) not in edges[actor]:
                    edges[actor].append((wait.on, target))
            if wait.on and not wait.targets:
                dead_ends.setdefault(actor, wait.on)
        cycles = [found for actor in edges if (found := _shortest_way_back(edges, actor))]
        if cycles:
            shortest = min(cycles, key=len)
            return f"cycle: {' -> '.join(shortest)}"
        chain = max((_longest_way(edges, actor) for actor in edges), key=len)
        last = self._called(chain[-1])
        return "chain: " + " -> ".join([*chain[:-1], last, *([dead_ends[last]] if last in dead_ends else [])])


def _shortest_way_back(edges: Mapping[str, list[tuple[str, str]]], start: str) -> list[str]:
    ways = deque([[start]])
    seen = set()
    while ways:
        way = ways.popleft()
        for on, target in edges.get(way[-1], []):
            if target == start:
                return [*way, on, start]
            if target not in seen:
                seen.add(target)
                ways.append([*way, on, target])
    return []


def _longest_way(edges: Mapping[str, list[tuple[str, str]]], start: str) -> list[str]:
    """In a graph without cycles."""
    ways = [[on, *_longest_way(edges, target)] for on, target in edges.get(start, [])]
    return [start, *max(ways, key=len, default=[])]


class WaitGraph:
    """Reads the waits of one graph.

    Args:
        actors: by the name under which each runs, its channel ends.
        links: (source, target, label) of what else actors give each other without blocking.
    """

    def __init__(self, actors: Mapping[str, Ends], links: Sequence[tuple[str, str, str]]) -> None:
        self._actors = actors
        self._channels = {end.channel.name: end.channel for ends in actors.values() for end in ends.ends}
        self._users = {
            (direction, name): tuple(
                actor
                for actor, ends in actors.items()
                if any(end.channel.name == name and end.direction == direction for end in ends.ends)
            )
            for name in self._channels
            for direction in ("send", "receive")
        }
        self._links = {
            actor: tuple(
                source
                for source, found in actors.items()
                if any(link[:2] == (found.actor.name, ends.actor.name) for link in links)
            )
            for actor, ends in actors.items()
        }

    def look(self, nursery: trio.Nursery) -> Picture:
        """Examine every task.

        Args:
            nursery: the graph runs in its body and in its tasks, of which the one that looks is left out.
        """
        owners: dict[trio.lowlevel.Task, str | None] = {}
        frames: dict[trio.lowlevel.Task, list[FrameType]] = {}
        stops: set[trio.Event] = set()
        root, me = nursery.parent_task, trio.lowlevel.current_task()
        inside = root.child_nurseries[root.child_nurseries.index(nursery) :]
        todo: list[tuple[trio.lowlevel.Task, str | None]] = [
            (task, None) for each in inside for task in each.child_tasks if task is not me
        ]
        while todo:
            task, owner = todo.pop()
            frames[task] = _frames(task)
            life = _locals(frames[task][0]).get("life") if owner is None and frames[task] else None
            if isinstance(life, Life) and life.slot.child.name in self._actors:  # a supervisor's host of an actor
                owner = life.slot.child.name
                stops.add(life.stop)
            owners[task] = owner
            todo += [(child, owner) for each in task.child_nurseries for child in each.child_tasks]
        waits, open_world = [], False
        for task, owner in owners.items():
            wait = self._read(frames[task], owner or "", owners, stops)
            if owner is not None:
                waits.append((owner, wait))
            open_world |= wait.ender == "world"
        for task in _all_tasks():
            if task not in owners and task not in (root, me) and task.name != _ENTRY_QUEUE:
                outside = _frames(task)
                open_world |= not _awaits_signal(outside) and self._read(outside, "", owners, stops).ender == "world"
        waits.sort(key=lambda each: each[0])
        return Picture(tuple(waits), frozenset(actor for actor, _ in waits), open_world)

    def _read(
        self,
        frames: list[FrameType],
        actor: str,
        owners: Mapping[trio.lowlevel.Task, str | None],
        stops: set[trio.Event],
    ) -> Wait:
        """What a task with these frames waits for."""
        if not frames or _module(frames[-1]) != "trio._core._traps" or _lent_the_loop(frames):
            return WORLD  # or about to run
        while _module(frames[-1]) == "trio._core._traps":
            frames = frames[:-1]
        if len(frames) > 1 and frames[-1].f_code is _PARK and frames[-2].f_code in _PARKERS:
            frames = frames[:-1]
        code, it = frames[-1].f_code, _locals(frames[-1]).get("self")
        caller = frames[-2] if len(frames) > 1 else frames[-1]
        place = _place(frames)
        match it:
            case _ if code is _CHILDREN:
                return STOP
            case _ if code is _FOREVER:
                timer = caller.f_code is _UNTIL and _locals(caller)["deadline"] != math.inf
                return WORLD if timer else STOP
            case trio.Event() if it in stops:
                return STOP
            case trio.Lock() | trio.StrictFIFOLock() if code is _LOCK:
                holder = it.statistics().owner
                held = _names([holder], owners)
                by = f", held at {_place(_frames(holder))}" if holder is not None else ""
                return Wait("actor", f"waiting at {place} for a lock{by}", f"lock at {place}", held)
            case trio.CapacityLimiter() if code is _LIMITER:
                borrowers = it.statistics().borrowers
                if not all(isinstance(borrower, trio.lowlevel.Task) for borrower in borrowers):
                    return WORLD  # a thread, or whatever else somebody borrows for
                what = f"waiting at {place} for one of {it.total_tokens:g} places of a limiter"
                return Wait("actor", what, f"limiter at {place}", _names(borrowers, owners))
            case trio.Semaphore() if code is _SEMAPHORE:
                return Wait("actor", f"waiting at {place} for a semaphore (value {it.value})", f"semaphore at {place}")
        return self._read_own(actor, code, caller, place)

    def _read_own(self, actor: str, code: object, caller: FrameType, place: str) -> Wait:
        """A wait on what this package makes of Trio's events, parking lots and channels, or on these themselves."""
        it = _locals(caller).get("self")
        since = _locals(caller).get("started")
        since = since if isinstance(since, float) else None
        linked = self._links.get(actor, ())
        # Anybody may set a reply, a thread too; only a declared link says that an actor does.
        answers: Ender = "actor" if linked else "anyone"
        match it:
            case Receiver() if code is _RECEIVE:
                producers = self._users.get(("send", it.name), ())
                return Wait("actor", f"receiving from {self._channel(it.name)}", f"channel {it.name}", producers, since)
            case Sender() if code is _SEND:
                consumers = self._users.get(("receive", it.name), ())
                return Wait("actor", f"sending into {self._channel(it.name)}", f"channel {it.name}", consumers, since)
            case Reply() if code is _EVENT:
                return Wait(answers, f"waiting at {place} for a reply", "reply", linked)
            case Latest() if code is _PARK:
                return Wait(answers, f"waiting at {place} for a newer value", "newer value", linked)
            case Pacer() if code is _PARK:
                return Wait("actor", f"waiting for a training slot ({_pace(it)})", "training slot", linked)
        own = _module(caller).startswith("trouper.")
        if code is _PARK or code is _EVENT:
            if _module(caller).startswith("trio."):
                return WORLD  # signals, and whatever else Trio makes of them
            what = (
                f"parked at {place}"
                if own
                else f"waiting at {place} for a trio.{'Event' if code is _EVENT else 'ParkingLot'}"
            )
            return Wait("actor" if own else "anyone", what, "" if own else f"event at {place}")
        if code is _CONDITION:
            return Wait("anyone", f"waiting at {place} for a condition", f"condition at {place}")
        if code is _RECEIVE or code is _SEND:
            return Wait("anyone", f"waiting at {place} for a memory channel", f"memory channel at {place}")
        return WORLD

    def _channel(self, name: str) -> str:
        if name not in self._channels:
            return f"channel {name!r}"
        channel = self._channels[name].statistics()
        return f"channel {name!r} ({channel.depth}/{channel.capacity})"


_PARKERS = (_LOCK, _LIMITER, _SEMAPHORE, _CONDITION)


def _names(holders: Sequence[object], owners: Mapping[trio.lowlevel.Task, str | None]) -> tuple[str, ...]:
    """The actors that hold something; a task of nobody's by its own name."""
    tasks = [holder for holder in holders if isinstance(holder, trio.lowlevel.Task)]
    return tuple(sorted({owners.get(task) or task.name for task in tasks}))


def _pace(pacer: Pacer) -> str:
    open_slots = [slot for slot in range(pacer.admitted) if not pacer.has_ended(slot)]
    shown = ", ".join(map(str, open_slots[:3])) + (", ..." if len(open_slots) > 3 else "")
    total = "all" if pacer.total is None else str(pacer.total)
    return (
        f"{pacer.admitted} of {total} admitted, {pacer.closed} closed, {len(open_slots)} open"
        f"{': ' + shown if open_slots else ''}; samplers hold weights of step {pacer.version}"
    )


def _frames(task: trio.lowlevel.Task) -> list[FrameType]:
    """Outermost first; none when they cannot be told."""
    try:
        return [frame for frame, _ in task.iter_await_frames()]
    except TypeError:  # an awaitable of another make
        return []


def _locals(frame: FrameType) -> dict[str, Any]:
    """A frame's locals. Up to Python 3.12 the frame keeps what it showed, and with it all that its names held then."""
    shown = frame.f_locals
    found = dict(shown)
    if sys.version_info < (3, 13):
        shown.clear()
    return found


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _lent_the_loop(frames: list[FrameType]) -> bool:
    """Whether code on the way holds a Trio token: it has given a thread the means to end this wait."""
    return any(
        isinstance(value, trio.lowlevel.TrioToken)
        for frame in frames
        if not _module(frame).startswith("trio.")
        for value in _locals(frame).values()
    )


def _place(frames: list[FrameType]) -> str:
    """The innermost frame that is neither Trio's nor a channel's."""
    for frame in reversed(frames):
        if not _module(frame).startswith(("trio.", "trouper.channels.")):
            return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
    return "an unknown place"


def _awaits_signal(frames: list[FrameType]) -> bool:
    return any(_module(frame) == "trio._signals" for frame in frames)


def _all_tasks() -> Iterator[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    todo = [] if root is None else [root]
    while todo:
        task = todo.pop()
        yield task
        todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]

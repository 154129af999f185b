"""The static checks of an actor graph: what each actor's annotations say of its ends, and whether all of it fits.

Knows declarations, not how they run. Every problem is a sentence that names the node and says how to mend it.
"""

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

from trouper.actors.child import NEVER, Restart
from trouper.actors.supervisor import Strategy
from trouper.channels import Channel, Receiver, Sender

GIVEN = ("stop", "task_status")
"""Parameters that the graph fills in itself when an actor's function has them."""


class Actor(Struct, frozen=True, eq=False):
    """A declared actor.

    Attributes:
        name: unique in its graph.
        function: an async function over its ends.
        arguments: by parameter name: channels for its ends, anything else as a constant.
        restart: when to start it again.
        grace: seconds between the stop event and cancellation.
        start_timeout: seconds it may take to come up.
        significant: whether its end ends its failure domain.
        replicas: how many copies run.
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    restart: Restart
    grace: float
    start_timeout: float
    significant: bool
    replicas: int

    @property
    def copies(self) -> tuple[str, ...]:
        """The names of what runs."""
        if self.replicas == 1:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.replicas))

    @property
    def channels(self) -> dict[str, Channel[Any]]:
        """The channels among its arguments."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Channel)}


class Domain:
    """A failure domain: actors and inner domains under one supervisor."""

    def __init__(
        self,
        name: str,
        strategy: Strategy,
        max_restarts: int,
        window: float,
        restart: Restart = NEVER,
        significant: bool = False,
    ) -> None:
        self.name = name
        self.strategy = strategy
        self.max_restarts = max_restarts
        self.window = window
        self.restart = restart
        self.significant = significant
        self.members: list[Actor | Domain] = []

    def children(self) -> "list[tuple[str, Actor | Domain]]":
        """What its supervisor starts: each copy of its actors, and its inner domains whole, by name."""
        return [
            (name, member)
            for member in self.members
            for name in (member.copies if isinstance(member, Actor) else (member.name,))
        ]

    def copies(self) -> frozenset[str]:
        """The names of what runs inside, in inner domains too."""
        return frozenset(copy for actor in self.actors() for copy in actor.copies)

    def actors(self) -> list[Actor]:
        """All actors inside, those of inner domains included, in the order of declaration."""
        found: list[Actor] = []
        for member in self.members:
            found += [member] if isinstance(member, Actor) else member.actors()
        return found

    def domains(self) -> "list[Domain]":
        """All domains inside, outer ones first."""
        inner = [member for member in self.members if isinstance(member, Domain)]
        return [found for member in inner for found in (member, *member.domains())]


class End(Struct, frozen=True, eq=False):
    """A parameter of an actor that holds one end of a channel."""

    parameter: str
    direction: Literal["send", "receive"]
    channel: Channel[Any]
    message_type: Any


class Ends(Struct, frozen=True, eq=False):
    """An actor's signature, read.

    Attributes:
        actor: whose.
        ends: those that are well-formed.
        given: which of `stop` and `task_status` its function wants.
        problems: what is wrong with the rest.
    """

    actor: Actor
    ends: tuple[End, ...]
    given: frozenset[str]
    problems: tuple[str, ...]

    def channels(self, direction: Literal["send", "receive"]) -> list[Channel[Any]]:
        """The channels it sends into or receives from."""
        return [end.channel for end in self.ends if end.direction == direction]


def read_ends(actor: Actor) -> Ends:
    """Resolve the annotations of an actor's function and match them with its arguments."""
    who = f"actor {actor.name!r}"
    target = actor.function
    while isinstance(target, partial):
        target = target.func
    if not inspect.isroutine(target):
        target = getattr(target, "__call__", target)  # noqa: B004  # the bound method, for its annotations
    if not inspect.iscoroutinefunction(target):
        problem = f"{who} was given {actor.function!r}, which is no async function; declare it with `async def`"
        return Ends(actor, (), frozenset(), (problem,))
    try:
        hints = get_type_hints(target)
    except NameError as error:
        problem = f"{who}: an annotation cannot be resolved ({error}); annotate with names its module defines"
        return Ends(actor, (), frozenset(), (problem,))
    parameters = inspect.signature(actor.function).parameters
    given = frozenset(name for name in GIVEN if name in parameters and name not in actor.arguments)
    ends = []
    problems = [
        f"{who}: parameter {name!r} ({_spell(hints.get(name))}) was not given; pass {name}=..."
        for name in _missing(parameters, actor.arguments, given)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in actor.arguments.items():
        if not takes_any and (name not in parameters or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY):
            problems.append(
                f"{who} has no parameter {name!r} that can be passed by name; it has: {', '.join(parameters) or 'none'}"
            )
            continue
        end = _end_type(hints.get(name))
        if isinstance(value, Channel) and end is None:
            carried = _spell(value.message_type)
            problems.append(
                f"{who}: parameter {name!r} was given channel {value.name!r} but is annotated "
                f"{_spell(hints.get(name))}; annotate it Receiver[{carried}] or Sender[{carried}]"
            )
        elif isinstance(value, Channel) and end is not None:
            ends.append(End(name, end[0], value, end[1]))
        elif end is not None and not (value is None and NoneType in get_args(hints[name])):
            problems.append(
                f"{who}: parameter {name!r} is annotated {_spell(hints[name])} but was given {value!r}; "
                "give it a channel made with graph.channel(...)"
            )
    return Ends(actor, tuple(ends), given, tuple(problems))


def find_problems(
    actors: Sequence[Ends],
    channels: Sequence[Channel[Any]],
    domains: Sequence[str],
    links: Sequence[tuple[str, str, str]],
) -> list[str]:
    """Everything that keeps a graph from running, in the order of declaration; empty when it is sound."""
    problems = []
    if not actors:
        problems.append("it has no actors; declare some with graph.actor(...)")
    names = Counter([*domains, *(copy for ends in actors for copy in ends.actor.copies)])
    problems += [
        f"the name {name!r} is used {n} times; give each actor and domain its own" for name, n in names.items() if n > 1
    ]
    counts = Counter(channel.name for channel in channels)
    problems += [f"{n} channels are named {name!r}; give each its own name" for name, n in counts.items() if n > 1]
    for ends in actors:
        problems += _number_problems(ends.actor)
        problems += ends.problems
        for end in ends.ends:
            problems += _end_problems(ends.actor, end, channels)
    for channel in channels:
        users = [(ends.actor.name, end.direction) for ends in actors for end in ends.ends if end.channel is channel]
        if not any(direction == "send" for _, direction in users):
            problems.append(f"channel {channel.name!r} has no producer; pass it to an actor's Sender parameter")
        if not any(direction == "receive" for _, direction in users):
            problems.append(f"channel {channel.name!r} has no consumer; pass it to an actor's Receiver parameter")
    for cycle in find_cycles(actors):
        problems.append(
            f"the bounded sends form a cycle, which can wedge with every channel full: {' -> '.join(cycle)}; make one "
            "of the edges non-blocking (a Reply, a Latest, a counter) and draw it with graph.link(...)"
        )
    nodes = {*domains, *(ends.actor.name for ends in actors), *names}
    for source, target, label in links:
        problems += [
            f"link {label!r} names {end!r}, which is no actor; there are: {', '.join(sorted(nodes))}"
            for end in (source, target)
            if end not in nodes
        ]
    return problems


def find_cycles(actors: Sequence[Ends]) -> list[list[str]]:
    """The shortest cycle of bounded sends through each actor that no cycle found before it touches."""
    after: dict[str, list[str]] = {
        ends.actor.name: [
            other.actor.name
            for other in actors
            if any(out is into for out in ends.channels("send") for into in other.channels("receive"))
        ]
        for ends in actors
    }
    cycles: list[list[str]] = []
    for start in after:
        if any(start in cycle for cycle in cycles):
            continue
        paths = deque([[start]])
        seen: set[str] = set()
        while paths:
            path = paths.popleft()
            if start in after[path[-1]]:
                cycles.append([*path, start])
                break
            for name in after[path[-1]]:
                if name not in seen:
                    seen.add(name)
                    paths.append([*path, name])
    return cycles


def _missing(
    parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], given: Iterable[str]
) -> list[str]:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in optional
        and name not in arguments
        and name not in given
    ]


def _number_problems(actor: Actor) -> list[str]:
    who, problems = f"actor {actor.name!r}", []
    if actor.replicas < 1:
        problems.append(f"{who}: replicas = {actor.replicas}; it must be 1 or more")
    if actor.grace < 0:
        problems.append(f"{who}: grace = {actor.grace} seconds; it must be 0 or more")
    if not actor.start_timeout > 0:
        problems.append(f"{who}: start_timeout = {actor.start_timeout} seconds; it must be more than 0")
    return problems


def _end_problems(actor: Actor, end: End, channels: Sequence[Channel[Any]]) -> list[str]:
    channel, carried = end.channel, end.channel.message_type
    where = f"actor {actor.name!r}: parameter {end.parameter!r}"
    if not any(channel is own for own in channels):
        return [f"{where} was given channel {channel.name!r} of another graph; make it with this graph's channel(...)"]
    if end.direction == "send" and not covers(carried, end.message_type):
        return [
            f"{where} sends {_spell(end.message_type)} into channel {channel.name!r}, which carries {_spell(carried)}; "
            "widen the channel's type or narrow the annotation"
        ]
    if end.direction == "receive" and not covers(end.message_type, carried):
        return [
            f"{where} receives {_spell(end.message_type)} from channel {channel.name!r}, which carries "
            f"{_spell(carried)}; widen the annotation or narrow the channel's type"
        ]
    return []


def _end_type(hint: Any) -> tuple[Literal["send", "receive"], Any] | None:
    """Direction and message type of an annotation that is an end, or an end or None."""
    for member in _members(hint):
        origin = get_origin(member) or member
        if origin is Sender or origin is Receiver:
            return ("send" if origin is Sender else "receive"), (get_args(member) or (Any,))[0]
    return None


def covers(wide: Any, narrow: Any) -> bool:
    """Whether every message of type `narrow` is one of type `wide`; unions are taken apart, Any fits everything."""
    return all(any(_fits(one, other) for other in _members(wide)) for one in _members(narrow))


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for argument in get_args(hint) for member in _members(argument))
    return (hint,)


def _fits(narrow: Any, wide: Any) -> bool:
    if narrow == wide or any(hint is Any or isinstance(hint, TypeVar) for hint in (narrow, wide)):
        return True
    origin = get_origin(narrow) or narrow
    return isinstance(origin, type) and isinstance(wide, type) and get_origin(wide) is None and issubclass(origin, wide)


def _spell(hint: Any) -> str:
    if hint is None:
        return "nothing"
    if len(_members(hint)) > 1:
        return " | ".join(_spell(member) for member in _members(hint))
    if get_args(hint):
        return f"{_spell(get_origin(hint))}[{', '.join(_spell(argument) for argument in get_args(hint))}]"
    return getattr(hint, "__name__", str(hint))

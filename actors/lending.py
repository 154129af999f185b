"""What a running graph lends: fresh channel ends for each life of an actor, until the actor is over.

Knows declarations and channels, and from the strategies which restarts may come; when a life begins, an actor is over
or a group restarts, the supervisor says.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import trio
from msgspec import Struct

from trouper.actors.child import ALWAYS, NEVER
from trouper.actors.supervisor import Strategy
from trouper.actors.wiring import Actor, Domain, read_ends
from trouper.channels import Channel, RunError

Direction = Literal["send", "receive"]


class Renewal(Struct, frozen=True):
    """What a restart does, by the names of the actors' copies.

    Attributes:
        cause: the copies in the child whose end brings it about.
        group: the copies that begin again together; the channels that only they use are renewed.
        revived: those of them that begin again even if they had returned.
    """

    cause: frozenset[str]
    group: frozenset[str]
    revived: frozenset[str]


class Lending:
    """Who may still use which channel, by the names of the actors' copies."""

    def __init__(self, root: Domain) -> None:
        self.ends = {copy: ends for ends in map(read_ends, root.actors()) for copy in ends.actor.copies}
        self._users: dict[tuple[Channel[Any], Direction], list[str]] = {}
        for copy, ends in self.ends.items():
            for end in ends.ends:
                self._users.setdefault((end.channel, end.direction), []).append(copy)
        self._renewals = dict(_renewals(root))
        self._significant = [
            (_copies(name, member), domain.copies())
            for domain in (root, *root.domains())
            for name, member in domain.children()
            if member.significant
        ]
        self._over: set[str] = set()

    async def live(self, copy: str, stop: trio.Event, task_status: "trio.TaskStatus[None]") -> None:
        """One life of an actor, with fresh ends."""
        if copy in self._over:  # its ONE_FOR_ONE domain was restarted; it has nothing more to do
            task_status.started()
            return
        ends = self.ends[copy]
        filled = {"stop": stop, "task_status": task_status}
        arguments = {**ends.actor.arguments, **{name: filled[name] for name in ends.given}}
        with ExitStack() as lent:
            for end in ends.ends:
                clone = end.channel.sender() if end.direction == "send" else end.channel.receiver()
                arguments[end.parameter] = lent.enter_context(clone)
            if "task_status" not in ends.given:
                task_status.started()
            try:
                await ends.actor.function(**arguments)
            except* trio.BrokenResourceError as broken:
                unread = [channel for channel in ends.channels("send") if not self._claimed(channel, "receive")]
                if not unread:
                    raise
                raise RunError(self._unread(copy, unread[0])) from broken
            inboxes = ends.channels("receive")
            tolerated = ends.actor.restart is ALWAYS or ends.actor.significant or stop.is_set()
            if inboxes and not tolerated and not any(channel.ended for channel in inboxes):
                raise RunError(
                    f"actor {copy!r} returned, but none of its inboxes ({', '.join(c.name for c in inboxes)}) has "
                    "ended; read one to its end, or declare the actor significant=True if its end ends the graph"
                )

    def give_back(self, copies: Iterable[str]) -> None:
        """These are over; close what nobody claims any more."""
        self._over.update(copies)
        self._close_unclaimed()

    def renew(self, cause: str) -> None:
        """The group that a child's end restarts is about to begin again."""
        renewal = self._renewals[cause]
        self._over -= renewal.revived
        for channel in {channel for channel, _ in self._users}:
            if self._all_users(channel) <= renewal.group:
                channel.renew()
        self._close_unclaimed()  # the channels of those who are not revived

    def _close_unclaimed(self) -> None:
        for channel, direction in self._users:
            if not self._claimed(channel, direction):
                if direction == "send":
                    channel.finish()
                else:
                    channel.abandon()

    def _claimed(self, channel: Channel[Any], direction: Direction) -> bool:
        """Whether somebody uses this side of a channel, or could come back to it."""
        users = self._users[channel, direction]
        if not self._over.issuperset(users):
            return True
        if any(self._may_come_back(copy, channel) for copy in users):
            return True
        # What is significant ends its domain with it: whoever sends to it there is stopped, and need not fail first.
        return direction == "receive" and any(
            not member.isdisjoint(users) and not domain <= self._over for member, domain in self._significant
        )

    def _may_come_back(self, copy: str, channel: Channel[Any]) -> bool:
        """Whether a restart could revive an actor that is over without renewing the channel."""
        users = self._all_users(channel)
        return any(
            copy in renewal.revived and not users <= renewal.group and not renewal.cause <= self._over
            for renewal in self._renewals.values()
        )

    def _all_users(self, channel: Channel[Any]) -> frozenset[str]:
        return frozenset(self._users[channel, "send"]) | frozenset(self._users[channel, "receive"])

    def _unread(self, copy: str, channel: Channel[Any]) -> str:
        return (
            f"actor {copy!r} sent into channel {channel.name!r}, but its consumers "
            f"({', '.join(self._users[channel, 'receive'])}) are over for good; a consumer must read to the end, or be "
            "declared significant=True if its end ends the graph"
        )


def _renewals(domain: Domain) -> Iterator[tuple[str, Renewal]]:
    """What the end of each child, in inner domains too, would restart; without those whose end restarts nothing."""
    children = domain.children()
    together = domain.strategy is not Strategy.ONE_FOR_ONE
    for index, (name, child) in enumerate(children):
        if isinstance(child, Domain):
            yield from _renewals(child)
        if child.restart is not NEVER:
            group = domain.strategy.group(children, index)
            yield (
                name,
                Renewal(
                    cause=_copies(name, child),
                    group=_afresh(group, together),
                    revived=_afresh([member for member in group if member[1].restart is not NEVER], together),
                ),
            )


def _copies(name: str, child: Actor | Domain) -> frozenset[str]:
    return frozenset([name]) if isinstance(child, Actor) else child.copies()


def _afresh(children: Iterable[tuple[str, Actor | Domain]], together: bool) -> frozenset[str]:
    """The copies that begin afresh when these restart; in ONE_FOR_ONE each goes on where its last life was."""
    copies: frozenset[str] = frozenset()
    for name, child in children:
        if isinstance(child, Actor):
            copies |= frozenset([name] if together else [])
        elif together or child.strategy is not Strategy.ONE_FOR_ONE:
            copies |= child.copies()
        else:
            copies |= _afresh(child.children(), together=False)
    return copies

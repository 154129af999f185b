"""What a running graph lends: fresh channel ends for each life of an actor, until the actor is over for good.

Knows declarations and channels; when a life begins or an actor is over, the supervisor says.
"""

from contextlib import ExitStack
from typing import Any

import trio

from trouper.actors.child import Restart
from trouper.actors.wiring import Ends
from trouper.channels import Channel, RunError


class Lending:
    """Who may still use which channel, by the names of the actors' copies."""

    def __init__(self, actors: list[Ends]) -> None:
        self.ends = {copy: ends for ends in actors for copy in ends.actor.copies}
        self._over: set[str] = set()

    async def live(self, copy: str, stop: trio.Event, task_status: "trio.TaskStatus[None]") -> None:
        """One life of an actor, with fresh ends."""
        if copy in self._over:  # its domain was restarted; it has nothing more to do
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
                unread = [channel for channel in ends.channels("send") if self._gone(channel, "receive")]
                if not unread:
                    raise
                raise RunError(self._unread(copy, unread[0])) from broken
            inboxes = ends.channels("receive")
            tolerated = ends.actor.restart is Restart.ALWAYS or ends.actor.significant or stop.is_set()
            if inboxes and not tolerated and not any(channel.ended for channel in inboxes):
                raise RunError(
                    f"actor {copy!r} returned, but none of its inboxes ({', '.join(c.name for c in inboxes)}) has "
                    "ended; read one to its end, or declare the actor significant=True if its end ends the graph"
                )

    def give_back(self, copy: str) -> None:
        """The actor is over for good; close what only it still held open."""
        self._over.add(copy)
        for end in self.ends[copy].ends:
            if self._gone(end.channel, end.direction):
                if end.direction == "send":
                    end.channel.finish()
                else:
                    end.channel.abandon()

    def _users(self, channel: Channel[Any], direction: str) -> list[str]:
        return [
            copy
            for copy, ends in self.ends.items()
            if any(end.channel is channel and end.direction == direction for end in ends.ends)
        ]

    def _gone(self, channel: Channel[Any], direction: str) -> bool:
        return all(copy in self._over for copy in self._users(channel, direction))

    def _unread(self, copy: str, channel: Channel[Any]) -> str:
        return (
            f"actor {copy!r} sent into channel {channel.name!r}, but its consumers "
            f"({', '.join(self._users(channel, 'receive'))}) are over for good; a consumer must read to the end, or be "
            "declared significant=True if its end ends the graph"
        )

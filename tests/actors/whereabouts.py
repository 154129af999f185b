"""Where every attempt and group of a run is, followed over channels and ledger while it runs.

An account of its own, kept beside that of the actors: whatever moves is looked up and booked, and what is in two
places, in none, or where it cannot be is written down. Knows the standard run's channels by name.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import trio

from trouper.actors.ledger import Ledger, Replay, SlotDraw
from trouper.channels import Attempt, Episode, Group, Lost, Receiver, Sender, Void

Member = tuple[int, int]
"""(draw, member)."""


class Whereabouts:
    """Follows what moves.

    Attributes:
        played: the life of a run that is followed.
        wrong: what should not have been, in sentences.
        logged: the group of each slot as the ledger was told it last.
        losses: by the outcomes' own account, attempts that were lost before them.
        moved_at: when anything moved last.
    """

    def __init__(self) -> None:
        self.played: Any = None
        self.moved_at = 0.0
        self.losses = 0
        self.wrong: list[str] = []
        self.logged: dict[int, Group] = {}
        self._life = 0
        self._first_step = 0
        self._members: dict[Member, str] = {}
        self._slots: dict[int, int] = {}  # by draw
        self._voids: set[int] = set()
        self._groups: dict[int, str] = {}
        self._unsynced: set[int] = set()

    def begin_process(self, played: Any) -> None:
        """A new process begins: nothing but the ledger is left of the last one."""
        self.played = played
        self.losses = 0
        self.moved_at = trio.current_time()

    def begin_life(self, life: int, first_slot: int, replay: Replay) -> None:
        """All begins again with what the ledger holds."""
        self._life = life
        self._first_step = first_slot // self.played.config.train.groups_per_step
        self._members, self._slots, self._voids = {}, {}, set()
        self._groups = {group.slot: "ready" for group in replay.groups}
        self._unsynced = set()
        self.logged |= {group.slot: group for group in replay.groups}

    def forget(self, slots: tuple[int, ...]) -> None:
        """Groups of an earlier life cannot be used: only because weights are gone that came after the checkpoint."""
        for slot in slots:
            versions = [row.versions.max() for episode in self.logged[slot].episodes for row in episode.rows]
            self._expect(max(versions, default=-1) > self._first_step, f"complete slot {slot} is rolled again")
            self._groups.pop(slot, None)

    def sends(self, channel: str, message: Any) -> None:
        """A message is about to be sent; from now on it belongs to the channel."""
        match message:
            case Attempt():
                self._expect(_member(message) not in self._members, f"attempt {message.id} is given out twice")
                self._members[_member(message)] = channel
                self._slots.setdefault(message.draw, message.slot)
            case Episode() | Lost():
                self.losses += message.attempt.tries + isinstance(message, Lost)
                self._move(_member(message.attempt), "slot", channel)
            case Void():
                self._expect(message.slot not in self._voids, f"slot {message.slot} is void twice")
                self._voids.add(message.slot)
            case Group():
                self._expect(self._groups.get(message.slot) == "ready", f"group {message.slot} was not ready")
                self._expect(message.slot not in self._unsynced, f"group {message.slot} is not on disk")
                self._groups[message.slot] = channel
        self.look()

    def received(self, channel: str, message: Any) -> None:
        """A message was received."""
        match message:
            case Attempt():
                self._move(_member(message), channel, "slot")
            case Episode() | Lost():
                self._move(_member(message.attempt), channel, "grouper")
            case Group():
                self._expect(self._groups.get(message.slot) == channel, f"group {message.slot} came from nowhere")
                self._groups[message.slot] = "trainer"
        self.look()

    def dropped(self, slot: int) -> None:
        """The grouper gave a group up, and its slot gets another task."""
        self._take_members(slot)

    def completed(self, group: Group, moved: SlotDraw | None) -> None:
        """The grouper has told the ledger of a group."""
        slot = group.slot
        if moved is not None:
            self._expect(
                self._slots[moved.draw] == slot < moved.slot == self._slots[group.draw], "who takes which slot?"
            )
            self._slots[moved.draw], self._slots[group.draw] = moved.slot, slot
        self._expect(slot not in self._groups, f"slot {slot} has ended twice")
        if slot in self._voids:
            self._voids.remove(slot)
            self._expect(not self._of(slot), f"slot {slot} is void, and members of it are about")
        else:
            self._take_members(slot)
            members = len(group.episodes) + group.lost
            size = self.played.config.rollout.num_generations
            self._expect(group.void is not None or members == size, f"group {slot} accounts for {members} members")
        self._expect((group.void is None) == bool(group.episodes), f"group {slot} is void or not?")
        self._groups[slot] = "ready"
        self._unsynced.add(slot)
        self.logged[slot] = group

    def synced(self) -> None:
        """Whatever the ledger was told is on disk."""
        self._unsynced.clear()

    def look(self) -> None:
        """Every admitted slot is open, in exactly one place, or has ended and is on its way to the trainer."""
        self.moved_at = trio.current_time()
        self.balance()

    def balance(self) -> None:
        """As `look`, without a movement."""
        life = getattr(self.played.run, "life", None)
        if life is None or life.number != self._life:  # a life is about to begin
            return
        per_step, size = life.pacer.groups_per_step, self.played.config.rollout.num_generations
        for slot in [slot for slot in self._groups if slot < life.trainer.step * per_step]:
            self._expect(self._groups.pop(slot) == "trainer", f"step {slot // per_step} ended without slot {slot}")
        open_members = Counter((self._slots[draw], draw) for draw, _ in self._members)
        by_slot = {slot: count for (slot, _), count in open_members.items()}
        self._expect(len(by_slot) == len(open_members), f"a slot has members of two draws: {sorted(open_members)}")
        in_hand = 0  # of the source
        for slot in range(life.trainer.step * per_step, life.pacer.admitted):
            members, ended = by_slot.pop(slot, 0), slot in self._groups
            self._expect(ended == life.pacer.has_ended(slot), f"slot {slot} has ended, or not?")
            if ended or life.pacer.awaits_task(slot):
                self._expect(members == 0, f"slot {slot} has ended or waits for a task, and {members} members are open")
            elif slot not in self._voids:
                in_hand += members < size
        self._expect(in_hand <= 1, f"{in_hand} slots are nowhere")
        self._expect(not by_slot, f"members of slots that are not open: {by_slot}")
        places = Counter(self._members.values())
        # Those who play hold what was received; who has just received or is about to send is not counted as busy.
        self._expect(self.played.run.episodes.busy <= places["slot"], "an episode plays that nobody has sent")

    def nothing_left(self) -> bool:
        """Whether nothing is on its way."""
        return not (self._members or self._voids)

    def _take_members(self, slot: int) -> None:
        members = self._of(slot)
        size = self.played.config.rollout.num_generations
        self._expect(
            len(members) == size and {self._members[each] for each in members} == {"grouper"},
            f"slot {slot} ends with members {[(each, self._members[each]) for each in members]} of {size}",
        )
        for each in members:
            del self._members[each]

    def _of(self, slot: int) -> list[Member]:
        return [each for each in self._members if self._slots[each[0]] == slot]

    def _move(self, member: Member, origin: str, target: str) -> None:
        self._expect(
            self._members.get(member) == origin,
            f"member {member} goes from {origin} to {target}, and was at {self._members.get(member)}",
        )
        self._members[member] = target

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:  # not raised: an actor would be restarted because of it
            self.wrong.append(f"life {self._life}: {otherwise}")


def follow(watch: Whereabouts, patch: pytest.MonkeyPatch) -> None:
    """Tell `watch` of everything that moves from now on."""
    send, receive, receive_nowait = Sender.send, Receiver.receive, Receiver.receive_nowait
    begin, forget, drew, complete, sync = Ledger.begin, Ledger.forget, Ledger.drew, Ledger.complete, Ledger.sync

    def followed(channel: str) -> bool:
        return not channel.startswith("eval ")

    async def followed_send(self: Sender[Any], message: Any) -> None:
        if followed(self.name):
            watch.sends(self.name, message)
        await send(self, message)

    async def followed_receive(self: Receiver[Any]) -> Any:
        message = await receive(self)
        if followed(self.name):
            watch.received(self.name, message)
        return message

    def followed_receive_nowait(self: Receiver[Any]) -> Any:
        message = receive_nowait(self)
        if followed(self.name):
            watch.received(self.name, message)
        return message

    def followed_begin(self: Ledger, life: int, first_slot: int) -> Replay:
        replay = begin(self, life, first_slot)
        watch.begin_life(life, first_slot, replay)
        return replay

    def followed_sync(self: Ledger) -> None:
        sync(self)
        watch.synced()

    def before(told: Callable[..., None], then: Callable[..., None]) -> Callable[..., None]:
        def both(self: Ledger, *record: Any) -> None:
            told(*record)
            then(self, *record)

        return both

    def told_drew(draw: SlotDraw) -> None:
        if draw.draw < 0:
            watch.dropped(draw.slot)

    patch.setattr(Sender, "send", followed_send)
    patch.setattr(Receiver, "receive", followed_receive)
    patch.setattr(Receiver, "receive_nowait", followed_receive_nowait)
    patch.setattr(Ledger, "begin", followed_begin)
    patch.setattr(Ledger, "sync", followed_sync)
    patch.setattr(Ledger, "forget", before(watch.forget, forget))
    patch.setattr(Ledger, "drew", before(told_drew, drew))
    patch.setattr(Ledger, "complete", before(watch.completed, complete))


def _member(attempt: Attempt) -> Member:
    return attempt.draw, attempt.member

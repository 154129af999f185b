"""The grouper: collects a slot's members, decides what becomes of lost ones, and computes advantages once a group.

Releases steps in order and, within a step, groups in the order of their completion: each is in the ledger, on disk,
before the trainer may see it. Knows nothing of batches: the advantages are the same however the trainer cuts them.

Where late groups are dropped, a group is trained in the lowest slot that is still played, whichever it was played for;
the task that was given to that slot goes on for the group's own. So slots are filled in the order of completion, and a
group is too late if the step that it would be trained in is too far from the weights that sampled it.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import msgspec
import numpy as np
import trio

from trouper.actors.accelerator import Accelerator
from trouper.actors.ledger import Ledger, SlotDraw
from trouper.actors.pacer import Pacer
from trouper.actors.quarantine import Quarantine
from trouper.actors.redo import oldest_version
from trouper.actors.source import Source
from trouper.actors.trace import NO_TRACK, Track
from trouper.channels import Episode, Group, Lost, Outcome, Receiver, Sender, Void
from trouper.learner.advantage import AdvantageEstimator, ScaleRewards, group_advantages


class Grouper:
    """Makes groups of outcomes.

    Args:
        pacer: is told which slots are closed, and asked to reopen those of dropped groups.
        ledger: remembers every group.
        disk: where the ledger is synced.
        quarantine: is told of groups that were lost whole.
        num_generations: members of a group.
        estimator: see `trouper.learner.advantage`.
        scale_rewards: likewise.
        lost_members: `shrink` keeps a group that has at least `min_members`, `drop` keeps only whole groups.
        min_members: see `lost_members`.
        dynamic_sampling: drop groups whose rewards are all equal while the slot has redraws left.
        drop_late: the source, whose slots change tasks, where groups are trained in the order of completion and late
            ones dropped; None where they are waited for.
        redo: groups that an earlier life had completed, in their order then; the pacer holds their slots for ended.
        track: of the grouper.
    """

    def __init__(
        self,
        pacer: Pacer,
        ledger: Ledger,
        disk: Accelerator,
        quarantine: Quarantine,
        *,
        num_generations: int,
        estimator: AdvantageEstimator,
        scale_rewards: ScaleRewards,
        lost_members: Literal["shrink", "drop"] = "drop",
        min_members: int = 2,
        dynamic_sampling: bool = False,
        drop_late: Source | None = None,
        redo: Sequence[Group] = (),
        track: Track = NO_TRACK,
    ) -> None:
        self._pacer = pacer
        self._ledger = ledger
        self._disk = disk
        self._quarantine = quarantine
        self._num_generations = num_generations
        self._estimator: AdvantageEstimator = estimator
        self._scale_rewards: ScaleRewards = scale_rewards
        self._needed = min_members if lost_members == "shrink" else num_generations
        self._dynamic_sampling = dynamic_sampling
        self._drop_late = drop_late
        self._track = track
        self._members: dict[int, dict[int, Episode | Lost]] = {}
        # The draws that are over, of slots that are open: what still comes of them is too late.
        self._over: dict[int, set[int]] = {}
        # The slots of draws that are out and not for the slot that their attempts name.
        self._moved: dict[int, int] = {}
        self._ready: dict[int, deque[Group]] = {}
        for group in redo:
            self._make_ready(group)
        self._step = pacer.first_step
        self._released = 0
        self.counts: Counter[str] = Counter()
        """`duplicates`, `dropped/lost`, `dropped/no_signal` and `dropped/late`, so far; where late groups are dropped,
        `late/LENGTH` and `in_time/LENGTH` by the mean length of a group's episodes."""

    @property
    def open_groups(self) -> int:
        """Groups that wait for members."""
        return len(self._members)

    async def run(self, inbox: Receiver[Outcome], outbox: Sender[Group]) -> None:
        """Group what comes until the data ends."""
        await self._release(outbox)
        async for outcome in inbox:
            with self._track.span("group"):
                complete = self._accept(outcome)
                with suppress(trio.WouldBlock, trio.EndOfChannel):
                    while True:  # one sync for all that have come
                        complete |= self._accept(inbox.receive_nowait())
            if complete:  # what else the ledger was told may wait for that: any beginning of the log makes sense
                with self._track.span("ledger sync"):
                    await self._disk.run(self._ledger.sync)
            await self._release(outbox)
        await self._release(outbox)  # the end of the data may have made the last step smaller

    def _accept(self, outcome: Outcome) -> bool:
        """Take an outcome in; whether it completed a group."""
        group = self._take(outcome)
        if group is None:
            return False
        moved = None
        if self._drop_late is not None and group.void is None:
            group, moved = self._move_up(group, self._drop_late)
        self._ledger.complete(group, moved)
        self._make_ready(group)
        self._pacer.close(group.slot)
        self._over.pop(group.slot, None)
        return True

    def _move_up(self, group: Group, source: Source) -> tuple[Group, SlotDraw | None]:
        """The group in the lowest slot that is still played, and what its own has in exchange."""
        slot = source.first_played(group.slot)
        moved = None
        if slot != group.slot:
            moved = source.exchange(slot, group.slot)
            self._over.setdefault(group.slot, set()).add(group.draw)
            self._moved[moved.draw] = moved.slot
        episodes = tuple(
            msgspec.structs.replace(episode, attempt=msgspec.structs.replace(episode.attempt, slot=slot))
            for episode in group.episodes
        )
        return msgspec.structs.replace(group, slot=slot, episodes=episodes), moved

    def _make_ready(self, group: Group) -> None:
        self._ready.setdefault(group.slot // self._pacer.groups_per_step, deque()).append(group)

    def _take(self, outcome: Outcome) -> Group | None:
        """The group that this outcome completes, if it does."""
        if isinstance(outcome, Void):
            return _void(outcome.slot, -1, outcome.reason, 0)
        attempt = outcome.attempt
        slot = self._moved.get(attempt.draw, attempt.slot)
        over = self._pacer.has_ended(slot) or attempt.draw in self._over.get(slot, ())
        members = {} if over else self._members.setdefault(attempt.draw, {})
        if over or attempt.member in members:
            self.counts["duplicates"] += 1
            return None
        members[attempt.member] = outcome
        if len(members) < self._num_generations:
            return None
        del self._members[attempt.draw]
        self._moved.pop(attempt.draw, None)
        return self._group(slot, attempt.draw, members)

    def _group(self, slot: int, draw: int, members: dict[int, Episode | Lost]) -> Group | None:
        """What becomes of a slot whose members have all come; None where it is reopened."""
        episodes = tuple(found for _, found in sorted(members.items()) if isinstance(found, Episode))
        lost = len(members) - len(episodes)
        if not episodes:
            self._quarantine.lose([found for found in members.values() if isinstance(found, Lost)])
        if len(episodes) < self._needed:
            self.counts["dropped/lost"] += 1
            return None if self._reopened(slot, draw) else _void(slot, draw, "lost", lost)
        drop_late = self._drop_late
        if drop_late and not self._pacer.allows(drop_late.first_played(slot), oldest_version(episodes)):
            self.counts["dropped/late"] += 1
            self.counts[f"late/{_length(episodes)}"] += 1
            return None if self._reopened(slot, draw, late=True) else _void(slot, draw, "late", lost)
        rewards = [episode.reward for episode in episodes]
        if self._dynamic_sampling and _without_signal(rewards) and self._reopened(slot, draw):
            self.counts["dropped/no_signal"] += 1
            return None
        if drop_late:
            self.counts[f"in_time/{_length(episodes)}"] += 1
        advantages = group_advantages(rewards, estimator=self._estimator, scale_rewards=self._scale_rewards)
        return Group(slot, draw, episodes, advantages, lost=lost)

    def _reopened(self, slot: int, draw: int, *, late: bool = False) -> bool:
        """Whether the slot gets another task in place of this one."""
        reopened = self._pacer.reopen(slot, late=late)
        if reopened:
            self._over.setdefault(slot, set()).add(draw)
            self._ledger.drew(SlotDraw(slot, -1, self._pacer.redraws(slot)))
        return reopened

    async def _release(self, outbox: Sender[Group]) -> None:
        while True:
            ready = self._ready.get(self._step, deque())
            while ready:
                await outbox.send(ready.popleft())
                self._released += 1
            if not self._released or self._released < self._pacer.size(self._step):
                return
            self._ready.pop(self._step, None)
            self._step += 1
            self._released = 0


def _without_signal(rewards: list[float | None]) -> bool:
    given = [reward for reward in rewards if reward is not None]
    return not given or max(given) == min(given)


def _length(episodes: Sequence[Episode]) -> str:
    mean = sum(episode.sampled for episode in episodes) / len(episodes)
    return f"up_to_{1 << max(0, math.ceil(mean) - 1).bit_length()}_tokens"


def _void(slot: int, draw: int, reason: str, lost: int) -> Group:
    return Group(slot, draw, (), np.zeros(0, np.float32), void=reason, lost=lost)

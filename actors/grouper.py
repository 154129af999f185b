"""The grouper: collects a slot's members, decides what becomes of lost ones, and computes advantages once a group.

Releases steps in order and, within a step, groups in the order of their completion: each is in the ledger, on disk,
before the trainer may see it. Knows nothing of batches: the advantages are the same however the trainer cuts them.
"""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
import trio

from trouper.actors.accelerator import Accelerator
from trouper.actors.ledger import Ledger, SlotDraw
from trouper.actors.pacer import Pacer
from trouper.actors.quarantine import Quarantine
from trouper.actors.trace import NO_TRACK, Track
from trouper.channels import Attempt, Episode, Group, Lost, Outcome, Receiver, Sender, Void
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
        self._track = track
        self._members: dict[int, dict[int, Episode | Lost]] = {}
        # The draws whose groups were dropped, of slots that are open: what still comes of them is too late.
        self._dropped: dict[int, set[int]] = {}
        self._ready: dict[int, deque[Group]] = {}
        for group in redo:
            self._make_ready(group)
        self._step = pacer.first_step
        self._released = 0
        self.counts: Counter[str] = Counter()
        """`duplicates`, `dropped/lost` and `dropped/no_signal`, so far."""

    @property
    def open_groups(self) -> int:
        """Groups that wait for members."""
        return len(self._members)

    async def run(self, inbox: Receiver[Outcome], outbox: Sender[Group]) -> None:
        """Group what comes until the data ends."""
        await self._release(outbox)
        async for outcome in inbox:
            with self._track.span("group"):
                self._accept(outcome)
                with suppress(trio.WouldBlock, trio.EndOfChannel):
                    while True:  # one sync for all that have come
                        self._accept(inbox.receive_nowait())
            if not self._ledger.synced:
                with self._track.span("ledger sync"):
                    await self._disk.run(self._ledger.sync)
            await self._release(outbox)
        await self._release(outbox)  # the end of the data may have made the last step smaller

    def _accept(self, outcome: Outcome) -> None:
        group = self._take(outcome)
        if group is not None:
            self._ledger.complete(group)
            self._make_ready(group)
            self._pacer.close(group.slot)
            self._dropped.pop(group.slot, None)

    def _make_ready(self, group: Group) -> None:
        self._ready.setdefault(group.slot // self._pacer.groups_per_step, deque()).append(group)

    def _take(self, outcome: Outcome) -> Group | None:
        """The group that this outcome completes, if it does."""
        if isinstance(outcome, Void):
            return _void(outcome.slot, -1, outcome.reason, 0)
        attempt = outcome.attempt
        late = self._pacer.has_ended(attempt.slot) or attempt.draw in self._dropped.get(attempt.slot, ())
        members = {} if late else self._members.setdefault(attempt.slot, {})
        if late or attempt.member in members:
            self.counts["duplicates"] += 1
            return None
        members[attempt.member] = outcome
        if len(members) < self._num_generations:
            return None
        del self._members[attempt.slot]
        episodes = tuple(found for _, found in sorted(members.items()) if isinstance(found, Episode))
        lost = len(members) - len(episodes)
        if not episodes:
            self._quarantine.lose([found for found in members.values() if isinstance(found, Lost)])
        if len(episodes) < self._needed:
            self.counts["dropped/lost"] += 1
            return None if self._reopened(attempt) else _void(attempt.slot, attempt.draw, "lost", lost)
        rewards = [episode.reward for episode in episodes]
        if self._dynamic_sampling and _without_signal(rewards) and self._reopened(attempt):
            self.counts["dropped/no_signal"] += 1
            return None
        advantages = group_advantages(rewards, estimator=self._estimator, scale_rewards=self._scale_rewards)
        return Group(attempt.slot, attempt.draw, episodes, advantages, lost=lost)

    def _reopened(self, attempt: Attempt) -> bool:
        """Whether the slot gets another task in place of this attempt's."""
        reopened = self._pacer.reopen(attempt.slot)
        if reopened:
            self._dropped.setdefault(attempt.slot, set()).add(attempt.draw)
            self._ledger.drew(SlotDraw(attempt.slot, -1, self._pacer.redraws(attempt.slot)))
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


def _void(slot: int, draw: int, reason: str, lost: int) -> Group:
    return Group(slot, draw, (), np.zeros(0, np.float32), void=reason, lost=lost)

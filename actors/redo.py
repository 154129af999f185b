"""What an earlier life left that is still of use: which slots have which draws, which groups are complete.

A group that was complete is trained again as it was if the weights that sampled it will exist again. They do when every
step before them can be done again from logged groups, in the logged order.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from trouper.actors.config import RunConfig
from trouper.actors.ledger import Ledger, Replay, SlotDraw
from trouper.actors.source import BEGINNING, SourcePosition
from trouper.channels import Episode, Group
from trouper.learner.advantage import group_advantages


class Resumed(Struct, frozen=True, eq=False):
    """Where a new life begins.

    Attributes:
        position: of the source.
        groups: complete groups that are trained as they are, in the order in which they were completed.
        forgotten: slots whose complete groups cannot be used; they are played again with the same task and seeds.
        damaged: what could not be read of the ledger.
    """

    position: SourcePosition
    groups: tuple[Group, ...]
    forgotten: tuple[int, ...]
    damaged: tuple[str, ...]

    def describe(self, life: int, step: int) -> str:
        """One sentence for the log."""
        ended = {group.slot for group in self.groups}
        void = sum(group.void is not None for group in self.groups)
        again = sum(open_.slot not in ended for open_ in self.position.open)
        return (
            f"life {life} goes on after step {step}: {len(ended) - void} complete groups are trained as they are, "
            f"{void} slots stay void, {again} are played again, {len(self.forgotten)} of them although they were "
            "complete, since the weights that sampled them will not exist again"
        )


NOTHING = Resumed(BEGINNING, (), (), ())
"""What a new run finds."""


def begin(
    ledger: Ledger, saved: SourcePosition | None, config: RunConfig, *, life: int, step: int, redo: bool
) -> Resumed:
    """Begin a life in the ledger, and say what earlier ones left for it. Blocks on the disk.

    Args:
        ledger: of the run.
        saved: the checkpoint's; None where none was made.
        config: of the run as it goes on.
        life: which one begins.
        step: steps that the checkpoint has done.
        redo: see `resume`.
    """
    per_step = config.train.groups_per_step
    resumed = resume(
        saved,
        ledger.begin(life, step * per_step),
        first_step=step,
        groups_per_step=per_step,
        max_staleness=config.rollout.max_staleness,
        max_steps=config.train.max_steps,
        redo=redo,
    )
    ledger.forget(resumed.forgotten)
    ledger.sync()
    if redo:
        return resumed
    return msgspec.structs.replace(resumed, groups=tuple(_judged_anew(group, config) for group in resumed.groups))


def _judged_anew(group: Group, config: RunConfig) -> Group:
    """With the advantages that its rewards have under the configuration as it is now."""
    rewards = [episode.reward for episode in group.episodes]
    train = config.train
    advantages = group_advantages(rewards, estimator=train.advantage_estimator, scale_rewards=train.scale_rewards)
    return msgspec.structs.replace(group, advantages=advantages) if group.void is None else group


def resume(
    saved: SourcePosition | None,
    replay: Replay,
    *,
    first_step: int,
    groups_per_step: int,
    max_staleness: int,
    max_steps: int | None,
    redo: bool,
) -> Resumed:
    """Join what a checkpoint says with what the ledger says since.

    Args:
        saved: the checkpoint's; None where none was made.
        replay: the ledger's.
        first_step: steps that the checkpoint has done.
        groups_per_step: slots of a step.
        max_staleness: of the run as it goes on.
        max_steps: likewise; what lies beyond them is left for a run that goes on further.
        redo: whether a step over the same groups gives the same weights again; not so when the configuration changed.
    """
    saved = saved or BEGINNING
    replay = _without_what_is_over(saved, replay) if replay.damaged else replay
    first_slot = first_step * groups_per_step
    end = sys.maxsize if max_steps is None else max_steps * groups_per_step
    slots = {open_.slot: open_ for open_ in saved.open if open_.slot >= first_slot} | replay.draws
    for group in replay.groups:  # a slot that is void may never have been given a task
        slots.setdefault(group.slot, SlotDraw(group.slot, group.draw, 0))
    given = {*saved.used, *replay.used, *(open_.draw for open_ in slots.values())}
    groups, forgotten = _usable(replay.groups, first_step, groups_per_step, max_staleness, redo)
    position = SourcePosition(
        next_draw=saved.next_draw,
        open=tuple(_once_each([slots[slot] for slot in sorted(slots) if slot < end], replay.groups)),
        used=tuple(sorted(draw for draw in given if draw >= saved.next_draw)),
        quarantined={**saved.quarantined, **replay.quarantined},
    )
    groups = tuple(group for group in groups if group.slot < end)
    return Resumed(position, groups, forgotten, replay.damaged)


def _without_what_is_over(saved: SourcePosition, replay: Replay) -> Replay:
    """No open slot gets a draw that the checkpoint knows to be trained or dropped: the log tells what was before."""
    slots, draws, used = {each.slot for each in saved.open}, {each.draw for each in saved.open}, {*saved.used}

    def over(slot: int, draw: int) -> bool:
        return slot in slots and draw not in draws and (0 <= draw < saved.next_draw or draw in used)

    return msgspec.structs.replace(
        replay,
        draws={slot: given for slot, given in replay.draws.items() if not over(slot, given.draw)},
        groups=tuple(group for group in replay.groups if not over(group.slot, group.draw)),
    )


def _once_each(slots: Sequence[SlotDraw], groups: Sequence[Group]) -> Iterator[SlotDraw]:
    """No draw for two slots: where the log is damaged, it may not tell that slots have changed tasks since."""
    holders = {group.draw: group.slot for group in groups if group.draw >= 0}
    for given in slots:
        alone = given.draw < 0 or holders.setdefault(given.draw, given.slot) == given.slot
        yield given if alone else SlotDraw(given.slot, -1, given.redraws)


def oldest_version(episodes: Sequence[Episode]) -> int:
    """Step number of the oldest weights that sampled a token of these episodes."""
    return min(_versions(episodes), default=sys.maxsize)


def _usable(
    groups: Sequence[Group], first_step: int, groups_per_step: int, max_staleness: int, redo: bool
) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    newest = first_step  # step number of the newest weights that will exist without playing anything
    complete = Counter(
        group.slot // groups_per_step for group in groups if _newest(group) <= group.slot // groups_per_step
    )
    while redo and complete[newest] == groups_per_step:
        newest += 1
    kept, forgotten = [], []
    for group in groups:
        step = group.slot // groups_per_step
        if _newest(group) <= min(newest, step) and oldest_version(group.episodes) >= step - max_staleness:
            kept.append(group)
        else:
            forgotten.append(group.slot)
    return tuple(kept), tuple(forgotten)


def _versions(episodes: Sequence[Episode]) -> list[int]:
    return [
        int(version)
        for episode in episodes
        for row in episode.rows
        if row.sampled
        for version in (row.versions[row.loss_mask].min(), row.versions[row.loss_mask].max())
    ]


def _newest(group: Group) -> int:
    return max(_versions(group.episodes), default=-1)

"""What a new life finds: checkpoint and ledger, joined."""

from typing import Any

import msgspec
import numpy as np
import pytest

from trouper.actors.config_file import parse_config
from trouper.actors.ledger import Replay, SlotDraw
from trouper.actors.redo import Resumed, begin, resume
from trouper.actors.source import SourcePosition
from trouper.channels import Group


def replayed(groups: Any = (), draws: Any = (), used: Any = (), quarantined: Any = ()) -> Replay:
    records = {slot: SlotDraw(slot, draw, redraws) for slot, draw, redraws in draws}
    return Replay(records, frozenset(used), tuple(groups), dict(quarantined), ())


def resumed(saved: SourcePosition | None, replay: Replay, **given: Any) -> Resumed:
    settings = {"first_step": 0, "groups_per_step": 2, "max_staleness": 1, "max_steps": None, "redo": True, **given}
    return resume(saved, replay, **settings)


@pytest.fixture
def group(episode: Any) -> Any:
    """Makes a complete group whose tokens were sampled under these versions."""

    def make(slot: int, *versions: int) -> Group:
        member = episode(slot, 0, 1.0)
        row = member.rows[0]
        size = len(versions)
        row = msgspec.structs.replace(
            row,
            tokens=np.ones(size, np.int32),
            loss_mask=np.ones(size, np.bool_),
            logprobs=np.zeros(size, np.float32),
            versions=np.array(versions, np.int32),
        )
        return Group(slot, slot, (msgspec.structs.replace(member, rows=(row,)),), np.zeros(1, np.float32))

    return make


def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on_from_its_ledger(group) -> None:
    groups = [group(1, 0), group(0, 0)]
    found = resumed(None, replayed(groups, draws=[(0, 0, 0), (1, 1, 0), (2, 2, 0)], used=[0, 1, 2]))
    assert [each.slot for each in found.groups] == [1, 0]  # in the order in which they were complete
    assert found.position.open == (SlotDraw(0, 0, 0), SlotDraw(1, 1, 0), SlotDraw(2, 2, 0))
    assert found.position.used == (0, 1, 2)


def test_groups_are_of_use_as_far_as_their_weights_will_exist_again(group) -> None:
    # Steps 0 and 1 are whole, so weights 1 and 2 will exist again, and weights 3 will not.
    whole = [group(0, 0), group(1, 0), group(3, 0, 1), group(2, 1)]
    found = resumed(None, replayed([*whole, group(4, 2), group(5, 1, 3)]), max_staleness=2)
    assert [each.slot for each in found.groups] == [0, 1, 3, 2, 4]
    assert found.forgotten == (5,)


def test_with_another_configuration_only_groups_of_weights_that_exist_are_of_use(group) -> None:
    groups = [group(2, 1), group(3, 1), group(4, 1, 2), group(5, 1)]
    found = resumed(SourcePosition(6, ()), replayed(groups), first_step=1, redo=False)
    assert [each.slot for each in found.groups] == [2, 3, 5]
    assert found.forgotten == (4,)


def test_groups_that_are_too_old_for_a_smaller_bound_are_played_again(group) -> None:
    groups = [group(4, 0), group(5, 1)]
    found = resumed(None, replayed(groups), first_step=2, max_staleness=1, redo=False)
    assert ([each.slot for each in found.groups], found.forgotten) == ([5], (4,))


def test_the_ledger_is_younger_than_the_checkpoint_and_overrules_it() -> None:
    saved = SourcePosition(4, (SlotDraw(2, 2, 0), SlotDraw(3, 3, 0)), (6,), {"a": "old"})
    found = resumed(saved, replayed(draws=[(3, 7, 1), (4, 4, 0)], used=[4, 5, 7], quarantined={"b": "new"}.items()))
    assert found.position.open == (SlotDraw(2, 2, 0), SlotDraw(3, 7, 1), SlotDraw(4, 4, 0))
    assert found.position.next_draw == 4
    assert found.position.used == (4, 5, 6, 7)
    assert found.position.quarantined == {"a": "old", "b": "new"}


def test_what_lies_beyond_fewer_steps_is_left_alone(group) -> None:
    replay = replayed([group(2, 1), group(4, 1)], draws=[(2, 2, 0), (3, 3, 0), (4, 4, 0), (5, 5, 0)])
    found = resumed(None, replay, first_step=1, max_steps=2)
    assert [each.slot for each in found.groups] == [2]
    assert [each.slot for each in found.position.open] == [2, 3]
    assert found.forgotten == ()
    # Under another configuration what lies beyond is as useless as the rest, and must not be trusted later.
    changed = resumed(None, replayed([group(2, 1), group(4, 2)]), first_step=1, max_steps=2, redo=False)
    assert ([each.slot for each in changed.groups], changed.forgotten) == ([2], (4,))
    assert resumed(None, replay, first_step=1, max_steps=1).position.open == ()


def test_a_damaged_log_gives_no_task_to_two_slots(group) -> None:
    """What told that slots 1 and 3, and then 2 and 3, had changed tasks is lost, as far as slot 1 is concerned."""
    complete = msgspec.structs.replace(group(2, 0), draw=1)
    replay = replayed([complete], draws=[(0, 0, 0), (1, 1, 2), (2, 1, 0), (3, 2, 0), (4, 2, 1)])
    found = resumed(None, replay)
    assert found.position.open == (
        SlotDraw(0, 0, 0),
        SlotDraw(1, -1, 2),
        SlotDraw(2, 1, 0),
        SlotDraw(3, 2, 0),
        SlotDraw(4, -1, 1),
    )


def test_a_damaged_log_gives_no_task_again_that_the_checkpoint_knows_to_be_over(group) -> None:
    """What told that slots 1 and 2 had changed tasks is lost, and so is what slots 4 and 5 were given later."""
    saved = SourcePosition(6, (SlotDraw(2, 1, 0), SlotDraw(3, 3, 1), SlotDraw(4, 4, 0), SlotDraw(5, -1, 1)), (7,))
    stale = msgspec.structs.replace(group(5, 1), draw=0)
    replay = replayed([stale], draws=[(2, 2, 0), (3, 8, 2), (4, 7, 0), (5, 0, 0), (6, 5, 0)], used=[0, 2, 5, 7, 8])
    found = resumed(saved, msgspec.structs.replace(replay, damaged=("damaged",)), first_step=1)
    # Slot 6 lay beyond the steps of the life that wrote the checkpoint: of that it knows nothing.
    assert found.position.open == (
        SlotDraw(2, 1, 0),
        SlotDraw(3, 8, 2),
        SlotDraw(4, 4, 0),
        SlotDraw(5, -1, 1),
        SlotDraw(6, 5, 0),
    )
    assert found.groups == ()


def test_void_slots_stay_void() -> None:
    void = Group(1, -1, (), np.zeros(0, np.float32), void="end_of_data")
    found = resumed(None, replayed([void]))
    assert [(each.slot, each.void) for each in found.groups] == [(1, "end_of_data")]
    assert found.position.open == (SlotDraw(1, -1, 0),)
    assert found.position.used == ()


def test_kept_groups_have_the_advantages_of_the_configuration_as_it_is_now(ledger, episode) -> None:
    members = tuple(episode(0, member, reward) for member, reward in enumerate([1.0, 0.0, 0.0, 0.0]))
    ledger.complete(Group(0, 0, members, np.array([1.7, -0.6, -0.6, -0.6], np.float32)))
    ledger.sync()
    config = parse_config(
        {
            "tasks": {"source": "a:b"},
            "model": {"source": "m"},
            "train": {"advantage_estimator": "dr_grpo", "scale_rewards": "none"},
        }
    )
    (as_it_was,) = begin(ledger, None, config, life=2, step=0, redo=True).groups
    (anew,) = begin(ledger, None, config, life=3, step=0, redo=False).groups
    assert as_it_was.advantages == pytest.approx([1.7, -0.6, -0.6, -0.6])
    assert anew.advantages == pytest.approx([0.75, -0.25, -0.25, -0.25])

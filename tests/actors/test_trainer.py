"""The trainer inside a whole run: steps, ends, stops and what a checkpoint holds."""

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import trio

from trouper.actors.simulation import SimulatedLearner
from trouper.actors.trainer import CheckpointMeta
from trouper.channels import HopelessRun, NumericsError
from trouper.envs import Conversation, StepResult

STEADY = {"max_concurrency": 1, "max_staleness": 0}
"""One episode at a time: groups arrive in the order of their slots."""


class Counting(SimulatedLearner):
    """Notes every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def add(self, groups: Any) -> None:
        self.calls.append("add")
        super().add(groups)

    def update(self) -> dict[str, float]:
        self.calls.append("update")
        return super().update()

    def publish(self) -> Any:
        self.calls.append("publish")
        return super().publish()


class Broken:
    def reset(self, task: Any) -> str:
        raise OSError("no world")


class Endless:
    """Never done: the conversation's limit ends it."""

    async def reset(self, task: Any) -> str:
        return "a"

    async def step(self, action: str) -> StepResult:
        return StepResult("b")


async def test_groups_are_added_as_they_come_and_a_step_is_taken_when_all_are_there(autojump_clock, play) -> None:
    learner = Counting()
    played = await play(learner=learner, rollout=STEADY, train={"max_steps": 2})()
    assert learner.calls == ["publish", *["add", "add", "update", "publish"] * 2]
    assert [step for step, _ in learner.trained] == [0, 0, 1, 1]
    assert played.metrics.keys() == {1, 2}
    assert played.metrics[1]["time/train"] == pytest.approx(1.4)


@pytest.mark.parametrize("every", [1, 2, 3])
async def test_weights_are_published_every_so_many_steps_and_at_the_end(autojump_clock, play, every) -> None:
    learner = Counting()
    played = await play(
        learner=learner, train={"max_steps": 5}, sync={"weight_sync_steps": every}, rollout={"max_staleness": 2}
    )()
    assert learner.calls.count("publish") == 1 + -(-5 // every)
    assert played.run.barrier.attested.value.step == 5


# The end of the data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop_last", "steps", "last"), [(False, 3, [4]), (True, 2, [2, 3])])
async def test_when_data_ends_a_short_last_step_is_trained_or_left_out(
    autojump_clock, play, stream, drop_last, steps, last
) -> None:
    played = await play(tasks=stream(5), train={"max_steps": 100, "drop_last": drop_last})()
    assert played.run.life.trainer.step == steps
    assert sorted(slot for step, slot, _ in played.draws if step == steps - 1) == last
    assert played.checkpoints.latest() == steps
    assert drop_last == any("1 of 2 groups for step 3; train.drop_last" in note for note in played.screen.notes)


async def test_when_the_last_task_is_lost_nobody_waits_for_a_step_that_cannot_fill(
    autojump_clock, play, stream, letters
) -> None:
    class Last(letters):
        async def reset(self, task: Any) -> str:
            if task.id == "4":
                raise OSError("gone")
            return await super().reset(task)

    played = await play(tasks=stream(5), make_environment=Last, rollout=STEADY, train={"max_steps": 100})()
    assert {slot for _, slot, _ in played.draws} == {0, 1, 2, 3, 4}
    assert played.groups[-1][1].void in ("lost", "end_of_data")
    assert (played.run.life.trainer.step, played.learner.step) == (3, 2)


async def test_without_an_end_of_the_data_every_step_is_whole(autojump_clock, play) -> None:
    played = await play(train={"max_steps": 100}, rollout={"max_concurrency": 32})()
    assert [(step, slot) for step, slot, _ in sorted(played.draws)] == [(slot // 2, slot) for slot in range(200)]


# Steps with nothing to train -----------------------------------------------------------------------------------


async def test_void_steps_advance_the_weights_number_without_an_update_or_a_copy(autojump_clock, play) -> None:
    learner = Counting()
    given = {"max_redraws": 0, "max_attempts": 1, "max_consecutive_lost": 100}
    played = await play(learner=learner, make_environment=Broken, rollout=given, train={"max_steps": 4})()
    assert learner.calls == ["publish"]
    assert played.run.barrier.attested.value.step == played.run.life.trainer.step == 4
    assert [played.metrics[step]["async/void/lost"] for step in range(1, 5)] == [2] * 4
    assert played.checkpoints.latest() == 4


async def test_too_many_void_steps_are_hopeless(autojump_clock, play) -> None:
    given = {"max_redraws": 0, "max_attempts": 1, "max_consecutive_lost": 10**6}
    with pytest.raises(HopelessRun, match=r"3 steps in a row .*\(lost\); train.max_empty_steps"):
        await play(make_environment=Broken, rollout=given, train={"max_steps": None, "max_empty_steps": 3})()


async def test_steps_of_nothing_but_truncated_episodes_are_empty_when_those_are_masked(autojump_clock, play) -> None:
    learner = Counting()
    masked = play(
        learner=learner, make_environment=Endless, rollout={"mask_truncated": True}, train={"max_empty_steps": 2}
    )
    with pytest.raises(HopelessRun, match="every episode was cut short or has no reward"):
        await masked()
    assert "update" not in learner.calls
    trained = await play(make_environment=Endless)()
    assert all(each.status == "max_turns" for _, group in trained.learner.trained for each in group.episodes)
    assert trained.learner.step == 4


class Unjudged(Endless):
    """Cannot say what an episode is worth."""

    def reward(self) -> None:
        return None


async def test_steps_without_a_single_reward_are_empty(autojump_clock, play) -> None:
    learner = Counting()
    with pytest.raises(HopelessRun, match=r"2 steps in a row .* has no reward"):
        await play(learner=learner, make_environment=Unjudged, train={"max_empty_steps": 2})()
    assert "update" not in learner.calls


async def test_masked_members_leave_the_others_with_their_advantages(autojump_clock, play) -> None:
    rollout = {"mask_truncated": True, "num_generations": 6}
    played = await play(rollout=rollout, train={"max_steps": 8})()
    whole = {group.slot: group for _, group in played.groups}
    masked = 0
    for _, group in played.learner.trained:
        kept = [index for index, each in enumerate(whole[group.slot].episodes) if each.status == "done"]
        masked += 6 - len(kept)
        assert group.episodes == tuple(whole[group.slot].episodes[index] for index in kept)
        assert np.array_equal(group.advantages, whole[group.slot].advantages[kept])
    assert 0 < masked < 6 * len(played.groups)


async def test_ids_that_were_not_sampled_are_never_trained(autojump_clock, play, monkeypatch) -> None:
    rows = Conversation.rows

    def forged(self: Any) -> Any:
        return tuple(msgspec.structs.replace(row, tokens=(row.tokens + 1) % 15) for row in rows(self))

    monkeypatch.setattr(Conversation, "rows", forged)
    with pytest.raises(NumericsError, match="are not the ids that were sampled"):
        await play()()


# Stop and resume -----------------------------------------------------------------------------------------------


def meta(played: Any) -> CheckpointMeta:
    return msgspec.convert(played.checkpoints.restore(played.checkpoints.latest())[1], CheckpointMeta)


async def test_a_stop_in_the_middle_of_a_step_saves_the_last_whole_one(autojump_clock, play) -> None:
    learner = Counting()
    played = await play(learner=learner, stop_at=24.0, rollout=STEADY, train={"max_steps": 9})()
    assert learner.calls[-3:] == ["update", "publish", "add"]  # one group of the next step had come
    saved = meta(played)
    assert saved.step == played.run.life.trainer.step == learner.step == 1
    assert [(each.slot, each.draw) for each in saved.source.open] == [(2, 2), (3, 3)]
    assert saved.source.next_draw == 4
    assert trio.current_time() < 26


async def test_a_stop_before_the_first_step_saves_nothing(autojump_clock, play) -> None:
    played = await play(stop_at=1.0)()
    assert played.checkpoints.saved == {}


@pytest.mark.parametrize("seed", range(25))
def test_lives_cut_short_at_any_moment_train_what_one_long_life_trains(run_seeded, play, seed) -> None:
    random = Random(seed)
    sections = {
        "train": {"max_steps": 6, "groups_per_step": random.randint(1, 3)},
        "rollout": {"max_staleness": random.randint(0, 2), "max_concurrency": random.randint(1, 9)},
        "checkpoint": {"save_interval_steps": random.randint(0, 2)},
    }
    whole = play(**sections)
    run_seeded(seed, whole)
    life, trained = play(stop_at=random.uniform(0, 25), **sections), []
    while True:
        run_seeded(seed, life)
        done = life.checkpoints.latest() or 0
        trained += [draw for draw in life.draws if draw[0] < done]
        assert done == (life.run.life.trainer.step if life.stop_at is not None else 6)
        if done == 6:
            break
        limit = random.uniform(0, 25) if life.life < 4 else None
        life = play(resume=life, stop_at=limit, **sections)
    assert sorted(trained) == sorted(whole.draws)
    assert [step for step, _, _ in trained] == sorted(step for step, _, _ in trained)
    assert life.learner.step == 6
    assert list(life.metrics) == [1, 2, 3, 4, 5, 6]

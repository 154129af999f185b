"""Evaluation beside training, in a whole run."""

import math
from typing import Any

import pytest
import trio

from trouper.actors.simulation import SimulatedLearner
from trouper.envs import Rewards

EVERY_2 = {"every_steps": 2, "tasks": {"source": "held:out"}, "count": 3, "pass_reward": 0.5}


async def nothing(task: Any, messages: Any, text: str) -> None:
    return None


def evaluations(played: Any) -> dict[int, dict[str, float]]:
    return {
        step: {name.removeprefix("eval/held_out/"): value for name, value in record.items() if name.startswith("eval/")}
        for step, record in played.metrics.items()
        if "eval/held_out/lost" in record
    }


async def test_the_base_rate_comes_first_and_the_final_weights_last(autojump_clock, play, stream) -> None:
    played = await play(held_out=stream(), evaluation=EVERY_2, train={"max_steps": 5})()
    found = evaluations(played)
    assert list(found) == [0, 2, 4, 5]
    for step, record in found.items():
        assert 0 <= record["pass@1"] <= 1
        assert record["lost"] == 0
        assert 0 <= record["oldest_weights"] <= step <= record["newest_weights"] <= 5
    assert (found[5]["oldest_weights"], found[5]["newest_weights"]) == (5, 5)
    assert played.run.life.trainer.step == 5  # no training slot was taken
    assert len(played.learner.trained) == 10


async def test_the_same_tasks_and_seeds_each_time_and_pass_at_k(autojump_clock, play, stream) -> None:
    evaluation = {**EVERY_2, "samples": 4, "temperature": 1.0}
    found = evaluations(await play(held_out=stream(2), evaluation=evaluation)())
    assert len({(record["pass@1"], record["pass@4"], record["reward"]) for record in found.values()}) == 1
    assert all(record["pass@4"] >= record["pass@1"] for record in found.values())


@pytest.mark.parametrize("count", [0, 2])
async def test_held_out_tasks_may_be_fewer_than_asked_for(autojump_clock, play, stream, count) -> None:
    found = evaluations(await play(held_out=stream(count), evaluation=EVERY_2)())
    assert len(found) == 3
    assert all(("reward" in record) == bool(count) for record in found.values())


async def test_an_evaluation_that_loses_everything_says_so_and_training_goes_on(
    autojump_clock, play, stream, letters
) -> None:
    class TrainingOnly(letters):
        async def reset(self, task: Any) -> str:
            if task.payload["draw"] < 100:
                return await super().reset(task)
            raise OSError("not here")

    class Held(stream):
        def task(self, draw: int) -> Any:
            return super().task(draw + 100)

    evaluation = {**EVERY_2, "count": 40}
    played = await play(
        make_environment=TrainingOnly, held_out=Held(), evaluation=evaluation, rollout={"max_consecutive_lost": 5}
    )()
    for record in evaluations(played).values():
        assert record == {"lost": 40, "seconds": record["seconds"]}
    assert played.learner.step == 4
    assert played.total("env/failures/env_error") == 0


async def test_episodes_without_a_reward_have_not_passed(autojump_clock, play, stream) -> None:
    unjudged = Rewards({"nothing": nothing}, [1.0])
    found = evaluations(await play(held_out=stream(), evaluation=EVERY_2, rewards=unjudged)())
    assert all(record["pass@1"] == 0 and "reward" not in record for record in found.values())


async def test_episodes_in_which_the_model_never_spoke_are_evaluated(autojump_clock, play, stream) -> None:
    async def mute(talk: Any, world: Any) -> None:
        await world.reset()

    found = evaluations(await play(held_out=stream(), evaluation=EVERY_2, agent=mute)())
    assert all(record["reward"] == 0 and "oldest_weights" not in record for record in found.values())


@pytest.mark.parametrize("mode", ["in_flight", "drain"])
async def test_a_slow_evaluation_holds_no_sync(autojump_clock, play, stream, letters, mode) -> None:
    class Slow(letters):
        async def step(self, action: str) -> Any:
            await trio.sleep(0.0 if self.task.payload["draw"] < 100 else 50.0)
            return await super().step(action)

        async def reset(self, task: Any) -> str:
            self.task = task
            return await super().reset(task)

    class Held(stream):
        def task(self, draw: int) -> Any:
            return super().task(draw + 100)

    played = await play(make_environment=Slow, held_out=Held(), evaluation=EVERY_2, sync={"mode": mode})()
    metrics = played.metrics
    assert metrics[4]["time"] < 20
    assert math.fsum(metrics[step]["time/weight_sync"] for step in range(1, 5)) < 2
    assert evaluations(played)[0]["newest_weights"] == 4  # the base rate's last turns came after training


async def test_training_and_evaluation_of_the_same_draws_do_not_touch_each_other(autojump_clock, play, stream) -> None:
    alone = await play()()
    beside = await play(held_out=stream(), evaluation={**EVERY_2, "temperature": 1.0}, engine={"slots": 32})()

    def ids(played: Any) -> list[Any]:
        return sorted(
            (each.attempt.id, each.rows[0].tokens.tolist()) for _, group in played.groups for each in group.episodes
        )

    assert ids(alone) == ids(beside)
    assert beside.run.breaker.lost == {}


async def test_evaluations_of_steps_that_are_done_again_are_done_again(autojump_clock, play, stream) -> None:
    class Once(SimulatedLearner):
        failed = False

        def update(self) -> dict[str, float]:
            if self.step == 7 and not self.failed:
                self.failed = True
                raise MemoryError("once")
            return super().update()

    given = {
        "evaluation": {"every_steps": 3, "tasks": {"source": "held:out"}, "count": 1},
        "train": {"max_steps": 10},
        "checkpoint": {"save_interval_steps": 5},
    }
    whole = await play(held_out=stream(1), **given)()
    played = await play(held_out=stream(1), learner=Once(), **given)()
    assert played.run.life.number == 2

    def evaluated(each: Any) -> list[int]:
        return [step for step, record in each.metrics.items() if any(name.startswith("eval/") for name in record)]

    assert evaluated(played) == evaluated(whole) == [0, 3, 6, 9, 10]

"""The real graph (supervisor, channels, pacer, slots, grouper, barrier, trainer) on a simulated device."""

from random import Random
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from trouper.actors.simulation import SimulatedAccelerator, SimulatedEngine, default_seconds
from trouper.channels import HopelessRun, Message, RestartLimit, SamplerError, SyncError, Task
from trouper.envs import Rewards, StepResult, TaskList


async def test_an_environment_that_raises_in_a_tenth_of_its_steps_costs_attempts_and_nothing_else(
    autojump_clock, play, letters
) -> None:
    random = Random(0)

    class Shaky(letters):
        async def step(self, action: str) -> Any:
            if random.random() < 0.1:
                raise OSError("env 42")
            return await super().step(action)

    played = await play(make_environment=Shaky, train={"max_steps": 20, "groups_per_step": 4})()
    lost = played.total("env/failures/env_error")
    assert 20 < lost == played.run.breaker.lost["env_error"]
    assert played.total("env/restarts") == lost
    assert played.learner.step == 20
    assert sum(len(group.episodes) for _, group in played.groups) == 160
    log = (played.directory / "log.txt").read_text()
    assert log.count("was lost: env_error: step: OSError: env 42") == lost
    assert log.count("Traceback") == 1
    assert not played.screen.notes  # what may come often does not flood the screen


@pytest.mark.parametrize("concurrency", [1, 16])
async def test_a_sampler_that_refuses_everything_ends_the_run_at_once(autojump_clock, play, concurrency) -> None:
    class Refusing(SimulatedEngine):
        def check(self, request: Any) -> None:
            raise SamplerError("out of order")

    with pytest.raises(HopelessRun, match="First cause of sampler_error: out of order"):
        await play(make_engine=Refusing, rollout={"max_concurrency": concurrency})()
    assert trio.current_time() == 0


async def test_a_device_that_is_gone_for_good_ends_the_run_with_its_error(autojump_clock, play) -> None:
    class Dead(SimulatedEngine):
        def decode(self) -> Any:
            raise RuntimeError("device lost")

    with pytest.raises(RestartLimit, match=r"'sampler'.*device lost"):
        await play(make_engine=Dead)()


async def test_weights_that_cannot_be_attested_end_the_run_by_name(autojump_clock, play) -> None:
    class Corrupt(SimulatedEngine):
        def checksum(self) -> int:
            return 1

    with pytest.raises(SyncError, match=r"sampler 0 could not be brought to weights \(1, 0\)"):
        await play(make_engine=Corrupt)()


async def test_a_long_run_leaves_nothing_behind(autojump_clock, play) -> None:
    played = await play(train={"max_steps": 150}, checkpoint={"save_interval_steps": 0})()
    run = played.run
    assert len(run.life.source.position(0).open) == 0
    assert run.life.pacer.redraws(0) == 0
    for left in (run.sampler._waiting, run.sampler._running, run.life.grouper._ready):
        assert not left


async def test_the_last_weights_wait_for_nobody(autojump_clock, play) -> None:
    """The last publication comes when every asker has long ended: nobody waits for an attestation then."""
    played = await play(rollout={"max_staleness": 2}, train={"max_steps": 3})()
    assert played.run.sampler.ended
    assert played.seconds < 20


# What hangs, lags or lies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["create", "reset", "step", "reward", "judge", "agent", "model"])
async def test_whatever_hangs_all_groups_are_delivered_whole(autojump_clock, play, letters, where) -> None:
    hung: list[str] = []

    async def perhaps(here: str) -> None:
        if here == where and len(hung) < 3:
            hung.append(here)
            await trio.sleep_forever()

    class Hanging(letters):
        async def reset(self, task: Task) -> str:
            await perhaps("reset")
            return await super().reset(task)

        async def step(self, action: str) -> StepResult:
            await perhaps("step")
            return await super().step(action)

        async def reward(self) -> float:
            await perhaps("reward")
            return super().reward()

    async def make() -> Hanging:
        await perhaps("create")
        return Hanging()

    async def agent(talk: Any, world: Any) -> None:
        talk.user(await world.reset())
        while not world.done:
            await perhaps("agent")
            turn = await talk.generate()
            talk.user(await world.step(turn.text))

    async def judge(task: Task, messages: tuple[Message, ...], text: str) -> float:
        await perhaps("judge")
        return 0.5

    class Mute(SimulatedEngine):
        def submit(self, request: Any) -> None:
            if where == "model" and len(hung) < 3:
                hung.append("model")  # it is never answered
            else:
                super().submit(request)

    rewards = Rewards({"judge": judge}, (1.0,))
    played = await play(make_environment=make, agent=agent, rewards=rewards, make_engine=Mute)()
    assert hung == [where] * 3
    assert [len(group.episodes) for _, group in played.groups] == [2] * 8
    assert played.run.breaker.lost.total() == 3
    # A hang costs its attempt, and only that: the three overlap or follow each other, and the rest goes on.
    limit = 600 if where in ("agent", "model") else 60
    assert limit <= played.seconds <= 3 * (limit + 30)


async def test_a_slow_consumer_gets_every_group_and_what_waits_for_it_is_bounded(autojump_clock, play) -> None:
    def slow(name: str) -> SimulatedAccelerator:
        return SimulatedAccelerator(name, lambda call: 1000.0 if call == "update" else default_seconds(call))

    played = await play(
        make_accelerator=slow, train={"max_steps": 25}, rollout={"max_staleness": 2, "max_concurrency": 64}
    )()
    assert len(played.groups) == 50
    assert all(channel.peak <= channel.capacity for channel in played.run.graph.statistics())
    # Three steps of 2 groups of 2 are admitted at a time, wherever they wait.
    sampled = [(step, row.versions[row.loss_mask].min()) for step, group in played.groups for row in rows(group)]
    assert max(step - oldest for step, oldest in sampled) == 2


def rows(group: Any) -> list[Any]:
    return [row for episode in group.episodes for row in episode.rows]


async def test_every_member_of_a_group_gets_a_completion_of_its_own(autojump_clock, play) -> None:
    played = await play(rollout={"num_generations": 8, "max_concurrency": 16})()
    for _, group in played.groups:
        assert len({tuple(row.tokens) for row in rows(group)}) == 8


async def test_an_infinite_reward_is_refused_and_leaves_its_group_something_to_learn(autojump_clock, play) -> None:
    given: list[float] = []

    async def boundless(task: Task, messages: tuple[Message, ...], text: str) -> float:
        given.append(float("inf") if len(given) % 5 == 0 else len(given))
        return given[-1]

    played = await play(rewards=Rewards({"boundless": boundless}, (1.0,)))()
    infinite = given.count(float("inf"))
    assert infinite == played.total("env/failures/reward_error") > 0
    for _, group in played.groups:
        assert len(group.episodes) == 2
        assert np.isfinite([episode.reward for episode in group.episodes]).all()
        assert np.abs(group.advantages).min() > 0.5
    log = (played.directory / "log.txt").read_text()
    assert log.count("reward function 'boundless' returned inf") == infinite


async def test_tool_calls_of_a_groups_members_run_side_by_side(autojump_clock, play, letters) -> None:
    class Slow(letters):
        def __init__(self) -> None:
            self.tools = (self.look_up,)

        async def look_up(self, word: str) -> str:
            """Takes its time."""
            await trio.sleep(50)
            return word

    async def agent(talk: Any, world: Any) -> None:
        talk.user(await world.reset())
        turn = await talk.generate()
        result = await world.call("look_up", {"word": turn.text})
        talk.user(await world.step(result.text))

    played = await play(
        make_environment=Slow,
        agent=agent,
        rollout={"num_generations": 16, "max_concurrency": 16},
        train={"max_steps": 1, "groups_per_step": 1},
        engine={"slots": 16},
    )()
    assert len(played.groups[0][1].episodes) == 16
    assert 50 < played.seconds < 60


@pytest.mark.parametrize("staleness", [0, 2])
async def test_stragglers_a_thousand_times_slower_are_trained_within_the_bound(
    autojump_clock, play, letters, staleness
) -> None:
    made: list[Any] = []

    class Straggling(letters):
        async def reset(self, task: Task) -> str:
            made.append(task)
            self.seconds = 1000.0 if len(made) % 11 == 0 else 1.0
            return await super().reset(task)

        async def step(self, action: str) -> StepResult:
            await trio.sleep(self.seconds - 1.0)
            return await super().step(action)

    played = await play(
        make_environment=Straggling,
        environment={"isolation": "inline", "step_timeout": 2000.0},
        rollout={"max_staleness": staleness, "max_concurrency": 32, "episode_timeout": 10_000.0},
        train={"max_steps": 12},
    )()
    assert len(played.groups) == 24
    assert played.run.breaker.lost.total() == 0  # nobody is thrown away for being late
    ages = [step - row.versions[row.loss_mask] for step, group in played.groups for row in rows(group)]
    assert max(age.max() for age in ages) == staleness
    assert min(age.min() for age in ages) >= 0
    # 4 stragglers of 3 slow calls each: with 0 each holds up its own step, with 2 those of near steps overlap.
    assert played.seconds < (12_200 if staleness == 0 else 9_500)


# Data, producers, resume -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 8])
async def test_batches_run_on_across_passes_over_the_data(autojump_clock, play, count) -> None:
    records = TaskList([Task(str(number), {}) for number in range(count)], seed=7)
    played = await play(tasks=records, train={"max_steps": 10})()
    passes = sorted(played.draws)
    ids = [records.task(draw).id for _, _, draw in passes]
    for begin in range(0, 20 - count + 1, count):
        assert sorted(ids[begin : begin + count]) == sorted(map(str, range(count)))


async def test_environments_that_all_break_end_the_run_with_the_first_cause(autojump_clock, play, letters) -> None:
    steps: list[str] = []

    class Breaking(letters):
        async def step(self, action: str) -> StepResult:
            steps.append(action)
            if len(steps) > 3:
                raise OSError(f"the world broke at step {len(steps)}")
            return await super().step(action)

    with pytest.raises(HopelessRun, match="First cause of env_error: step: OSError: the world broke at step 4"):
        await play(make_environment=Breaking, rollout={"max_concurrency": 4, "max_consecutive_lost": 16})()
    assert trio.current_time() < 100


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("concurrency", [1, 2, 6])
async def test_what_was_in_flight_at_a_kill_is_trained_once_and_in_its_place(
    autojump_clock, play, shuffle, concurrency
) -> None:
    records = TaskList([Task(str(number), {}) for number in range(8)], epochs=1, shuffle=shuffle, seed=7)
    given: dict[str, Any] = {
        "rollout": {"num_generations": 1, "max_concurrency": concurrency, "max_staleness": 2},
        "train": {"max_steps": 100, "groups_per_step": 2},
        "checkpoint": {"save_interval_steps": 1},
    }
    whole = await play(tasks=records, **given)()
    for kill_at in np.linspace(0.5, whole.seconds, 12):
        killed = await play(tasks=records, kill_at=kill_at, **given)()
        saved = max(killed.checkpoints.saved, default=0)
        resumed = await play(resume=killed, tasks=records, **given)()
        trained = [draw for draw in killed.draws if draw[0] < saved] + resumed.draws
        assert sorted(trained) == sorted(whole.draws)
        assert [step for step, _, _ in resumed.draws] == [slot // 2 for slot in range(2 * saved, 8)]
        assert list(resumed.metrics) == [1, 2, 3, 4]

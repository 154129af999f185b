"""The real graph (supervisor, channels, pacer, slots, grouper, barrier, trainer) on a simulated device."""

from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from trouper.actors.simulation import SimulatedAccelerator, SimulatedEngine, default_seconds
from trouper.channels import HopelessRun, RestartLimit, SamplerError, SyncError


class Faults:
    """What goes wrong in one run, drawn in the order in which it happens."""

    KINDS = ("raise", "hang", "slow", "create", "create_hang", "reward", "agent", "refuse", "die", "corrupt")

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rates = {kind: self.random.choice((0.0, 0.0, 0.02, 0.05, 0.1)) for kind in self.KINDS}
        self.left = {"die": 2, "corrupt": 1}  # more often than this the run may well give up

    def __call__(self, kind: str) -> bool:
        hit = self.random.random() < self.rates[kind] and self.left.get(kind, 1) > 0
        if hit and kind in self.left:
            self.left[kind] -= 1
        return hit


def faulty(faults: Faults, letters: Any) -> dict[str, Any]:
    """Environment, agent, engine and accelerator that fail as `faults` says."""

    class Environment(letters):
        def __init__(self) -> None:
            self.steps = faults.random.randint(1, 3)

        async def disturbed(self) -> None:
            if faults("raise"):
                raise OSError("the world broke")
            if faults("hang"):
                await trio.sleep_forever()
            await trio.sleep(faults.random.expovariate(1.0) * (100 if faults("slow") else 1))

        async def reset(self, task: Any) -> str:
            await self.disturbed()
            return await super().reset(task)

        async def step(self, action: str) -> Any:
            await self.disturbed()
            return await super().step(action)

        async def reward(self) -> float:
            if faults("reward"):
                raise ZeroDivisionError
            return super().reward()

        async def close(self) -> None:
            await self.disturbed()

    async def create() -> Any:
        if faults("create"):
            raise ConnectionError("no room")
        if faults("create_hang"):
            await trio.sleep_forever()
        return Environment()

    async def agent(talk: Any, world: Any) -> None:
        talk.user(await world.reset())
        while not world.done:
            try:
                turn = await talk.generate()
                answer = await world.step(turn.text)
            except Exception:
                return
            if faults("agent"):
                raise LookupError("a clumsy agent")
            talk.user(answer)

    engines = []

    class Engine(SimulatedEngine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            engines.append(self)

        def check(self, request: Any) -> None:
            if faults("refuse"):
                raise SamplerError("not this one")
            super().check(request)

        def step(self) -> Any:
            if faults("die"):
                raise RuntimeError("device lost")
            return super().step()

        def checksum(self) -> int:
            return super().checksum() + faults("corrupt")

    def accelerator(name: str) -> SimulatedAccelerator:
        return SimulatedAccelerator(name, lambda call: default_seconds(call) * faults.random.uniform(0.5, 1.5))

    parts = {"make_environment": create, "make_engine": Engine, "make_accelerator": accelerator}
    return {"agent": agent, "engines": engines, **parts}


def disturbed_run(seed: int, play: Any, letters: Any, stream: Any) -> Any:
    """A run whose configuration and faults follow from the seed."""
    random = Random(seed)
    staleness = random.randint(0, 2)
    endless = random.random() < 0.6
    parts = faulty(Faults(seed), letters)
    engines = parts.pop("engines")
    played = play(
        **parts,
        tasks=stream(None if endless else random.randint(1, 14)),
        held_out=stream(2) if random.random() < 0.3 else None,
        run={"seed": seed},
        rollout={
            "num_generations": random.randint(1, 3),
            "max_concurrency": random.choice((1, 3, 8, 20)),
            "max_staleness": staleness,
            "max_attempts": random.randint(1, 3),
            "max_redraws": random.randint(0, 2),
            "lost_members": random.choice(("shrink", "drop")),
            "min_members": 1,
            "dynamic_sampling": random.random() < 0.5,
            "mask_truncated": random.random() < 0.2,
            "episode_timeout": random.choice((50.0, 1000.0)),
            "max_consecutive_lost": 1000,
        },
        train={
            "max_steps": random.randint(1, 6) if endless or random.random() < 0.5 else None,
            "groups_per_step": random.randint(1, 4),
            "drop_last": random.random() < 0.3,
            "max_empty_steps": 1000,
        },
        sync={
            "weight_sync_steps": random.randint(1, staleness + 1),
            "mode": random.choice(("in_flight", "drain")),
            "kv": random.choice(("keep", "recompute")),
            "drain_timeout": random.choice((0.0, 0.5, 60.0)),
        },
        engine={"slots": random.randint(1, 6), "chunk": random.randint(1, 4)},
        evaluation={"every_steps": 2, "tasks": {"source": "held:out"}, "count": 3},
        checkpoint={"save_interval_steps": random.randint(0, 3)},
    )
    played.engines = engines
    return played


def check(played: Any) -> None:
    """What must hold at the end of every run, whatever went wrong in it."""
    config, pacer = played.config, played.run.pacer
    per_step, staleness = config.train.groups_per_step, config.rollout.max_staleness
    # Nothing is left anywhere.
    for channel in played.run.graph.statistics():
        assert (channel.name, channel.depth, channel.sent) == (channel.name, 0, channel.received)
    assert played.engines[-1].live == 0
    assert (played.run.episodes.busy, played.run.grouper.open_groups) == (0, 0)
    # Every slot ended once, in the order of the steps.
    assert pacer.closed == pacer.admitted == pacer.total
    whole = pacer.total // per_step * per_step if config.train.drop_last else pacer.total
    assert sorted(group.slot for _, group in played.groups) == list(range(whole))
    assert all(group.slot // per_step == step for step, group in played.groups)
    assert [step for step, _ in played.groups] == sorted(step for step, _ in played.groups)
    assert sorted(step for step, record in played.metrics.items() if "groups" in record) == list(
        range(1, -(-whole // per_step) + 1)
    )
    draws = [group.draw for _, group in played.groups if group.void is None]
    assert len(draws) == len(set(draws))
    for step, group in played.groups:
        assert (group.void is None) == bool(group.episodes)
        assert group.void or len(group.episodes) + group.lost == config.rollout.num_generations
        for each in group.episodes:
            said = ""
            for row in each.rows:
                versions = row.versions[row.loss_mask]
                assert 0 <= step - versions.max() <= step - versions.min() <= staleness
                assert (versions[1:] >= versions[:-1]).all()
                for position in row.loss_mask.nonzero()[0]:
                    assert row.tokens[position] == played.engines[0].token(each.attempt.seed, int(position))
                    said += "abcdefghijklmno;"[row.tokens[position]]
            assert each.reward == sum(map(ord, said)) % 7 / 7
    trained = [group.slot for _, group in played.learner.trained]
    assert len(trained) == len(set(trained))
    assert played.run.barrier.attested.value.final


SEEDS = 30


@pytest.mark.parametrize(
    "seeds", [range(SEEDS), pytest.param(range(SEEDS, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_mixture_of_faults_wedges_a_run_or_breaks_a_promise(seeds, run_seeded, play, letters, stream) -> None:
    for seed in seeds:
        played = disturbed_run(seed, play, letters, stream)
        try:
            run_seeded(seed, played)
            check(played)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("seed", [3, 4])
def test_a_seed_replays_the_same_run(seed, run_seeded, play, letters, stream) -> None:
    first, second = (disturbed_run(seed, play, letters, stream) for _ in range(2))
    run_seeded(seed, first)
    run_seeded(seed, second)
    assert first.log == second.log


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
        def step(self) -> Any:
            raise RuntimeError("device lost")

    with pytest.raises(RestartLimit, match=r"'sampler'.*device lost"):
        await play(make_engine=Dead)()


async def test_weights_that_cannot_be_attested_end_the_run_by_name(autojump_clock, play) -> None:
    class Corrupt(SimulatedEngine):
        def checksum(self) -> int:
            return 1

    with pytest.raises(SyncError, match=r"sampler 0 could not be brought to weights \(1, 1\)"):
        await play(make_engine=Corrupt)()


async def test_a_long_run_leaves_nothing_behind(autojump_clock, play) -> None:
    played = await play(train={"max_steps": 150}, checkpoint={"save_interval_steps": 0})()
    run = played.run
    assert len(run.source.position(0).open) == 0
    assert run.pacer.redraws(0) == 0
    for left in (run.sampler._waiting, run.sampler._running, run.sampler._deliveries, run.grouper._ready):
        assert not left


async def test_the_last_weights_wait_for_nobody(autojump_clock, play) -> None:
    """The last publication comes when every asker has long ended: nobody waits for an attestation then."""
    played = await play(rollout={"max_staleness": 2}, train={"max_steps": 3})()
    assert played.run.sampler.ended
    assert played.seconds < 20

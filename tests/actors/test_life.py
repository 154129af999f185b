"""Lives of the learning: whatever ends one, the process or a failure in it, nothing is lost or trained twice."""

from functools import partial
from random import Random
from typing import Any

import pytest
import trio

from trouper.actors.ledger import Ledger
from trouper.actors.simulation import MemoryCheckpoints, SimulatedAccelerator, SimulatedLearner
from trouper.channels import HopelessRun, NumericsError, RestartLimit

LONG = {"max_restarts": 1000}


class Crashes:
    """Says when something breaks, as a seed decides."""

    def __init__(self, seed: int, rate: float) -> None:
        self.random = Random(seed)
        self.rate = rate
        self.count = 0

    def maybe(self, where: str) -> None:
        if self.random.random() < self.rate:
            self.count += 1
            raise MemoryError(f"{where} broke")


def fragile(crashes: Crashes, stream: Any) -> dict[str, Any]:
    """Learner, checkpoints and tasks that break now and then."""

    class Learner(SimulatedLearner):
        def add(self, groups: Any) -> None:
            crashes.maybe("add")
            super().add(groups)

        def update(self) -> dict[str, float]:
            crashes.maybe("update")
            super().update()
            crashes.maybe("update")  # parameters have changed by now
            return {"loss": 0.0}

        def publish(self) -> Any:
            if self.step:
                crashes.maybe("publish")
            return super().publish()

    class Checkpoints(MemoryCheckpoints):
        def save(self, *args: Any) -> None:
            crashes.maybe("save")
            super().save(*args)
            crashes.maybe("save")

    class Tasks(stream):
        def task(self, draw: int) -> Any:
            crashes.maybe("task")
            return super().task(draw)

    return {"learner": Learner(), "checkpoints": Checkpoints(), "tasks": Tasks()}


def sections(random: Random) -> dict[str, Any]:
    return {
        "run": LONG,
        "train": {"max_steps": 6, "groups_per_step": random.randint(1, 3)},
        "rollout": {"max_staleness": random.randint(0, 2), "max_concurrency": random.randint(1, 9)},
        "checkpoint": {"save_interval_steps": random.randint(0, 2)},
    }


def trained(played: Any) -> list[tuple[int, int, int]]:
    """(step, slot, draw), and never an attempt in two steps."""
    ids = [episode.attempt.id for _, group in played.groups for episode in group.episodes]
    assert len(ids) == len(set(ids))
    return sorted(played.draws)


@pytest.mark.parametrize("seed", range(25))
def test_what_breaks_inside_the_process_costs_nothing_but_time(run_seeded, play, stream, seed) -> None:
    given = sections(Random(seed))
    whole = play(**given)
    run_seeded(seed, whole)
    crashes = Crashes(seed, 0.04)
    broken = play(**fragile(crashes, stream), **given)
    run_seeded(seed, broken)
    assert trained(broken) == trained(whole)
    assert broken.learner.step == 6
    assert list(broken.metrics) == [1, 2, 3, 4, 5, 6]
    assert broken.run.life.number <= 1 + broken.run.graph.restarts <= 1 + crashes.count
    bound = given["rollout"]["max_staleness"]
    for step, group in broken.groups:
        for row in (row for episode in group.episodes for row in episode.rows):
            assert 0 <= step - row.versions[row.loss_mask].max() <= step - row.versions[row.loss_mask].min() <= bound


@pytest.mark.parametrize("seed", range(25))
def test_killed_at_any_moment_and_resumed_a_run_trains_what_one_long_life_trains(
    run_seeded, play, letters, seed
) -> None:
    random = Random(seed)
    given = sections(random)
    whole = play(**given)
    run_seeded(seed, whole)
    groups: dict[int, Any] = {}
    life = play(kill_at=random.uniform(0, 25), **given)
    while True:
        complete = {group.slot: group for group in logged(life)}
        run_seeded(seed, life)
        for slot, group in complete.items():
            again = [each for _, each in life.groups if each.slot == slot]
            # A logged complete group is trained as it was logged, token for token; it is never rolled again.
            assert all(same(each, group) for each in again)
        groups |= {step: [each for at, each in life.groups if at == step] for step, _ in life.groups}
        if life.kill_at is None:
            break
        limit = random.uniform(0, 25) if life.life < 6 else None
        life = play(resume=life, kill_at=limit, **given)
    draws = sorted((step, group.slot, group.draw) for step, each in groups.items() for group in each)
    assert draws == trained(whole)
    assert life.learner.step == 6
    assert list(life.metrics) == [1, 2, 3, 4, 5, 6]


def logged(life: Any) -> list[Any]:
    """The complete groups that the life will find in its ledger."""
    done = life.checkpoints.latest() or 0
    ledger = Ledger(life.directory / "ledger")
    found = ledger.begin(0, done * life.config.train.groups_per_step).groups
    ledger.close()
    return list(found)


def same(one: Any, other: Any) -> bool:
    return one.draw == other.draw and [
        (episode.attempt.id, row.tokens.tolist(), row.versions.tolist(), episode.reward)
        for episode in one.episodes
        for row in episode.rows
    ] == [
        (episode.attempt.id, row.tokens.tolist(), row.versions.tolist(), episode.reward)
        for episode in other.episodes
        for row in episode.rows
    ]


async def test_a_failure_that_comes_again_and_again_ends_the_run_and_the_last_checkpoint_stays(
    autojump_clock, play
) -> None:
    class Cursed(SimulatedLearner):
        def update(self) -> dict[str, float]:
            if self.step == 3:
                raise MemoryError("out of memory")
            return super().update()

    cursed = play(learner=Cursed(), run={"max_restarts": 2}, train={"max_steps": 5})
    with pytest.raises(RestartLimit, match=r"'learning'.* 3 restarts .*'trainer' raised MemoryError: out of memory"):
        await cursed()
    assert cursed.checkpoints.latest() == 2
    assert cursed.run.life.number == 3
    log = (cursed.directory / "log.txt").read_text()
    assert log.count("trainer failed in its life") == 3
    resumed = await play(resume=cursed, learner=SimulatedLearner(), train={"max_steps": 5})()
    assert resumed.learner.step == 5


@pytest.mark.parametrize("error", [NumericsError("nan"), HopelessRun("no")])
async def test_what_no_restart_mends_is_not_tried_again(autojump_clock, play, error) -> None:
    class Diverged(SimulatedLearner):
        def update(self) -> dict[str, float]:
            raise error

    played = play(learner=Diverged())
    with pytest.raises(type(error)):
        await played()
    assert played.run.graph.restarts == 0


async def test_a_changed_configuration_rolls_again_what_later_weights_had_sampled(autojump_clock, play) -> None:
    given = {"rollout": {"max_staleness": 1}, "checkpoint": {"save_interval_steps": 4}, "train": {"max_steps": 9}}
    life = play(kill_at=20, **given)
    await life()
    before = logged(life)
    saved = life.checkpoints.latest()
    newest = {group.slot: max(row.versions.max() for each in group.episodes for row in each.rows) for group in before}
    assert max(newest.values()) > saved == 4
    changed = await play(resume=life, redo=False, **given)()
    kept = {group.slot: group for group in before if newest[group.slot] <= saved}
    for _, group in changed.groups:
        assert group.slot not in kept or same(group, kept[group.slot])
    note = next(note for note in changed.screen.notes if "goes on after step" in note)
    assert f"{len(kept)} complete groups are trained as they are" in note
    assert f"{len(before) - len(kept)} of them although they were complete" in note


async def test_late_weights_of_a_life_that_failed_admit_nothing_in_the_next(autojump_clock, play) -> None:
    """They were on their way to a slow sampler when the learning failed."""

    class Slow(SimulatedAccelerator):
        async def run(self, call: Any, *args: Any) -> Any:
            if self.name == "sampler" and getattr(call, "__name__", "") == "swap" and args[1][1] == 3:
                await trio.sleep(50)
            return await super().run(call, *args)

    class Once(SimulatedLearner):
        failed = False

        def add(self, groups: Any) -> None:
            if self.step == 3 and not self.failed:
                self.failed = True
                raise MemoryError("once")
            super().add(groups)

    given = {"rollout": {"max_staleness": 1}, "checkpoint": {"save_interval_steps": 0}, "train": {"max_steps": 6}}
    played = await play(learner=Once(), make_accelerator=Slow, sync={"timeout": 100.0}, **given)()
    assert played.run.life.number == 2
    ages = [step - row.versions[row.loss_mask].min() for step, row in rows(played)]
    assert max(ages) == 1


def rows(played: Any) -> list[tuple[int, Any]]:
    return [(step, row) for step, group in played.groups for episode in group.episodes for row in episode.rows]


async def test_a_stop_while_the_sampler_compiles_finds_no_life_and_no_step(autojump_clock, play) -> None:
    slow = partial(SimulatedAccelerator, seconds=lambda call: 60.0 if call == "warm_up" else 0.1)
    played = await play(make_accelerator=slow, stop_at=1.0)()
    assert (played.run.step, played.groups, played.checkpoints.saved) == (0, [], {})
    resumed = await play(resume=played)()
    assert resumed.run.step == 4

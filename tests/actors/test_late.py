"""`rollout.on_late = "drop"`: groups are trained in the order of completion, and what is too old by then is dropped."""

import shutil
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
import trio.testing

from trouper.actors.grouper import Grouper
from trouper.actors.ledger import Ledger
from trouper.actors.pacer import Pacer
from trouper.actors.quarantine import Quarantine
from trouper.actors.simulation import MemoryCheckpoints, SimulatedAccelerator
from trouper.actors.source import Source
from trouper.channels import Attempt, Channel, Group, Outcome, Task
from trouper.envs import StepResult


def waiting(seconds: Any) -> type:
    """An environment of three steps; `seconds(task, seed)` gives the length of each."""

    class Waiting:
        async def reset(self, task: Task, seed: int) -> str:
            self.said, self.left, self.seconds = "", 3, seconds(task, seed)
            return "a"

        async def step(self, action: str) -> StepResult:
            await trio.sleep(next(self.seconds))
            self.said += action
            self.left -= 1
            return StepResult("b", done=self.left == 0)

        def reward(self) -> float:
            return sum(map(ord, self.said)) % 7 / 7

    return Waiting


def heavy_tailed(law: str) -> type:
    """Lengths are drawn anew for each attempt, and are the same whenever it is played."""

    def seconds(task: Task, seed: int) -> Any:
        random = Random(seed)
        while True:
            yield {
                "exponential": random.expovariate(1.0),
                "lognormal": random.lognormvariate(-1.125, 1.5),
                "bimodal": 20.0 if random.random() < 0.05 else 0.1,
                "stragglers": 50.0 if random.random() < 0.02 else 1.0,
            }[law]

    return waiting(seconds)


def slow_draws(*draws: int) -> type:
    """Some tasks take 50 times as long as the others."""

    def seconds(task: Task, seed: int) -> Any:
        while True:
            yield 50.0 if int(task.id) in draws else 1.0

    return waiting(seconds)


def sections(random: Random) -> dict[str, Any]:
    staleness = random.choice((1, 1, 2, 4))
    return {
        "run": {"seed": random.randint(0, 99)},
        "rollout": {
            "num_generations": random.randint(2, 3),
            "max_concurrency": random.choice((2, 7, 60)),
            "max_staleness": staleness,
            "on_late": "drop",
            "dynamic_sampling": random.random() < 0.5,
            "max_redraws": random.randint(1, 2),
            "episode_timeout": 10_000.0,
        },
        "train": {"max_steps": random.choice((None, 5, 9)), "groups_per_step": random.randint(1, 4)},
        "sync": {"weight_sync_steps": random.randint(1, staleness + 1)},
        "checkpoint": {"save_interval_steps": random.randint(0, 2)},
    }


def check(groups: dict[int, list[Any]], config: Any, tasks: int | None) -> None:
    """Each slot ended once, no token is too old, no task was trained twice, and every step that was due was done."""
    per_step, bound = config.train.groups_per_step, config.rollout.max_staleness
    everything = [(step, group) for step in sorted(groups) for group in groups[step]]
    assert sorted(group.slot for _, group in everything) == list(range(len(everything)))
    draws = Counter(group.draw for _, group in everything if group.void is None)
    assert set(draws.values()) <= {1}
    for step, group in everything:
        assert group.slot // per_step == step
        for episode in group.episodes:
            assert (episode.attempt.slot, episode.attempt.draw) == (group.slot, group.draw)
            for row in episode.rows:
                versions = row.versions[row.loss_mask]
                assert 0 <= step - versions.max() <= step - versions.min() <= bound
    if tasks is None:
        assert len(groups) == config.train.max_steps
        assert all(len(each) == per_step for each in groups.values())


def by_step(played: Any) -> dict[int, list[Any]]:
    return {step: [group for at, group in played.groups if at == step] for step, _ in played.groups}


def drops(played: Any) -> float:
    return played.total("grouper/dropped/late")


# What it is for ------------------------------------------------------------------------------------------------


def quick(on_late: str, **given: Any) -> dict[str, Any]:
    rollout = {"max_staleness": 1, "on_late": on_late, "episode_timeout": 10_000.0, **given}
    return {"rollout": rollout, "train": {"max_steps": 12, "groups_per_step": 2}}


def test_one_slow_task_holds_nobody_up_and_is_thrown_away_in_the_end(run_seeded, play) -> None:
    waits = run_seeded(0, play(make_environment=slow_draws(0), **quick("wait")))
    drops_it = run_seeded(0, play(make_environment=slow_draws(0), **quick("drop")))
    assert 0 in [draw for _, _, draw in waits.draws]
    # It ends after the others, when nobody needs a group in its place any more: its slot is the last one.
    draws = [draw for _, _, draw in drops_it.draws]
    assert 0 not in draws
    assert sorted(draws) == list(range(1, 25))
    assert drops(drops_it) == 1
    assert "late     1 group was dropped: 1 of " in (drops_it.directory / "log.txt").read_text()
    assert drops_it.seconds < waits.seconds + 5  # it is waited for once, in both


def test_where_slow_tasks_come_again_and_again_dropping_them_is_quicker(run_seeded, play) -> None:
    slow = slow_draws(*range(0, 400, 11))
    waits = run_seeded(0, play(make_environment=slow, **quick("wait", max_staleness=4)))
    drops_it = run_seeded(0, play(make_environment=slow, **quick("drop", max_staleness=4)))
    assert drops_it.seconds < waits.seconds / 1.5
    check(by_step(drops_it), drops_it.config, None)


def test_on_policy_no_group_can_be_overtaken_and_both_rules_train_the_same(run_seeded, play) -> None:
    slow = slow_draws(*range(0, 24, 5))
    waits = run_seeded(0, play(make_environment=slow, **quick("wait", max_staleness=0)))
    drops_it = run_seeded(0, play(make_environment=slow, **quick("drop", max_staleness=0)))
    trained = [sorted((step, draw) for step, _, draw in played.draws) for played in (waits, drops_it)]
    assert trained[0] == trained[1]
    assert drops(drops_it) == 0


def test_what_was_dropped_is_told_by_length(run_seeded, play) -> None:
    played = run_seeded(0, play(make_environment=slow_draws(0, 5), **quick("drop")))
    assert drops(played) == 2
    counts = {
        name: played.total(name) for name in played.metrics[12] if name.startswith(("grouper/late", "grouper/in"))
    }
    assert sum(count for name, count in counts.items() if name.startswith("grouper/late/up_to_")) == 2
    assert sum(count for name, count in counts.items() if name.startswith("grouper/in_time/up_to_")) == 24
    summary = (played.directory / "log.txt").read_text()
    assert "late     2 groups were dropped: " in summary
    assert " tokens an episode" in summary
    assert "late     " not in ((run_seeded(0, play(**quick("wait")))).directory / "log.txt").read_text()


def test_late_groups_at_the_end_of_the_data_are_void(run_seeded, play, stream) -> None:
    given = quick("drop")
    given["train"]["max_steps"] = None
    played = run_seeded(0, play(make_environment=slow_draws(0), tasks=stream(9), **given))
    check(by_step(played), played.config, 9)
    assert [(group.void, group.draw) for _, group in played.groups if group.void] == [("late", 0)]
    assert played.total("async/void/late") == 1


async def test_members_find_their_group_wherever_it_has_gone_and_duplicates_do_not(
    autojump_clock, ledger, episode, stream
) -> None:
    pacer, quarantine = Pacer(1, 5, 3, 0, 1), Quarantine(0, {}, print)
    source = Source(stream(), pacer, quarantine, ledger, num_generations=2, run_seed=0)
    grouper = Grouper(
        pacer,
        ledger,
        SimulatedAccelerator("ledger"),
        quarantine,
        num_generations=2,
        estimator="dr_grpo",
        scale_rewards="none",
        drop_late=source,
    )
    tasks, inbox = Channel[Attempt]("tasks", Attempt, 10), Channel[Outcome]("episodes", Outcome, 10)
    outbox = Channel[Group]("groups", Group, 10)
    # Each task is done before those that were drawn before it; a member of each comes once more.
    arrivals = [(2, 0), (2, 1), (2, 0), (0, 0), (0, 1), (0, 1), (2, 1), (1, 0), (1, 1)]

    async def draw() -> None:
        with tasks.sender() as attempts, inbox.sender() as voids:
            await source.run(attempts, voids)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(draw)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(grouper.run, inbox.receiver(), outbox.sender())
        with inbox.sender() as sender:
            inbox.finish()
            for slot, member in arrivals:
                await sender.send(episode(slot, member, float(member)))
    groups = [outbox.receiver().receive_nowait() for _ in range(3)]
    assert [(group.slot, group.draw) for group in groups] == [(0, 2), (1, 0), (2, 1)]
    assert (grouper.counts["duplicates"], grouper.open_groups) == (3, 0)


# Whatever the schedule -----------------------------------------------------------------------------------------


def test_no_run_wedges_or_breaches_the_bound_and_every_slot_ends_once(run_seeded, play, stream) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        random = Random(seed)
        given = sections(random)
        tasks = random.randint(1, 30) if given["train"]["max_steps"] is None or random.random() < 0.3 else None
        law = random.choice(("exponential", "lognormal", "bimodal", "stragglers"))
        played = play(make_environment=heavy_tailed(law), tasks=stream(tasks), **given)
        run_seeded(seed, played)
        check(by_step(played), played.config, tasks)
        pacer = played.run.life.pacer
        assert pacer.closed == pacer.admitted == pacer.total
        assert (played.run.life.grouper.open_groups, played.run.graph.restarts) == (0, 0)
        seen["late"] += int(drops(played))
        seen["overtaken"] += sum(group.void is None and group.draw != group.slot for _, group in played.groups)
        seen["void"] += sum(group.void == "late" for _, group in played.groups)
    assert seen["late"] > 50, seen
    assert seen["overtaken"] > 200, seen
    assert seen["void"] > 3, seen


@pytest.mark.parametrize("seed", range(25))
def test_killed_at_any_moment_and_resumed_what_was_logged_is_trained_as_it_was(run_seeded, play, seed) -> None:
    random = Random(f"kill {seed}")
    given = sections(random)
    given["train"]["max_steps"] = 8
    given["checkpoint"]["save_interval_steps"] = random.choice((0, 0, 1, 3))
    environment = heavy_tailed(random.choice(("exponential", "lognormal", "bimodal")))
    groups: dict[int, Any] = {}
    life = play(make_environment=environment, kill_at=random.uniform(0, 25), **given)
    while True:
        before = logged(life)
        run_seeded(seed, life)
        for slot, group in before.items():
            again = [told(each) for _, each in life.groups if each.slot == slot]
            assert again in ([], [told(group)])
        groups |= by_step(life)
        if life.kill_at is None:
            break
        limit = random.uniform(0, 25) if life.life < 6 else None
        life = play(make_environment=environment, resume=life, kill_at=limit, **given)
    check(groups, life.config, None)
    assert list(life.metrics) == list(range(1, 9))


class Compared(MemoryCheckpoints):
    """Collects the draws that checkpoints know to be given and the log on the disk does not."""

    def __init__(self, ledger: Path) -> None:
        super().__init__()
        self._ledger = ledger
        self.given: set[int] = set()
        self.unknown: set[int] = set()

    def save(self, step: int, tree: Any, meta: dict[str, Any], score: float | None) -> None:
        super().save(step, tree, meta, score)
        copied = Ledger(shutil.copytree(self._ledger, self._ledger.with_name(f"ledger at {step}")))
        given = {draw for _, draw, _ in meta["source"]["open"]} - {-1}
        self.given |= given
        self.unknown |= given - copied.begin(0, 0).used
        copied.close()


def test_no_checkpoint_knows_more_than_the_log_which_a_resume_believes(run_seeded, play) -> None:
    given = 0
    for seed in range(8):
        sections = quick("drop", num_generations=3, dynamic_sampling=True, max_redraws=9)
        played = play(make_environment=heavy_tailed("lognormal"), checkpoint={"save_interval_steps": 1}, **sections)
        played.checkpoints = Compared(played.directory / "ledger")
        run_seeded(seed, played)
        given += len(played.checkpoints.given)
        assert not played.checkpoints.unknown
    assert given > 50


def logged(life: Any) -> dict[int, Any]:
    """The complete groups that the life will find in its ledger."""
    done = life.checkpoints.latest() or 0
    ledger = Ledger(life.directory / "ledger")
    found = ledger.begin(0, done * life.config.train.groups_per_step).groups
    ledger.close()
    return {group.slot: group for group in found}


def told(group: Any) -> list[Any]:
    return [group.draw, group.void] + [
        (episode.attempt.id, row.tokens.tolist(), row.versions.tolist(), episode.reward)
        for episode in group.episodes
        for row in episode.rows
    ]

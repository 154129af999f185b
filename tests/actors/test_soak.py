"""Whole runs in virtual time under seeded schedules and faults of every kind; `scripts/soak` plays any number of them.

A seed decides the configuration, the schedule, what goes wrong and when the process is stopped or killed. A run that
ends is resumed, with fewer faults each time, until it is done.
"""

import importlib.util
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from trouper.actors.simulation import SimulatedEngine
from trouper.channels import Stalled, TrouperError, Weights


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


faults, whereabouts = _load("faults"), _load("whereabouts")

TOKEN = SimulatedEngine(Weights(0, 0, None, 0)).token
"""The id that is sampled for a seed at a position."""

CALM = 6
"""From this life on nothing goes wrong any more, and the run has to come to its end."""


class Story:
    """All lives of one run.

    Args:
        seed: decides everything.
        make: the fixture `play`.
        letters: the environment that works.
        stream: numbered tasks.
    """

    def __init__(self, seed: int, make: Callable[..., Any], letters: Any, stream: Any) -> None:
        self.random = Random(f"story {seed}")
        self.tasks = None if self.random.random() < 0.6 else self.random.randint(1, 14)
        self.given = sections(seed, self.random, endless=self.tasks is None)
        self.faults = faults.Faults(seed)
        self.watch = whereabouts.Whereabouts()
        self.lives: list[Any] = []
        self.ends: list[str] = []
        self._make = make
        self._letters = letters
        self._stream = stream

    def plan(self, number: int) -> Any:
        """The next life: what goes wrong in it, and when it is cut short, if it is."""
        random = self.random
        self.faults.armed = False
        self.faults.scale = 0.7**number if number < CALM else 0.0
        cut = {}
        if number < CALM and random.random() < 0.7:
            cut[random.choice(("kill_at", "stop_at"))] = random.expovariate(1 / 15)
        resume = {"resume": self.lives[-1]} if self.lives else {"checkpoints": faults.fragile_checkpoints(self.faults)}
        parts = faults.faulty(self.faults, self._letters, self._stream, self.tasks, 3 * self.given["sync"]["timeout"])
        held_out = {"held_out": self._stream(2)} if "evaluation" in self.given else {}
        given = self.given if number < CALM else patient(self.given)
        redo = random.random() < 0.9
        life = self._make(**resume, **cut, **parts, **held_out, **given, redo=redo)
        self.lives.append(life)
        return life

    async def play(self) -> None:
        """Play one life after another until the run is done."""
        while not self.ends or self.ends[-1] != "done":
            life = self.plan(len(self.lives))
            self.watch.begin_process(life)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._look)
                    await life()
                    nursery.cancel_scope.cancel()
                cut = life.kill_at is not None or life.stop_at is not None
                self.ends.append("cut" if cut else "done")
            except* (TrouperError, MemoryError) as errors:
                self._ended_by(errors)
            self._check_life(life)

    async def _look(self) -> None:
        sync, rollout = self.lives[-1].config.sync, self.lives[-1].config.rollout
        # No wait is longer than a deadline, a restart's backoff and a device call together.
        longest_wait = rollout.episode_timeout + 63 + 30 + 4 * sync.timeout
        while True:
            await trio.sleep(self.random.expovariate(1 / 10))
            self.watch.balance()
            quiet = trio.current_time() - self.watch.moved_at
            assert quiet <= longest_wait, f"nothing has moved for {quiet:.0f} s"

    def _ended_by(self, errors: BaseExceptionGroup[BaseException]) -> None:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        stopping = self.lives[-1].stop_at is not None  # what fails then is not restarted, and named as it is
        named = isinstance(error, TrouperError) or stopping
        if isinstance(error, Stalled) or not named or len(self.lives) > CALM:
            raise error
        self.ends.append(type(error).__name__)

    def _check_life(self, life: Any) -> None:
        watch, config = self.watch, life.config
        assert not watch.wrong, watch.wrong[:3]
        # All calls of an attempt together take less than the longest timeout, unless the agent or the device hangs.
        if config.rollout.episode_timeout > 900 and not self.faults.hits & Counter(("agent hangs", "swap is slow")):
            assert life.run.breaker.lost["episode_timeout"] == 0
        lost = life.run.breaker.lost.total()
        whole = self.ends[-1] == "done" and life.run.life.number == life.life
        assert watch.losses == lost if whole else watch.losses <= lost
        if life.kill_at is not None and self.random.random() < 0.3:  # it was writing, too
            with max(life.directory.glob("ledger/*.log")).open("ab") as file:
                file.write(self.random.randbytes(self.random.randint(1, 40)))

    @property
    def groups(self) -> list[tuple[int, Any]]:
        """(step, group) of every step, as the newest life that did it had it."""
        steps: dict[int, list[Any]] = {}
        for life in self.lives:
            steps |= {step: [group for at, group in life.groups if at == step] for step, _ in life.groups}
        return [(step, group) for step in sorted(steps) for group in steps[step]]

    @property
    def log(self) -> str:
        """Everything that can be seen from outside, with times."""
        text = repr([self.ends, sorted(self.faults.hits.items()), [life.log for life in self.lives]])
        return text.replace(str(self.lives[0].directory), "")


def patient(given: dict[str, Any]) -> dict[str, Any]:
    """A configuration under which no run is hopeless for want of something to learn."""
    return {**given, "train": {**given["train"], "max_empty_steps": 1000}}


def sections(seed: int, random: Random, *, endless: bool) -> dict[str, Any]:
    """A configuration; many never give a slot a second task, so that what is trained can be foretold."""
    staleness = random.randint(0, 2)
    exact = random.random() < 0.5
    on_late = "drop" if Random(f"late {seed}").random() < 0.4 else "wait"
    given = {
        "run": {"seed": seed, "max_restarts": random.choice((2, 1000, 1000, 1000))},
        "rollout": {
            "num_generations": random.randint(1, 3),
            "max_concurrency": random.choice((1, 3, 8, 20)),
            "max_staleness": staleness,
            "on_late": on_late,
            "max_attempts": random.randint(1, 3),
            "max_redraws": 0 if exact else random.randint(1, 3),
            "quarantine_after": 0 if exact else random.randint(0, 2),
            "lost_members": random.choice(("shrink", "drop")),
            "min_members": 1,
            "dynamic_sampling": random.random() < 0.5,
            "mask_truncated": random.random() < 0.3,
            "episode_timeout": random.choice((50.0, 1000.0)),
            "max_consecutive_lost": random.choice((10, 1000, 1000)),
        },
        "train": {
            "max_steps": random.randint(1, 6) if endless or random.random() < 0.5 else None,
            "groups_per_step": random.randint(1, 4),
            "drop_last": random.random() < 0.3,
            "max_empty_steps": random.choice((2, 1000, 1000)),
        },
        "sync": {
            "weight_sync_steps": random.randint(1, staleness + 1),
            "mode": random.choice(("in_flight", "drain", "abort")),
            "kv": random.choice(("keep", "recompute")),
            "drain_timeout": random.choice((0.0, 0.5, 60.0)),
            "timeout": random.choice((5.0, 300.0)),
        },
        "engine": {"slots": random.randint(1, 6), "chunk": random.randint(1, 4)},
        "checkpoint": {"save_interval_steps": random.randint(0, 3)},
    }
    if random.random() < 0.3:
        given["evaluation"] = {"every_steps": 2, "tasks": {"source": "held:out"}, "count": 3}
    return given


def check(story: Story) -> None:
    """What must hold at the end of every run, whatever went wrong in it."""
    last = story.lives[-1]
    check_nothing_is_left(story, last)
    config, pacer = last.config, last.run.life.pacer
    per_step = config.train.groups_per_step
    # Every slot ended once, in the order of the steps.
    groups = story.groups
    slots = [group.slot for _, group in groups]
    assert sorted(slots) == list(range(len(slots)))
    assert all(group.slot // per_step == step for step, group in groups)
    steps = -(-len(slots) // per_step)
    if story.tasks is None:
        assert steps == config.train.max_steps
    assert len(slots) % per_step == 0 or (not config.train.drop_last and story.tasks is not None)
    assert pacer.closed == pacer.admitted == pacer.total
    ids = Counter(episode.attempt.id for _, group in groups for episode in group.episodes)
    assert set(ids.values()) <= {1}
    draws = [group.draw for _, group in groups if group.void is None]
    assert len(draws) == len(set(draws))
    # What was trained is what the ledger was told, and an episode is what was sampled for it.
    for step, group in groups:
        assert told(group) == told(story.watch.logged[group.slot])
        for each in group.episodes:
            check_episode(step, each, config, may_be_silent=story.faults.hits["judge says nothing"] > 0)
    # The parameters are those of one update for each step that had something to learn from.
    taught = {step for step, group in groups for each in group.episodes if teaches(each, config)}
    assert last.learner.step == len(taught)
    if config.rollout.mask_truncated:
        statuses = {each.status for life in story.lives for _, group in life.learner.trained for each in group.episodes}
        assert statuses <= {"done"}
    # One record of each step by the newest life, and none of a life has two.
    assert [step for step, record in last.metrics.items() if "groups" in record] == list(range(1, steps + 1))
    lines = [json.loads(line) for line in (last.directory / "metrics.jsonl").read_text().splitlines()]
    records = Counter((line["life"], line["step"]) for line in lines if "groups" in line)
    assert set(records.values()) <= {1}


def check_nothing_is_left(story: Story, last: Any) -> None:
    run = last.run
    for channel in run.graph.statistics():
        assert (channel.name, channel.depth) == (channel.name, 0)
    assert (run.episodes.busy, run.life.grouper.open_groups) == (0, 0)
    for left in (run.sampler._waiting, run.sampler._running):
        assert not left
    assert last.make_engine.made[-1].live == 0
    assert story.watch.nothing_left()
    assert run.barrier.attested.value.final


def check_episode(step: int, episode: Any, config: Any, *, may_be_silent: bool) -> None:
    said = ""
    for row in episode.rows:
        versions = row.versions[row.loss_mask]
        assert 0 <= step - versions.max() <= step - versions.min() <= config.rollout.max_staleness
        assert (versions[1:] >= versions[:-1]).all()
        for position in row.loss_mask.nonzero()[0]:
            assert row.tokens[position] == TOKEN(episode.attempt.seed, int(position))
            said += "abcdefghijklmno;"[row.tokens[position]]
    given = sum(map(ord, said)) % 7 / 7 + faults.judged(episode.attempt.draw)
    assert episode.reward == given or (episode.reward is None and may_be_silent)


def teaches(episode: Any, config: Any) -> bool:
    """Whether there is anything to learn from an episode."""
    masked = config.rollout.mask_truncated and episode.status != "done"
    return episode.reward is not None and episode.sampled > 0 and not masked


def told(group: Any) -> list[Any]:
    """What a group is, to compare it."""
    rows = [
        (episode.attempt.id, episode.reward, row.tokens.tolist(), row.versions.tolist(), row.loss_mask.tolist())
        for episode in group.episodes
        for row in episode.rows
    ]
    return [group.slot, group.draw, group.void, group.lost, group.advantages.tolist(), rows]


def undisturbed(story: Story, run_seeded: Any, play: Any, stream: Any) -> list[tuple[int, int, int]]:
    """(step, slot, draw) of the same run when nothing goes wrong."""
    given = {name: keys for name, keys in patient(story.given).items() if name != "evaluation"}
    whole = play(tasks=stream(story.tasks), **given)
    run_seeded(0, whole)
    return sorted(whole.draws)


@pytest.fixture
def tell(
    run_seeded: Any, play: Any, letters: Any, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Story]:
    """`tell(seed)` plays the story of a seed to its end."""

    def telling(seed: int) -> Story:
        story = Story(seed, play, letters, stream)
        with monkeypatch.context() as patch:
            faults.break_actors_and_disk(story.faults, patch)
            whereabouts.follow(story.watch, patch)
            run_seeded(seed, story.play)
        return story

    return telling


def test_whatever_goes_wrong_no_slot_is_lost_and_nothing_stalls(soak_seed, tell, run_seeded, play, stream) -> None:
    try:
        story = tell(soak_seed)
        check(story)
        rollout = story.given["rollout"]
        if (rollout["max_redraws"], rollout["on_late"]) == (0, "wait"):
            draws = [(step, group.slot, group.draw) for step, group in story.groups]
            assert sorted(draws) == undisturbed(story, run_seeded, play, stream)
        assert tell(soak_seed).log == story.log, "the seed does not replay"
    except BaseException as error:
        error.add_note(f"seed {soak_seed}: replay it with `scripts/soak 1 {soak_seed}`")
        raise

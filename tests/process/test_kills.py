"""Real kills at random moments: however often a run is killed, it trains what one that was left alone trains."""

import json
import random
import shutil
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tests.process.running import finish, lines, started, trained, wait_for
from trouper.actors.ledger import Ledger
from trouper.actors.metrics import read_metrics

SHAKY = ["environment.name=shaky:ShakyGuess", "train.max_steps={steps}", "optimizer.learning_rate=1e-3"]
# Which task a lost group's slot gets instead depends on the moment: no attempt fails so often that a group is lost.
SHAKY += ["rollout.max_attempts=9"]
FILTERS = ["rollout.dynamic_sampling=true", "rollout.mask_truncated=true", "rollout.max_redraws=1"]
GROUPS = 3


class KilledRun:
    """A run that is killed and resumed, and what was seen on the way."""

    def __init__(self, folder, name, steps, monkeypatch):
        self.folder, self.run = folder, folder / name
        self.options = [option.format(steps=steps) for option in SHAKY]
        self.resets = folder / f"{name}.resets"
        self.resets.touch()
        monkeypatch.setenv("RESETS", str(self.resets))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
        self.forbidden: list[tuple[int, set[int]]] = []

    def finish(self, *options):
        finish(self.folder, self.run, *self.options, *options)

    def kill_at_random(self, times, seed, *options):
        """Kill it so often, at moments from the start to a few seconds of work.

        Returns:
            What to start it with next; None when it was done before.
        """
        chance, resume = random.Random(seed), []
        for number in range(times):
            started = time.monotonic()
            if self.kill_after(None if number % 5 == 4 else chance.uniform(0.0, 2.0), *options, *resume):
                return None
            print(f"killed after {time.monotonic() - started:.2f} s at step {lines(self.run / 'metrics.jsonl')}")
            resume = ["--resume"] if (self.run / "config.toml").exists() else []
        return resume

    def kill_after(self, seconds, *options):
        """Kill it so long after it began to work, or before that (None), and say whether it was done before."""
        with started(self.folder, self.run, *self.options, *options) as process:
            done = lines(self.run / "metrics.jsonl")
            if seconds is None:
                time.sleep(random.uniform(0.2, 3.0))
            else:
                wait_for(lambda: lines(self.run / "metrics.jsonl") > done or process.poll() is not None, process)
                time.sleep(seconds)
            process.kill()
            code = process.wait()
        self.note_complete_groups()
        return code == 0

    def note_complete_groups(self):
        """From now on nobody may be reset for an attempt of a group that is complete in the ledger."""
        if not (self.run / "ledger").exists():
            return
        copy = self.folder / "copy"
        shutil.copytree(self.run / "ledger", copy)
        ledger = Ledger(copy)
        groups = ledger.begin(0, 0).groups
        ledger.close()
        shutil.rmtree(copy)
        seeds = {episode.attempt.seed for group in groups for episode in group.episodes}
        self.forbidden.append((lines(self.resets), seeds))

    def check(self):
        resets = [int(line) for line in self.resets.read_text().split()]
        assert self.forbidden
        for done, seeds in self.forbidden:
            assert not seeds & set(resets[done:])
        # A step that was done again from its logged groups gave the same numbers.
        again = defaultdict(list)
        for line in (self.run / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            again[record["step"]].append(
                [record.get(name, 0.0) for name in ("loss", "grad_norm", "entropy", "reward/mean")]
            )
        for records in again.values():
            assert records == [pytest.approx(records[0], rel=1e-5, abs=1e-7)] * len(records)
        print(f"{sum(len(records) > 1 for records in again.values())} steps were done again")


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_trains_what_one_long_life_trains(folder, kills, monkeypatch):
    steps = 40 + 50 * kills
    whole = KilledRun(folder, "alone", steps, monkeypatch)
    whole.finish()
    assert any(int(seed) % 16 == 0 for seed in whole.resets.read_text().split())
    killed = KilledRun(folder, "killed-often", steps, monkeypatch)
    resume = killed.kill_at_random(kills, 0)
    if resume is not None:  # else the last life was quicker than its end
        killed.finish(*resume)
    assert trained(killed.run) == trained(whole.run)
    attempts = [attempt for step in trained(killed.run).values() for _, attempt in step]
    assert len(attempts) == len(set(attempts)) == steps * GROUPS * 2
    assert list(read_metrics(killed.run / "metrics.jsonl")) == list(range(1, steps + 1))
    killed.check()


@pytest.mark.slow
def test_with_filters_on_each_slot_of_a_run_that_is_killed_ends_exactly_once(folder, kills, monkeypatch):
    steps = 40 + 50 * kills
    killed = KilledRun(folder, "filtered", steps, monkeypatch)
    resume = killed.kill_at_random(kills, 1, *FILTERS)
    if resume is not None:
        killed.finish(*FILTERS, *resume)
    metrics = read_metrics(killed.run / "metrics.jsonl")
    assert list(metrics) == list(range(1, steps + 1))
    slots = [slot for step in trained(killed.run).values() for slot in {slot for slot, _ in step}]
    void = sum(value for record in metrics.values() for name, value in record.items() if name.startswith("async/void/"))
    assert len(slots) == len(set(slots)) == steps * GROUPS - void
    assert all(record["groups"] == GROUPS for record in metrics.values())
    killed.check()

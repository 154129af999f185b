"""SIGINT, SIGTERM and SIGKILL at random moments of a run whose environments live in processes that heed no signal."""

import random
import signal
import subprocess
import time

import pytest

from tests.process.running import DEADLINE, STEPS, finish, lines, marked, started, wait_for
from trouper.actors.metrics import read_metrics

OPTIONS = [
    "environment.name=shaky:StubbornGuess",
    "environment.isolation=process",
    "rollout.max_concurrency=2",
    "evaluation.every_steps=6",
    "evaluation.tasks.source=trouper.envs.guess:guess_tasks",
    "evaluation.count=4",
    "evaluation.max_concurrency=1",
]


def wait_until_gone(mark):
    deadline = time.monotonic() + 10
    while marked(mark):
        assert time.monotonic() < deadline, marked(mark)
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_at_any_moment_ends_the_run_and_all_it_started_and_it_goes_on(folder, mark, kills, number):
    chance = random.Random(number)
    for attempt in range(kills):
        run, moment = folder / f"{number.name}-{attempt}", chance.uniform(0.5, 8)
        with started(folder, run, *OPTIONS) as process:
            try:
                assert process.wait(moment) == 0  # it was done before
            except subprocess.TimeoutExpired:
                process.send_signal(number)
                sent = time.monotonic()
                code = process.wait(DEADLINE)
                print(f"{number.name} after {moment:.2f} s: gone after {time.monotonic() - sent:.2f} s", flush=True)
                output = (folder / f"{run.name}.out").read_text()
                # A signal may also come when the run is done and the interpreter ends.
                assert code == 128 + number or f"{STEPS} steps in" in output, output
            assert marked(mark) == {}
        finish(folder, run, *OPTIONS, *(["--resume"] if (run / "config.toml").exists() else []))
        assert list(read_metrics(run / "metrics.jsonl")) == list(range(STEPS + 1))


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(folder, mark):
    run = folder / "twice"
    with started(folder, run, *OPTIONS) as process:
        wait_for(lambda: lines(run / "metrics.jsonl") >= 2, process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 130


@pytest.mark.slow
def test_when_the_run_is_killed_its_environments_end_too(folder, mark):
    run = folder / "orphans"
    with started(folder, run, *OPTIONS) as process:
        wait_for(lambda: lines(run / "metrics.jsonl") >= 2, process)
        assert len(marked(mark)) > 2
        process.kill()
        process.wait()
        wait_until_gone(mark)

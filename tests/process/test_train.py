"""Runs of the command in processes of their own: signals at awkward moments, and what `--resume` makes of them."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from trouper.actors.metrics import read_metrics

CONFIG = """\
[model.scratch]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8
intermediate_size = 32

[chat]
format = "plain"
alphabet = "0123456789;<>=?"
stop = ";"

[tasks]
source = "trouper.envs.guess:guess_tasks"

[environment]
name = "trouper.envs.guess:Guess"

[sampling]
max_prompt_tokens = 1
max_response_tokens = 2
max_turns = 5
max_context_tokens = 16

[engine]
slots = 8
chunk = 2
prefill_rows = 8
prefill_tokens = 4

[rollout]
num_generations = 2
max_concurrency = 8

[train]
max_steps = 24
groups_per_step = 3

[checkpoint]
save_interval_steps = 4

[log]
episodes_per_step = 100
"""
STEPS, GROUPS = 24, 3
DEADLINE = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("train")
    (path / "tiny.toml").write_text(CONFIG)
    return path


@contextmanager
def started(folder, run, *arguments):
    """`trouper train`, in a process group of its own; nothing of it is left afterwards."""
    entry = "import sys; from trouper.actors.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", entry, "train", str(folder / "tiny.toml"), "--run-dir", str(run), *arguments]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    log = folder / f"{run.name}.out"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=environment, cwd=folder
        )
    try:
        yield process
        with pytest.raises(ProcessLookupError):  # nobody of its group has stayed behind
            os.killpg(process.pid, 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(folder, run, *arguments):
    with started(folder, run, *arguments) as process:
        assert process.wait(DEADLINE) == 0, (folder / f"{run.name}.out").read_text()


def wait_for(condition, process):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines(path):
    return path.read_text().count("\n") if path.exists() else 0


def trained(run: Path):
    """What each step trained, as the newest life that wrote it has it: {step: {(slot, attempt), ...}}."""
    lives = defaultdict(dict)
    for line in (run / "episodes.jsonl").read_text().splitlines():
        episode = json.loads(line)
        lives[episode["step"]].setdefault(episode["life"], set()).add((episode["slot"], episode["attempt"]))
    return {step: by_life[max(by_life)] for step, by_life in sorted(lives.items())}


@pytest.fixture(scope="module")
def uninterrupted(folder):
    run = folder / "whole"
    finish(folder, run)
    assert list(read_metrics(run / "metrics.jsonl")) == list(range(1, STEPS + 1))
    return trained(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_stopped_run_goes_on_without_skipping_or_doubling_a_slot(folder, uninterrupted, seed):
    chance = random.Random(seed)
    number = chance.choice([signal.SIGINT, signal.SIGTERM])
    moment = chance.choice(["compiling", chance.randrange(1, STEPS - 2)])
    run = folder / f"stopped-{seed}"
    with started(folder, run) as process:
        if moment == "compiling":
            wait_for(lambda: (run / "log.txt").exists(), process)
        else:
            wait_for(lambda: lines(run / "metrics.jsonl") >= moment, process)
        process.send_signal(number)
        assert process.wait(DEADLINE) == 128 + number, (folder / f"{run.name}.out").read_text()
    done = lines(run / "metrics.jsonl")
    finish(folder, run, "--resume")
    assert trained(run) == uninterrupted
    assert list(read_metrics(run / "metrics.jsonl")) == list(range(1, STEPS + 1))
    # What was done before the signal was saved by it: no step was trained twice.
    assert lines(run / "metrics.jsonl") == STEPS
    assert done < STEPS


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(folder):
    run = folder / "twice"
    with started(folder, run) as process:
        wait_for(lambda: lines(run / "metrics.jsonl") >= 2, process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) == 130


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(folder, uninterrupted):
    run = folder / "killed"
    with started(folder, run) as process:
        wait_for(lambda: lines(run / "metrics.jsonl") >= 10, process)
        process.kill()
        process.wait()
    finish(folder, run, "--resume")
    assert trained(run) == uninterrupted


@pytest.mark.slow
def test_on_policy_a_stopped_run_ends_with_the_same_parameters(folder):
    from trouper.actors.launch import export

    def model(run):
        export(run, folder / f"{run.name}-model")
        return load_file(folder / f"{run.name}-model" / "model.safetensors")

    on_policy = ["rollout.max_staleness=0", "train.scale_rewards=batch", "optimizer.learning_rate=1e-3"]
    whole, halves = folder / "on-policy", folder / "in-two-halves"
    finish(folder, whole, *on_policy, "train.max_steps=8")
    finish(folder, halves, *on_policy, "train.max_steps=4")
    half = model(halves)
    shutil.rmtree(folder / "in-two-halves-model")
    finish(folder, halves, *on_policy, "train.max_steps=8", "--resume")
    expected, found = model(whole), model(halves)
    assert max(abs(expected[name] - half[name]).max() for name in expected) > 1e-4
    assert max(abs(expected[name] - found[name]).max() for name in expected) <= 1e-6


@pytest.mark.slow
def test_an_export_opens_as_a_model(folder, uninterrupted):
    from trouper.actors.launch import export
    from trouper.learner.weights import load_model

    assert export(folder / "whole", folder / "exported") == STEPS
    assert load_model(folder / "exported").config.hidden_size == 16

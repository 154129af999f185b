"""Runs of the command in processes of their own: signals at awkward moments, and what `--resume` makes of them."""

import random
import shutil
import signal

import pytest
from safetensors.numpy import load_file

from tests.process.running import DEADLINE, STEPS, finish, lines, started, trained, wait_for
from trouper.actors.config_file import load_config
from trouper.actors.metrics import read_metrics
from trouper.actors.run_directory import RunDirectory


@pytest.fixture(scope="module")
def uninterrupted(folder):
    run = folder / "whole"
    finish(folder, run)
    assert list(read_metrics(run / "metrics.jsonl")) == list(range(1, STEPS + 1))
    return trained(run)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
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


@pytest.mark.slow
def test_a_run_that_has_hardly_begun_goes_on_and_one_that_lost_its_checkpoints_says_so(folder):
    run = folder / "hardly-begun"
    with RunDirectory(run) as directory:
        directory.create(load_config(folder / "tiny.toml", ["train.max_steps=5"]))
    finish(folder, run, "train.max_steps=5", "--resume")
    assert list(read_metrics(run / "metrics.jsonl")) == [1, 2, 3, 4, 5]
    shutil.rmtree(run / "checkpoints")
    finish(folder, run, "train.max_steps=5", "--resume")
    log = (run / "log.txt").read_text()
    assert "the run begins again at step 0, and its 5 steps are done again" in log
    assert all(record["life"] == 1 for record in read_metrics(run / "metrics.jsonl").values())

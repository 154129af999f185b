import subprocess
import sys

import pytest
from msgspec.structs import replace

from trouper.actors.config import Model, RunConfig, Tasks, Train
from trouper.actors.config_file import load_config
from trouper.actors.run_directory import RunDirectory, differences
from trouper.channels import ConfigError
from trouper.learner.optimizer import OptimizerConfig

CONFIG = RunConfig(tasks=Tasks(source="tasks.jsonl", arguments={"low": 1}), model=Model(source="some/model"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "first"


def test_a_new_run_keeps_its_resolved_configuration(path):
    with RunDirectory(path) as run:
        run.create(CONFIG)
        assert load_config(run.config) == CONFIG


def test_a_place_that_holds_a_run_is_not_overwritten(path):
    with RunDirectory(path) as run:
        run.create(CONFIG)
    with RunDirectory(path) as run, pytest.raises(ConfigError, match=r"(?s)a run already.*--resume.*--run-dir.*delete"):
        run.create(CONFIG)


def test_a_place_that_holds_something_else_is_left_as_it_is(path):
    path.mkdir(parents=True)
    (path / "thesis.tex").touch()
    with RunDirectory(path) as run, pytest.raises(ConfigError, match=r"something else already \(thesis.tex\)"):
        run.create(CONFIG)
    assert [each.name for each in path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_place(path):
    path.parent.mkdir()
    path.touch()
    with RunDirectory(path) as run, pytest.raises(ConfigError, match="is a file"):
        run.create(CONFIG)


def test_a_place_that_cannot_be_written_is_refused_with_the_reason():
    with RunDirectory("/dev/null/run") as run, pytest.raises(ConfigError, match=r"cannot hold a run: .*--run-dir"):
        run.create(CONFIG)


def test_a_start_that_wrote_nothing_can_be_repeated(path):
    path.mkdir(parents=True)
    (path / "lock").touch()
    with RunDirectory(path) as run:
        run.create(CONFIG)


class TestResume:
    def test_the_same_configuration_goes_on(self, path):
        with RunDirectory(path) as run:
            run.create(CONFIG)
        with RunDirectory(path) as run:
            assert run.resume(CONFIG) == {}

    def test_there_must_be_a_run(self, path):
        with RunDirectory(path) as run, pytest.raises(ConfigError, match="leave --resume out"):
            run.resume(CONFIG)
        assert not path.exists()

    def test_what_may_change_is_told_and_kept_when_asked(self, path):
        with RunDirectory(path) as run:
            run.create(CONFIG)
        longer = replace(CONFIG, train=Train(max_steps=100))
        with RunDirectory(path) as run:
            assert run.resume(longer) == {"train.max_steps": (None, 100)}
            assert load_config(run.config) == CONFIG  # the start may still fail
            run.keep(longer)
            assert load_config(run.config) == longer

    def test_what_may_not_change_is_refused_by_name(self, path):
        with RunDirectory(path) as run:
            run.create(CONFIG)
        other = replace(
            CONFIG,
            tasks=replace(CONFIG.tasks, arguments={"low": 2}),
            train=Train(max_steps=100, groups_per_step=4),
            run=replace(CONFIG.run, seed=1),
            optimizer=OptimizerConfig(name="sgd"),
        )
        with RunDirectory(path) as run, pytest.raises(ConfigError) as caught:
            run.resume(other)
        message = str(caught.value)
        assert "tasks.arguments: the run has {'low': 1}, given is {'low': 2}" in message
        assert "train.groups_per_step: the run has 8, given is 4" in message
        assert "run.seed: the run has 0, given is 1" in message
        assert "optimizer.name: the run has 'adamw', given is 'sgd'" in message
        assert "max_steps" not in message
        assert load_config(path / "config.toml") == CONFIG


def test_a_section_that_comes_or_goes_is_a_difference():
    held_out = replace(CONFIG, evaluation=replace(CONFIG.evaluation, tasks=Tasks(source="held_out.jsonl")))
    assert differences(CONFIG, held_out)["evaluation.tasks.source"] == (None, "held_out.jsonl")
    assert differences(held_out, CONFIG)["evaluation.tasks.source"] == ("held_out.jsonl", None)
    assert differences(CONFIG, CONFIG) == {}


class TestLock:
    def test_two_runs_cannot_share_a_directory(self, path):
        with RunDirectory(path) as first, RunDirectory(path) as second:
            first.create(CONFIG)
            with pytest.raises(ConfigError, match=r"in use by another run \(process [0-9]+\)"):
                second.resume(CONFIG)
        with RunDirectory(path) as third:
            third.resume(CONFIG)

    def test_a_dead_process_holds_nothing(self, path):
        code = (
            "import os, sys; from pathlib import Path; from trouper.actors.run_directory import RunDirectory\n"
            f"RunDirectory({str(path)!r}).lock(); print('locked', flush=True); sys.stdin.read()"
        )
        path.mkdir(parents=True)
        with subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout.readline() == "locked\n"
            with RunDirectory(path) as run, pytest.raises(ConfigError, match=rf"process {other.pid}\)"):
                run.create(CONFIG)
            other.kill()
            other.wait()
        with RunDirectory(path) as run:
            run.create(CONFIG)

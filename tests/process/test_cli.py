import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trouper.actors.cli import main, report
from trouper.actors.config_file import load_config
from trouper.channels import ConfigError, HopelessRun, RestartLimit, RunError

CONFIG = """\
[run]
name = "tiny"

[model.scratch]
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 4
intermediate_size = 16

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
max_context_tokens = 16
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(CONFIG)
    return str(path)


def trouper(*arguments, **options):
    """The console script's entry, in a process of its own."""
    entry = "import sys; from trouper.actors.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", entry, *arguments], capture_output=True, text=True, timeout=120, check=False, **options
    )


class TestProcess:
    def test_help_and_version_need_no_jax(self):
        code = (
            "import sys; from trouper.actors.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "finally: print('jax' in sys.modules)"
        )
        for argument, said in (("--help", "train"), ("--version", "trouper ")):
            done = subprocess.run(
                [sys.executable, "-c", code, argument], capture_output=True, text=True, timeout=120, check=True
            )
            assert said in done.stdout
            assert done.stdout.endswith("False\n")

    def test_a_wrong_key_is_one_message_and_exit_code_2(self, config):
        done = trouper("train", config, "train.learning_rte=0.1")
        assert done.returncode == 2
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert "train.learning_rte = 0.1" in done.stderr
        assert "did you mean optimizer.learning_rate?" in done.stderr

    def test_no_command_is_exit_code_2(self):
        done = trouper()
        assert done.returncode == 2
        assert "usage: trouper" in done.stderr


class TestDryRun:
    def test_it_prints_configuration_numbers_and_graph_and_starts_nothing(self, config, tmp_path, capsys):
        assert main(["train", config, "--dry-run", "train.max_steps=7"]) == 0
        out = capsys.readouterr().out
        assert "max_steps = 7" in out
        assert "episodes in flight  at most 128" in out
        assert "parameters          " in out
        assert "flowchart" in out
        assert not (tmp_path / "runs").exists()

    def test_the_printed_configuration_loads_back_equal(self, config, tmp_path, capsys):
        assert main(["train", config, "run.seed=3", "--dry-run"]) == 0
        printed = tmp_path / "printed.toml"
        printed.write_text(capsys.readouterr().out.partition("\nsteps  ")[0])
        assert load_config(printed) == load_config(config, ["run.seed=3"])

    def test_a_model_that_is_not_here_is_not_fetched(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        path = tmp_path / "hub.toml"
        path.write_text(
            '[model]\nsource = "nobody/nothing"\n[tasks]\nsource = "trouper.envs.guess:guess_tasks"\n'
            '[environment]\nname = "trouper.envs.guess:Guess"\n'
        )
        assert main(["train", str(path), "--dry-run"]) == 0
        assert "known when the model's config.json is here" in capsys.readouterr().out

    def test_a_combination_that_cannot_work_is_refused(self, config, capsys):
        assert main(["train", config, "--dry-run", "sync.weight_sync_steps=4"]) == 2
        assert "4 - 1 = 3 steps old" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("override", "said"),
        [
            ("reward.functions=['trouper.envs.guess:no_such']", "no_such"),
            ("environment.name=trouper.envs.guess:Gess", "did you mean 'Guess'"),
            ("tasks.source=nowhere.jsonl", "tasks cannot be read from nowhere.jsonl"),
            ("tasks.source=bad.jsonl", "bad.jsonl, line 2: not JSON"),
            ("environment.arguments={size=3}", "'trouper.envs.guess:Guess' cannot be made with size"),
            ("chat.stop=x", "x"),
            ("tasks.epochs=2", "epochs and shuffle are for .jsonl files"),
            ("tasks.arguments={split='test'}", "'trouper.envs.guess:guess_tasks' cannot be made with split"),
            ("agent.arguments={x=1}", "takes no arguments, but was given ['x']"),
        ],
    )
    def test_names_are_looked_up(self, config, override, said, capsys):
        Path("bad.jsonl").write_text('{"prompt": "1"}\n{"prompt"\n')
        assert main(["train", config, "--dry-run", override]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mine:Worlt", "trouper.envs.single_turn:SingleTurn"])
def test_an_environment_that_cannot_be_made_as_asked_is_found_before_anything_starts(config, name, capsys):
    Path("mine.py").write_text("class World:\n    pass\n")
    assert main(["train", config, f"environment.name={name}", "environment.arguments={size=3}"]) == 2
    said = {"mine:Worlt": "did you mean 'World'", "trouper.envs.single_turn:SingleTurn": "it takes (field: str"}[name]
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_imports_ends_the_process_whatever_they_swallow(config, tmp_path, number):
    (tmp_path / "slow.py").write_text(
        "print('importing', flush=True)\ntry:\n    import time; time.sleep(100)\nexcept BaseException: pass\n"
    )
    code = (
        "import sys; from trouper.actors import cli, config_file\n"
        "def load(*_): import slow\n"
        "config_file.load_config = load; sys.exit(cli.main(sys.argv[1:]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "train", config], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.wait(60) == 128 + number


def test_the_graph_is_printed_alone(config, capsys):
    assert main(["graph", config]) == 0
    assert capsys.readouterr().out.startswith("flowchart")


def test_a_run_that_is_there_is_not_overwritten(config, tmp_path, capsys):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.toml").touch()
    assert main(["train", config, "--run-dir", "here"]) == 2
    assert "use --resume" in capsys.readouterr().err


def test_a_run_that_is_not_there_cannot_go_on(config, capsys):
    assert main(["train", config, "--resume"]) == 2
    assert "leave --resume out" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_only_what_is_a_gguf_file_is_converted(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "folder")]) == 2
    assert "model.gguf" in capsys.readouterr().err


def test_only_a_run_can_be_exported(tmp_path, capsys):
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "folder")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["train"], ["train", "x.toml", "--reume"], ["export", "a", "b", "c=d"], ["fly"]])
def test_wrong_arguments_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


class TestReport:
    def test_an_error_of_ours_is_its_message_and_its_exit_code(self, capsys):
        assert report(ConfigError("no such key")) == 2
        assert report(HopelessRun("nothing to learn from")) == 1
        assert capsys.readouterr().err == "trouper: no such key\ntrouper: nothing to learn from\n"

    def test_a_group_is_searched_for_the_error_that_says_most(self, capsys):
        first = OSError("disk full")
        limit = RestartLimit("trainer was restarted 3 times in 60 s", (), first)
        group = ExceptionGroup("outer", [ValueError("noise"), ExceptionGroup("inner", [limit])])
        assert report(group) == 1
        err = capsys.readouterr().err
        assert err == "trouper: trainer was restarted 3 times in 60 s\n  because of OSError: disk full\n"

    def test_causes_that_go_in_a_circle_are_told_once(self, capsys):
        first, second = OSError("disk full"), RunError("the run ended")
        first.__cause__, second.__cause__ = second, first
        assert report(second) == 1
        expected = "trouper: the run ended\n  because of OSError: disk full\n"
        assert capsys.readouterr().err == expected

    def test_a_bug_comes_with_its_traceback(self, capsys):
        assert report(ExceptionGroup("children", [KeyError("slot")])) == 1
        assert "KeyError: 'slot'" in capsys.readouterr().err

    def test_ctrl_c_is_exit_code_130(self, capsys):
        assert report(KeyboardInterrupt()) == 130
        assert report(BaseExceptionGroup("children", [ValueError("noise"), KeyboardInterrupt()])) == 130
        assert capsys.readouterr().err == ""

    def test_debugging_shows_the_traceback_of_our_own_errors_too(self, monkeypatch, capsys):
        monkeypatch.setenv("TROUPER_DEBUG", "1")
        assert report(ConfigError("no such key")) == 2
        assert "trouper.channels.errors.ConfigError: no such key" in capsys.readouterr().err

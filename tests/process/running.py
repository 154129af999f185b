"""Runs of the command in processes of their own, small enough to be started and ended many times."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest

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
DEADLINE = 600.0

MARK = "TROUPER_TEST_MARK"
"""An environment variable by whose value the processes of a test are found."""


def marked(mark: str) -> dict[int, str]:
    """The processes that were born with our mark in their environment, and their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


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

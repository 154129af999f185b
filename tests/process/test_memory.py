"""Memory is bounded by what the plan prints: a real process, real-sized episodes, a trainer that is far too slow."""

import json
import subprocess
import sys

import pytest

PROGRAM = '''
import json, resource, sys
from functools import partial
from pathlib import Path

import trio
import trio.testing

from trouper.actors.config_file import parse_config
from trouper.actors.ledger import Ledger
from trouper.actors.metrics import Recorder
from trouper.actors.plan import plan
from trouper.actors.progress import open_screen
from trouper.actors.redo import NOTHING
from trouper.actors.run_directory import RunDirectory
from trouper.actors.simulation import MemoryCheckpoints, SimulatedAccelerator, SimulatedEngine, SimulatedLearner
from trouper.actors.simulation import default_seconds
from trouper.actors.standard import Cast, StandardRun
from trouper.channels import Task
from trouper.envs import PlainChat, Rewards, StepResult, model_agent



def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Letters:
    """Three answers of 200 characters each, which no two episodes share."""

    async def reset(self, task):
        self.left = 3
        return "a"

    async def step(self, action):
        await trio.sleep(0.1)
        self.left -= 1
        return StepResult(action[:1] * 200, done=self.left == 0)

    def reward(self):
        return float(self.left)


class Stream:
    def task(self, draw):
        return Task(str(draw), {"draw": draw})


class Learner(SimulatedLearner):
    """Forgets what it has trained, as the real one does, and looks how much memory there is."""

    def __init__(self):
        super().__init__()
        self.rss = []

    def update(self):
        self.rss.append(resident())
        metrics = super().update()
        self.trained.clear()
        return metrics


def slow(call):
    return {"update": 100.0, "sync": 0.1}.get(call, default_seconds(call))


def configured(steps, groups):
    return parse_config({
        "model": {"source": "simulated"},
        "tasks": {"source": "tests:tasks"},
        "chat": {"format": "plain", "alphabet": "abcdefghijklmno;", "stop": ";"},
        "environment": {"isolation": "inline"},
        "sampling": {"max_response_tokens": 8, "max_turns": 4, "max_prompt_tokens": 4, "max_context_tokens": 640},
        "engine": {"slots": 64, "chunk": 8},
        "rollout": {"max_concurrency": 64},
        "train": {"max_steps": steps, "groups_per_step": groups},
        "checkpoint": {"save_interval_steps": 10},
    })


async def play(config, folder, learner):
    directory = RunDirectory(folder)
    folder.mkdir()
    ledger = Ledger(directory.ledger)
    ledger.begin(1, 0)
    with Recorder(directory, 1, open_screen(config.train.max_steps, done=0)) as recorder:
        run = StandardRun(
            config,
            Cast(
                chat=PlainChat(config.chat.alphabet, ";"),
                tasks=Stream(),
                held_out=None,
                make_environment=Letters,
                agent=model_agent,
                rewards=Rewards({}, ()),
            ),
            learner,
            learner.publish,
            lambda: None,
            partial(SimulatedEngine, slots=config.engine.slots, chunk=config.engine.chunk, length=640),
            recorder,
            MemoryCheckpoints(),
            ledger,
            learner.weights(),
            NOTHING,
            make_accelerator=partial(SimulatedAccelerator, seconds=slow),
        )
        await run.graph.run()
    ledger.close()
    return run


folder, steps = Path(sys.argv[1]), int(sys.argv[2])
clock = partial(trio.testing.MockClock, autojump_threshold=0)
trio.run(play, configured(2, groups=1), folder / "first", Learner(), clock=clock())  # imports what there is
base = resident()
learner, config = Learner(), configured(steps, groups=8)
run = trio.run(play, config, folder / "run", learner, clock=clock())
print(json.dumps({
    "base": base,
    "rss": learner.rss,
    "bound": plan(config).total_bytes("host"),
    "slower": run.trainer_device.busy_seconds / run.sampler_device.busy_seconds,
    "outcomes": next(each.received for each in run.graph.statistics() if each.name == "episodes"),
}))
'''

MB = 1_000_000


@pytest.mark.slow
def test_memory_is_flat_and_within_the_plan_where_the_trainer_is_100_times_slower_than_the_rollouts(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), "157"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    grown = [rss - found["base"] for rss in found["rss"]]
    assert found["outcomes"] >= 10_000
    assert found["slower"] >= 100
    assert max(grown) < found["bound"] < 20 * MB
    half = len(grown) // 2
    assert max(grown[half:]) - grown[half] < 2 * MB

"""The whole learner on a tiny model with slow tools: settings of the pipeline against the ideal for each of them.

    python benchmarks/pipeline.py [--latency 0.1] [--steps 24] [--quick]

4 prompts x 4 members x 4 turns x 8 tokens. Each row is a real run: real engine, real learner, and a tool that sleeps.
The ideal beside it is the same run, rule, tool latencies and staleness in virtual time on devices that cost nothing:
what no pipeline of that rule can beat.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import reporting
import trio
import trio.testing

from trouper.actors.config import RunConfig
from trouper.actors.config_file import parse_config
from trouper.actors.launch import launch
from trouper.actors.ledger import Ledger
from trouper.actors.metrics import Recorder, read_metrics
from trouper.actors.redo import NOTHING
from trouper.actors.run_directory import RunDirectory
from trouper.actors.simulation import MemoryCheckpoints, SimulatedAccelerator, SimulatedEngine, SimulatedLearner
from trouper.actors.standard import Cast, StandardRun
from trouper.channels import Task
from trouper.envs import PlainChat, Rewards, StepResult, model_agent

ALPHABET = "abcdefghijklmno;"
TURNS, GROUPS, MEMBERS = 4, 4, 4

LAWS: dict[str, Callable[[Random, float], float]] = {
    "constant": lambda random, mean: mean,
    "exponential": lambda random, mean: random.expovariate(1 / mean),
    "lognormal": lambda random, mean: random.lognormvariate(math.log(mean) - 1.5**2 / 2, 1.5),
    "bimodal": lambda random, mean: mean * (10.5 if random.random() < 0.05 else 0.5),
}
SETTINGS = {"synchronous": 0, "one step off": 1, "asynchronous": 3}


class SlowTool:
    """Sleeps at every step, as long as a law and the attempt say; the score counts a letter."""

    def __init__(self, law: str, mean: float) -> None:
        self._law, self._mean = LAWS[law], mean

    async def reset(self, task: Task, seed: int) -> str:
        """Begin."""
        self._random, self._left, self._said = Random(seed), TURNS, ""
        return "a"

    async def step(self, action: str) -> StepResult:
        """Sleep."""
        await trio.sleep(self._law(self._random, self._mean))
        self._left -= 1
        self._said += action
        return StepResult("b", done=self._left == 0)

    def reward(self) -> float:
        """Share of the letter a."""
        return self._said.count("a") / max(1, len(self._said))


class Numbers:
    """Endless tasks."""

    def task(self, draw: int) -> Task:
        """A task without content."""
        return Task(str(draw))


def configured(staleness: int, steps: int) -> RunConfig:
    """The run's configuration."""
    return parse_config(
        {
            "model": {
                "scratch": {
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "head_dim": 16,
                    "intermediate_size": 64,
                }
            },
            "tasks": {"source": "pipeline:Numbers"},
            "chat": {"format": "plain", "alphabet": ALPHABET, "stop": ";"},
            "environment": {"isolation": "inline"},
            "sampling": {
                "max_prompt_tokens": 4,
                "max_response_tokens": 8,
                "max_turns": TURNS,
                "max_context_tokens": 64,
            },
            "engine": {"slots": GROUPS * MEMBERS * (staleness + 1), "chunk": 8, "prefill_tokens": 8},
            "rollout": {
                "num_generations": MEMBERS,
                "max_concurrency": GROUPS * MEMBERS * (staleness + 1),
                "max_staleness": staleness,
            },
            "train": {"max_steps": steps, "groups_per_step": GROUPS},
            "checkpoint": {"save_interval_steps": 0},
        }
    )


def cast(law: str, mean: float) -> Cast:
    """What plays."""
    return Cast(
        chat=PlainChat(ALPHABET, ";"),
        tasks=Numbers(),
        held_out=None,
        make_environment=partial(SlowTool, law, mean),
        agent=model_agent,
        rewards=Rewards({}, ()),
    )


class Silent:
    """A screen that shows nothing."""

    def step(self, step: int, elapsed: float, metrics: Any) -> None:
        """Nothing."""

    def update(self, elapsed: float, metrics: Any) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self, summary: str) -> None:
        """Nothing."""


def measured(config: RunConfig, law: str, mean: float) -> dict[str, float]:
    """One real run, its first third left out: compilation and the filling of the pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        launch(config, run_dir=Path(folder) / "run", cast=cast(law, mean), screen=Silent())
        steps = [
            record for step, record in sorted(read_metrics(Path(folder) / "run" / "metrics.jsonl").items()) if step
        ]
    late = steps[len(steps) // 3 :]
    seconds = late[-1]["time"] - steps[len(steps) // 3 - 1]["time"]

    def total(name: str) -> float:
        return sum(record.get(name) or 0.0 for record in late)

    return {
        "episodes/s": total("episodes") / seconds,
        "tokens/s": total("completions/tokens") / seconds,
        "trainer wait": total("time/trainer_wait") / seconds,
        "sync": total("time/weight_sync") / seconds,
        "staleness": statistics.fmean(record.get("async/staleness_mean") or 0.0 for record in late),
        "reward": statistics.fmean(record["reward/mean"] for record in late[-5:]),
    }


async def _ideal(config: RunConfig, law: str, mean: float, folder: Path) -> list[float]:
    learner, checkpoints, directory = SimulatedLearner(), MemoryCheckpoints(), RunDirectory(folder)
    ledger = Ledger(directory.ledger)
    ledger.begin(1, 0)
    ends: list[float] = []

    class Ends(Recorder):
        def record(self, step: int, *given: Any) -> None:
            super().record(step, *given)
            ends.append(trio.current_time())

    with Ends(directory, 1, Silent()) as recorder:
        run = StandardRun(
            config,
            cast(law, mean),
            learner,
            learner.publish,
            partial(learner.rewind, checkpoints),
            partial(SimulatedEngine, slots=config.engine.slots, chunk=8, length=64),
            recorder,
            checkpoints,
            ledger,
            learner.weights(),
            NOTHING,
            make_accelerator=partial(SimulatedAccelerator, seconds=lambda call: 0.0),
        )
        await run.graph.run()
    ledger.close()
    return ends


def ideal(config: RunConfig, law: str, mean: float) -> float:
    """Episodes per second of the same run on devices that cost nothing, in virtual time."""
    with tempfile.TemporaryDirectory() as folder:
        clock = trio.testing.MockClock(autojump_threshold=0)
        ends = trio.run(_ideal, config, law, mean, Path(folder), clock=clock)
    first = len(ends) // 3
    return (len(ends) - first) * GROUPS * MEMBERS / (ends[-1] - ends[first - 1])


def main() -> int:
    """Measure every setting under every law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.1, help="mean seconds of a tool call")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="one law, few steps: does it run?")
    given = parser.parse_args()
    laws = ["constant"] if given.quick else list(LAWS)
    steps = 6 if given.quick else given.steps
    started, rows, figures = time.perf_counter(), [], []
    for law in laws:
        for setting, staleness in SETTINGS.items():
            config = configured(staleness, steps)
            best = ideal(config, law, given.latency)
            found = measured(config, law, given.latency)
            found |= {"ideal episodes/s": best, "of the ideal": found["episodes/s"] / best}
            figures.append({"law": law, "setting": setting, **found})
            rows.append([law, setting, *found.values()])
    columns = ["latency", "setting", *list(figures[0])[2:]]
    reporting.show(f"{GROUPS} prompts x {MEMBERS} members x {TURNS} turns, tool {given.latency:g} s", columns, rows)
    if not given.quick:
        reporting.record("pipeline", {"latency": given.latency, "steps": steps, "rows": figures})
    print(f"\n{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

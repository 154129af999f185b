"""The whole learner on a tiny model with slow tools: settings of the pipeline against the ideals for each of them.

    python benchmarks/pipeline.py [--latency 0.1] [--steps 24] [--tunix PYTHON] [--rounds 2] [--quick]

4 prompts x 4 members x 4 turns x 8 tokens. Each row is a real run: real engine, real learner, and a tool that sleeps.
The ideals beside it are the same run (rule, tool latencies, staleness, tasks and seeds) in virtual time, on devices
that cost nothing, which no pipeline of that rule can beat, and on devices whose calls take what they took on average in
the real run: what this machine allows, and what orchestration is judged by. Ledger and disk cost nothing in either.
Only where late groups are dropped is an ideal one of many: which group is late hangs on ties and milliseconds.

`--tunix` names a Python that has Tunix (`python -m venv DIR && DIR/bin/pip install google-tunix==0.1.7`); its agentic
GRPO learner plays the same scene, in turns with ours.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pipeline_scenario as scene
import reporting
import trio
import trio.testing

from trouper.actors.accelerator import name_of
from trouper.actors.account import resident_mib
from trouper.actors.config import RunConfig
from trouper.actors.config_file import parse_config
from trouper.actors.graph import Graph
from trouper.actors.launch import launch
from trouper.actors.ledger import Ledger
from trouper.actors.metrics import Recorder, read_metrics
from trouper.actors.redo import NOTHING
from trouper.actors.run_directory import RunDirectory
from trouper.actors.simulation import MemoryCheckpoints, SimulatedAccelerator, SimulatedEngine, SimulatedLearner
from trouper.actors.standard import Cast, StandardRun, standard_graph
from trouper.actors.summary import IN_TIME, LATE
from trouper.channels import Task
from trouper.envs import PlainChat, Rewards, StepResult, model_agent

PEER = Path(__file__).parent / "peers" / "pipeline_tunix.py"

SETTINGS = {
    "synchronous": (0, "wait"),
    "one step off": (1, "wait"),
    "one step off, drop": (1, "drop"),
    "asynchronous": (3, "wait"),
    "asynchronous, drop": (3, "drop"),
}
"""`rollout.max_staleness` and `rollout.on_late`."""

ENOUGH, BAR = 0.8, 0.97
"""Where tools take this share of an episode, so much of what the devices allow should be reached."""


class SlowTool:
    """Sleeps at every step, as long as a law and the attempt say; the score counts a letter."""

    def __init__(self, law: str, mean: float) -> None:
        self._law, self._mean = scene.LAWS[law], mean

    async def reset(self, task: Task, seed: int) -> str:
        """Begin."""
        self._random, self._left, self._said = Random(seed), scene.TURNS, ""
        return scene.FIRST

    async def step(self, action: str) -> StepResult:
        """Sleep."""
        await trio.sleep(self._law(self._random, self._mean))
        self._left -= 1
        self._said += action
        return StepResult(scene.OBSERVATION, done=self._left == 0)

    def reward(self) -> float:
        """What was said is judged whole."""
        return scene.score(self._said)


class Numbers:
    """Endless tasks."""

    def task(self, draw: int) -> Task:
        """A task without content."""
        return Task(str(draw))


def configured(staleness: int, on_late: str, steps: int) -> RunConfig:
    """The run's configuration."""
    ahead = scene.GROUPS * scene.MEMBERS * (staleness + 1)
    return parse_config(
        {
            "model": {
                "scratch": {
                    "hidden_size": scene.WIDTH,
                    "num_hidden_layers": scene.LAYERS,
                    "num_attention_heads": scene.HEADS,
                    "num_key_value_heads": scene.HEADS,
                    "head_dim": scene.WIDTH // scene.HEADS,
                    "intermediate_size": scene.MLP_WIDTH,
                }
            },
            "tasks": {"source": "pipeline:Numbers"},
            "chat": {"format": "plain", "alphabet": scene.ALPHABET, "stop": ";"},
            "environment": {"isolation": "inline"},
            "sampling": {
                "max_prompt_tokens": 4,
                "max_response_tokens": scene.TOKENS,
                "max_turns": scene.TURNS,
                "max_context_tokens": 64,
            },
            # Whatever waits is taken in at once, as the simulated engine does.
            "engine": {"slots": ahead, "chunk": scene.TOKENS, "prefill_rows": ahead, "prefill_tokens": 8},
            "rollout": {
                "num_generations": scene.MEMBERS,
                "max_concurrency": ahead,
                "max_staleness": staleness,
                "on_late": on_late,
            },
            "train": {"max_steps": steps, "groups_per_step": scene.GROUPS},
            "optimizer": {"learning_rate": scene.LEARNING_RATE},
            "checkpoint": {"save_interval_steps": 0},
        }
    )


def cast(law: str, mean: float) -> Cast:
    """What plays."""
    return Cast(
        chat=PlainChat(scene.ALPHABET, ";"),
        tasks=Numbers(),
        held_out=None,
        make_environment=partial(SlowTool, law, mean),
        agent=model_agent,
        rewards=Rewards({}, ()),
    )


class Observed:
    """What a run's devices take, and its memory; a screen that shows nothing.

    Args:
        first: the step after which it counts: before lie compilation and the filling of the pipeline.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self.inside: defaultdict[str, list[float]] = defaultdict(list)
        """Seconds of each device call, by the name of what was called."""
        self.around: list[float] = []
        """Seconds that the caller of each waited beyond them: the way to the device's thread and back."""
        self.peak_mib = 0.0

    def wire(self, run: StandardRun) -> Graph:
        """The standard graph, with devices that are timed."""
        for device in (run.sampler_device, run.trainer_device):
            device.run = partial(self._run, device.run)  # type: ignore[method-assign]
        return standard_graph(run)

    async def _run(self, run: Callable[..., Any], call: Callable[..., Any], *args: Any) -> Any:
        name = name_of(call).rpartition(".")[2]
        took = 0.0

        def timed() -> Any:
            nonlocal took
            began = time.perf_counter()
            try:
                return call(*args)
            finally:
                took = time.perf_counter() - began

        timed.__qualname__ = name_of(call)
        began = time.perf_counter()
        result = await run(timed)
        self.inside[name].append(took)
        self.around.append(time.perf_counter() - began - took)
        return result

    def seconds(self, call: str) -> float:
        """What a call takes on average."""
        return statistics.fmean(self.inside.get(call, [0.0]))

    def step(self, step: int, elapsed: float, metrics: Any) -> None:
        """A step is done."""
        self.peak_mib = max(self.peak_mib, resident_mib())
        if step == self._first:
            self.inside.clear()
            self.around.clear()

    def update(self, elapsed: float, metrics: Any) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self, summary: str) -> None:
        """Nothing."""


def measured(config: RunConfig, law: str, mean: float) -> tuple[dict[str, Any], Observed]:
    """One real run, without its first third."""
    first = (config.train.max_steps or 0) // 3
    observed = Observed(first)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        launch(config, run_dir=run_dir, cast=cast(law, mean), wire=observed.wire, screen=observed)
        steps = [record for step, record in sorted(read_metrics(run_dir / "metrics.jsonl").items()) if step]
    late = steps[first:]
    seconds = late[-1]["time"] - steps[first - 1]["time"]

    def total(name: str) -> float:
        return sum(record.get(name) or 0.0 for record in late)

    def mean_of(name: str) -> float:
        return statistics.fmean(record.get(name) or 0.0 for record in late)

    found = {
        "episodes/s": total("episodes") / seconds,
        "tokens/s": total("completions/tokens") / seconds,
        "trainer wait": total("time/trainer_wait") / seconds,
        "sampler idle": mean_of("device/sampler/idle_frac"),
        "sync": total("time/weight_sync") / seconds,
        "tools": mean_of("time/episode/environment") / mean_of("time/episode/total"),
        "hop µs": statistics.median(observed.around) * 1e6,
        "MiB": observed.peak_mib,
        "staleness": mean_of("async/staleness_mean"),
        "max": max(record.get("async/staleness_max") or 0.0 for record in late),
        "reward": statistics.fmean(record["reward/mean"] for record in steps[-len(steps) // 4 :]),
        "dropped": by_length(steps),
    }
    return found, observed


def by_length(steps: list[dict[str, Any]]) -> str:
    """Groups that were dropped, of all, by the tokens of their episodes."""
    counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for record in steps:
        for name, count in record.items():
            if name.startswith((LATE, IN_TIME)):
                counts[int(name.split("_")[-2])][name.startswith(IN_TIME)] += int(count)
    return " ".join(f"{late}/{late + kept}<={tokens}" for tokens, (late, kept) in sorted(counts.items())) or "-"


async def _ideal(
    config: RunConfig, law: str, mean: float, seconds: Callable[[str], float], folder: Path
) -> list[float]:
    learner, checkpoints, directory = SimulatedLearner(), MemoryCheckpoints(), RunDirectory(folder)
    ledger = Ledger(directory.ledger)
    ledger.begin(1, 0)
    ends: list[float] = []

    class Ends(Recorder):
        def record(self, step: int, *given: Any) -> None:
            super().record(step, *given)
            ends.append(trio.current_time())

    with Ends(directory, 1, Observed(0)) as recorder:
        run = StandardRun(
            config,
            cast(law, mean),
            learner,
            learner.publish,
            partial(learner.rewind, checkpoints),
            partial(SimulatedEngine, slots=config.engine.slots, chunk=config.engine.chunk, length=64),
            recorder,
            checkpoints,
            ledger,
            learner.weights(),
            NOTHING,
            make_accelerator=partial(SimulatedAccelerator, seconds=seconds),
        )
        await run.graph.run()
    ledger.close()
    return ends


def ideal(config: RunConfig, law: str, mean: float, seconds: Callable[[str], float]) -> float:
    """Episodes per second of the same run in virtual time, without its first third.

    Args:
        config: of the run.
        law: of the tool.
        mean: likewise.
        seconds: what a device call takes, by the name of what is called.
    """
    with tempfile.TemporaryDirectory() as folder:
        clock = trio.testing.MockClock(autojump_threshold=0)
        ends = trio.run(_ideal, config, law, mean, seconds, Path(folder), clock=clock)
    first = len(ends) // 3
    return (len(ends) - first) * scene.GROUPS * scene.MEMBERS / (ends[-1] - ends[first - 1])


def compare_settings(laws: list[str], mean: float, steps: int) -> list[dict[str, Any]]:
    """Every setting under every law, beside its ideals."""
    rows = []
    for law in laws:
        for setting, (staleness, on_late) in SETTINGS.items():
            config = configured(staleness, on_late, steps)
            found, observed = measured(config, law, mean)
            rate = found["episodes/s"]
            free = ideal(config, law, mean, lambda call: 0.0)
            costly = ideal(config, law, mean, observed.seconds)
            ideals = {"ideal": free, "of it": rate / free, "with devices": costly, "of that": rate / costly}
            rows.append({"law": law, "setting": setting, **ideals, **found})
    columns = ["law", "setting", "episodes/s", "ideal", "of it", "with devices", "of that", "tokens/s", "reward"]
    reporting.show(
        f"{scene.SIZES}, tool {mean:g} s, {steps} steps", columns, [[row[name] for name in columns] for row in rows]
    )
    rest = ["law", "setting", *(name for name in rows[0] if name not in columns)]
    reporting.show("Where the time went", rest, [[row[name] for name in rest] for row in rows])
    judged = [row["of that"] for row in rows if row["tools"] >= ENOUGH and not row["setting"].endswith("drop")]
    if judged:
        print(
            f"\n{len(judged)} of {len(rows)} rows wait for late groups and have tools for {ENOUGH:.0%} of an episode "
            f"or more; of what their devices allow they reach {reporting.spread(judged)}; "
            f"{sum(each >= BAR for each in judged)} reach {BAR:g}"
        )
    return rows


def theirs(python: str, law: str, mean: float, off_policy: int, steps: int) -> float:
    """Episodes per second of Tunix's learner, in a process of its own, over the steps that it did; 0 if too few."""
    asked = {"law": law, "mean": mean, "off_policy": off_policy, "steps": steps}
    # Its asynchronous mode wants a device each for trainer and rollout.
    flags = " --xla_force_host_platform_device_count=2" if off_policy else ""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + flags}
    done = subprocess.run(
        [python, PEER], input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["steps"] < steps:
        print(f"Tunix stalled after {found['steps']} of {steps} steps (tool {mean:g} s, off_policy_steps {off_policy})")
    rate = float(found["episodes/s"])
    return 0.0 if math.isnan(rate) else rate


def beside_tunix(python: str, mean: float, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Both learners in turns, with a tool that takes no time and with one that does."""
    rows = []
    for seconds in (0.0, mean):
        for setting, (ours, off_policy) in {"synchronous": (0, 0), "asynchronous": (3, 1)}.items():
            config = configured(ours, "wait", steps)
            rates = reporting.in_turns(
                {
                    "trouper": lambda: measured(config, "constant", seconds)[0]["episodes/s"],  # noqa: B023
                    "tunix": lambda: theirs(python, "constant", seconds, off_policy, max(6, steps // 2)),  # noqa: B023
                },
                rounds,
            )
            times = reporting.median_ratio(rates["trouper"], rates["tunix"]) if all(rates["tunix"]) else None
            rows.append({"tool": seconds, "setting": setting, **rates, "times Tunix": times})
    shown = [
        [
            row["tool"],
            row["setting"],
            reporting.spread(row["trouper"]),
            reporting.spread(row["tunix"]),
            row["times Tunix"] or "it stalled",
        ]
        for row in rows
    ]
    reporting.show("Beside Tunix, constant tool: episodes/s", ["tool s", "setting", "trouper", "Tunix", "times"], shown)
    return rows


def main() -> int:
    """Measure every setting under every law."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=0.1, help="mean seconds of a tool call")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tunix", metavar="PYTHON", help="an interpreter that has google-tunix 0.1.7")
    parser.add_argument("--rounds", type=int, default=2, help="beside Tunix")
    parser.add_argument("--quick", action="store_true", help="one law, few steps: does it run?")
    given = parser.parse_args()
    laws = ["constant"] if given.quick else list(scene.LAWS)
    steps = 6 if given.quick else given.steps
    started = time.perf_counter()
    figures: dict[str, Any] = {"latency": given.latency, "steps": steps}
    figures["rows"] = compare_settings(laws, given.latency, steps)
    if given.tunix:
        figures["tunix"] = beside_tunix(given.tunix, given.latency, steps, 1 if given.quick else given.rounds)
    else:
        print("without --tunix PYTHON there is no side to compare with; see --help")
    if not given.quick:
        reporting.record("pipeline", figures)
    print(f"\n{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

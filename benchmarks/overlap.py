"""What it gives to decode and train at once, and how late the event loop then is: would two processes pay?

    python benchmarks/overlap.py [--seconds 5] [--rounds 3] [--quick]

A real engine decodes and a real learner trains a model of 14 million random parameters. Each alone, in turns on one
thread, at once on one device, at once on a device of its own each (two CPU devices), and in a process each. Work is
what of its rate alone each of the two reaches, added up: 1 is no better than in turns, 2 is as if each were alone. No
weights are synchronised, which flatters the two processes: theirs would have to travel from one to the other.

Meanwhile 1,000 tasks of the event loop sleep for about a second each; lag is how much later they wake than they asked.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import reporting
import trio
from flax import nnx

from trouper.actors.accelerator import DeviceThread
from trouper.actors.garbage import collecting_rarely
from trouper.channels import Attempt, Episode, Group, Row, Task
from trouper.learner.batch import BatchConfig
from trouper.learner.decoder import Decoder
from trouper.learner.engine import Engine, Request
from trouper.learner.learner import Learner
from trouper.learner.loss import LossConfig
from trouper.learner.model_config import ModelConfig
from trouper.learner.optimizer import OptimizerConfig
from trouper.learner.weights import init_model

TIMERS = 1000
SLOTS, CHUNK, PROMPT, ANSWER = 16, 8, 32, 64
MEMBERS, COMPLETION = 8, 24
BAR = 0.020
"""Seconds of lag that 99 of 100 wakes are to stay below while both work."""


def shape(quick: bool) -> ModelConfig:
    """Of the model."""
    return ModelConfig(
        vocab_size=64 if quick else 8192,
        hidden_size=32 if quick else 384,
        num_hidden_layers=2 if quick else 6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16 if quick else 64,
        intermediate_size=64 if quick else 1024,
        tie_word_embeddings=True,
    )


def make_group(vocabulary: int) -> Group:
    """A group of random tokens with advantages of both signs."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, PROMPT)
    mask = np.arange(PROMPT + COMPLETION) >= PROMPT
    episodes = []
    for member in range(MEMBERS):
        tokens = np.concatenate([prompt, rng.integers(0, vocabulary, COMPLETION)]).astype(np.int32)
        row = Row(tokens, mask, np.where(mask, -9, 0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32))
        episodes.append(Episode(Attempt(0, 0, member, 0, 0, Task("t")), (row,), float(member % 2), "done", 1))
    return Group(0, 0, tuple(episodes), np.array([-1, 1] * (MEMBERS // 2), np.float32))


class Scene:
    """A sampler's and a trainer's work, on the first and the last device that there is."""

    def __init__(self, quick: bool) -> None:
        devices = jax.devices()
        decoder = init_model(shape(quick), 0)
        self.learner = Learner(
            decoder,
            loss=LossConfig(),
            optimizer=OptimizerConfig(learning_rate=1e-5),
            batch=BatchConfig(row_tokens=PROMPT + MEMBERS * COMPLETION, micro_batch_size=1),
            devices=devices[:1],
        )
        graph, state = nnx.split(decoder)
        params = self.learner.copy_params(device=devices[-1])
        sampled: Decoder = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), params))
        self.engine = Engine(sampled, slots=SLOTS, length=PROMPT + ANSWER, chunk=CHUNK, kv_buckets=())
        self._group = make_group(decoder.config.vocab_size)
        self._prompt = self._group.episodes[0].rows[0].tokens[:PROMPT]
        self._ids = itertools.count()
        self.learner.warm_up()
        self.engine.warm_up()

    async def decode(self, device: DeviceThread, until: float, rates: dict[str, float]) -> None:
        """Keep all slots busy; tokens per second."""
        started, before = time.perf_counter(), self.engine.statistics.decoded_tokens
        while time.perf_counter() < until:
            while self.engine.waiting + self.engine.live < SLOTS:
                id = next(self._ids)
                self.engine.submit(Request(id, id, self._prompt, ANSWER, seed=id))
            if self.engine.needs_prefill:
                await device.run(self.engine.prefill)
            for finished in await device.run(self.engine.decode):
                self.engine.release(finished.id)
        done = self.engine.statistics.decoded_tokens - before
        rates["decode"] = done / (time.perf_counter() - started)

    async def train(self, device: DeviceThread, until: float, rates: dict[str, float]) -> None:
        """One group after the other; completion tokens per second."""
        started, steps = time.perf_counter(), 0
        while time.perf_counter() < until:
            await device.run(self.learner.add, [self._group])
            await device.run(self.learner.update)
            steps += 1
        rates["train"] = steps * MEMBERS * COMPLETION / (time.perf_counter() - started)


async def _tick(lags: list[float], chance: random.Random) -> None:
    pause = chance.random()
    while True:
        due = time.perf_counter() + pause
        await trio.sleep(pause)
        lags.append(time.perf_counter() - due)
        pause = chance.uniform(0.9, 1.1)


async def measure(scene: Scene, what: Sequence[str], seconds: float, *, in_turns: bool) -> dict[str, Any]:
    """Rates of what is done at once, and the loop's lag meanwhile."""
    rates: dict[str, float] = {}
    lags: list[float] = []
    chance = random.Random(0)
    sampler = DeviceThread("sampler")
    trainer = sampler if in_turns else DeviceThread("trainer")
    async with trio.open_nursery() as nursery:
        for _ in range(TIMERS):
            nursery.start_soon(_tick, lags, chance)
        await trio.sleep(0.5)  # until they are spread over the second
        lags.clear()
        until = time.perf_counter() + seconds
        async with trio.open_nursery() as work:
            work.start_soon(trio.sleep, seconds)
            if "decode" in what:
                work.start_soon(scene.decode, sampler, until, rates)
            if "train" in what:
                work.start_soon(scene.train, trainer, until, rates)
        nursery.cancel_scope.cancel()
    p50, p99 = np.percentile(lags, [50, 99])
    return {**rates, "lag": {"p50": float(p50), "p99": float(p99), "max": max(lags)}}


def serve(quick: bool) -> None:
    """Be a process of the benchmark: measure what is asked for, line by line."""
    scene = Scene(quick)
    print("ready", flush=True)
    with collecting_rarely():  # as every run
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(trio.run(_measure, scene, asked)), flush=True)


async def _measure(scene: Scene, asked: dict[str, Any]) -> dict[str, Any]:
    return await measure(scene, asked["what"], asked["seconds"], in_turns=asked["in_turns"])


class Process:
    """A process that serves, with so many CPU devices."""

    def __init__(self, devices: int, quick: bool) -> None:
        flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
        command = [sys.executable, str(Path(__file__)), "--serve", *(["--quick"] if quick else [])]
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ready(self) -> None:
        """Wait until all is compiled."""
        self._line()

    def ask(self, what: Sequence[str], seconds: float, *, in_turns: bool = False) -> None:
        """Begin to measure."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, "seconds": seconds, "in_turns": in_turns}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What was measured."""
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def close(self) -> None:
        """End it."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with {self._process.wait()}")
        return line


def one_round(one: Process, two: Process, other: Process, seconds: float) -> dict[str, dict[str, Any]]:
    """Everything once, side by side."""
    found: dict[str, dict[str, Any]] = {}
    both = ["decode", "train"]
    for name, process, what, in_turns in (
        ("idle", one, [], False),
        ("decode alone", one, ["decode"], False),
        ("train alone", one, ["train"], False),
        ("in turns", one, both, True),
        ("at once, one device", one, both, False),
        ("at once, two devices", two, both, False),
    ):
        process.ask(what, seconds, in_turns=in_turns)
        found[name] = process.answer()
    one.ask(["train"], seconds)
    other.ask(["decode"], seconds)
    found["two processes"] = one.answer() | {"decode": other.answer()["decode"]}
    for rates in found.values():
        alone = ((rates[what], found[f"{what} alone"][what]) for what in both if what in rates)
        rates["work"] = sum(rate / full for rate, full in alone)
    return found


def main() -> int:
    """Measure, or serve the one who does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a tiny model, one short round: does it run?")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.quick)
        return 0
    seconds, rounds = (0.5, 1) if given.quick else (given.seconds, given.rounds)
    processes = [Process(devices, given.quick) for devices in (1, 2, 1)]
    for process in processes:
        process.ready()
    one, two, other = processes
    found = [one_round(one, two, other, seconds) for _ in range(rounds)]
    for process in processes:
        process.close()
    rows = []
    for name in found[0]:
        each = [round_[name] for round_ in found]
        rates = [
            reporting.spread([one[what] for one in each]) if what in each[0] else "-" for what in ("decode", "train")
        ]
        lags = [reporting.spread([1000 * one["lag"][which] for one in each]) for which in ("p50", "p99", "max")]
        work = reporting.spread([one["work"] for one in each]) if name != "idle" else "-"
        rows.append([name, *rates, work, *lags])
    columns = ["", "decoded tokens/s", "trained tokens/s", "work", "lag p50, ms", "p99", "max"]
    reporting.show(f"{SLOTS} slots decode, a group of {MEMBERS} a step is trained; {TIMERS:,} timers", columns, rows)
    shared, apart = ([round_[name]["work"] for round_ in found] for name in ("at once, one device", "two processes"))
    print(f"\ntwo processes do {reporting.median_ratio(apart, shared):.2f} times the work of two threads on one device")
    late = max(round_["at once, one device"]["lag"]["p99"] for round_ in found)
    print(f"lag p99 while both work: at most {1000 * late:.1f} ms, the bar is {1000 * BAR:.0f} ms")
    if not given.quick:
        reporting.record("overlap", {"seconds": seconds, "rounds": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())

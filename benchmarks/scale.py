"""Many episodes at once, in virtual time: wall time and memory of each.

    python benchmarks/scale.py [--sizes 1000,10000,100000] [--rounds N] [--quick]

The parts are those of `orchestration.py`. Every slot plays one episode; tools take exponential time, which a mock
clock skips, so what is left is the time of the event loop. Memory is the growth of the process from before the slots
are made until every episode waits inside its second tool call at the same moment, over their number: tasks, scopes,
channels, environment, conversation and its tokens. Each size runs in a process of its own.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

import reporting
import trio
from orchestration import Room, run_slots, slots_and_sampler
from scenario import TURNS, ToolTime, latency
from trio.testing import MockClock

from trouper.actors.garbage import collecting_rarely
from trouper.channels import Episode, Outcome
from trouper.envs import StepResult


class Gathering:
    """Where episodes wait until all of them do.

    Args:
        episodes: how many are awaited.
    """

    def __init__(self, episodes: int) -> None:
        self._missing = episodes
        self._everyone = trio.Event()
        self.resident_bytes = 0
        self.looking = 0.0

    async def wait(self) -> None:
        """Wait for all others; the last one looks at the memory."""
        self._missing -= 1
        if self._missing == 0:
            began = time.perf_counter()
            gc.collect()
            self.resident_bytes = resident_bytes()
            self.looking = time.perf_counter() - began
            self._everyone.set()
        await self._everyone.wait()


class CrowdedRoom(Room):
    """A room in which the second tool call is one in which all episodes meet."""

    def __init__(self, gathering: Gathering, *args: Any) -> None:
        super().__init__(*args)
        self._gathering = gathering

    async def step(self, action: str) -> StepResult:
        """A tool call."""
        if self._left == TURNS - 1:
            await self._gathering.wait()
        return await super().step(action)


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def play(episodes: int) -> dict[str, float]:
    """As many episodes as slots.

    Returns:
        Wall seconds and resident bytes of an episode.
    """
    outcomes = 0

    def received(outcome: Outcome) -> None:
        nonlocal outcomes
        if not isinstance(outcome, Episode) or outcome.turns != TURNS:
            raise RuntimeError(f"this should be an episode of {TURNS} turns: {outcome}")
        outcomes += 1

    gathering = Gathering(episodes)
    before, began = resident_bytes(), time.perf_counter()
    slots, sampler = slots_and_sampler(
        episodes, partial(CrowdedRoom, gathering, latency("exponential"), ToolTime()), CrowdedRoom.isolation
    )
    await run_slots(slots, sampler, episodes, episodes, received)
    if outcomes != episodes:
        raise RuntimeError(f"{episodes} episodes were started and {outcomes} came back")
    return {
        "seconds": (time.perf_counter() - began - gathering.looking) / episodes,
        "bytes": (gathering.resident_bytes - before) / episodes,
    }


def one(episodes: int) -> dict[str, float]:
    """Measure a size in a process of its own."""
    command = [sys.executable, __file__, "--one", str(episodes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,100000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two small sizes, once")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with collecting_rarely():
            print(json.dumps(trio.run(play, options.one, clock=MockClock(autojump_threshold=0))))
        return
    sizes = [100, 400] if options.quick else [int(size) for size in options.sizes.split(",")]
    rounds = 1 if options.quick else options.rounds
    measured: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    for round_ in range(rounds):
        for size in sorted(sizes, reverse=bool(round_ % 2)):
            measured[size].append(one(size))
    microseconds = {size: [each["seconds"] * 1e6 for each in measured[size]] for size in sizes}
    kilobytes = {size: [each["bytes"] / 1000 for each in measured[size]] for size in sizes}
    rows = [
        [
            size,
            reporting.spread(microseconds[size]),
            reporting.median_ratio(microseconds[size], microseconds[sizes[0]]),
            reporting.spread(kilobytes[size]),
        ]
        for size in sizes
    ]
    reporting.show(
        "Concurrent episodes of four turns, virtual time",
        ["episodes", "µs of wall time each", f"times that of {sizes[0]}", "kB each while waiting"],
        rows,
    )
    if not options.quick:
        reporting.record("scale", {"microseconds": microseconds, "kilobytes": kilobytes})


if __name__ == "__main__":
    main()

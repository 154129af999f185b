"""What the trace and the account of device time cost, on the scene of `orchestration.py`.

    python benchmarks/trace.py [--rounds N] [--quick]

The same episodes with and without, in turns. With: a trace file on disk and its thread, spans of the first 16 slots,
their environments and both devices, an account of what the device is at. How long calls take is counted on both
sides, since the log of a run needs it whether it is traced or not. CPU is that of the whole process, the trace's
thread included.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path

import reporting
import trio
from orchestration import Room, run_slots, slots_and_sampler
from scenario import ToolTime, latency

from trouper.actors.account import NOT_TIMED, TimeAccount
from trouper.actors.garbage import collecting_rarely
from trouper.actors.trace import NO_TRACE, Trace
from trouper.channels import Episode, Outcome


def play(concurrency: int, episodes: int, traced: bool) -> float:
    """CPU microseconds of a turn."""
    with tempfile.TemporaryDirectory() as folder, collecting_rarely():
        began = time.perf_counter()
        trace = Trace(Path(folder) / "trace.perfetto-trace", time.perf_counter) if traced else NO_TRACE
        device = TimeAccount(lambda: time.perf_counter() - began, trace).sampler if traced else NOT_TIMED
        environment = partial(Room, latency("none"), ToolTime())
        slots, sampler = slots_and_sampler(concurrency, environment, Room.isolation, trace, device)
        turns = 0

        def received(outcome: Outcome) -> None:
            nonlocal turns
            assert isinstance(outcome, Episode), outcome
            turns += outcome.turns

        cpu = time.process_time()
        trio.run(run_slots, slots, sampler, concurrency, episodes, received)
        trace.close()
        return (time.process_time() - cpu) / turns * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a few episodes, once")
    options = parser.parse_args()
    sizes = {8: 64} if options.quick else {8: 2000, 64: 4000, 512: 16384}
    rows, figures = [], {}
    for concurrency, episodes in sizes.items():
        sides = {
            "untraced": partial(play, concurrency, episodes, False),
            "traced": partial(play, concurrency, episodes, True),
        }
        measured = reporting.in_turns(sides, 1 if options.quick else options.rounds)
        figures[str(concurrency)] = measured
        cost = reporting.median_ratio(measured["traced"], measured["untraced"]) - 1
        rows.append([concurrency, *(reporting.spread(measured[side]) for side in sides), f"{cost:+.1%}"])
    reporting.show("CPU µs a turn", ["concurrency", "untraced", "traced", "cost"], rows)
    if not options.quick:
        reporting.record("trace", figures)


if __name__ == "__main__":
    main()

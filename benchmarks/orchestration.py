"""What a turn costs when model and tools cost nothing, and how much of the ideal is left when tools are slow.

    python benchmarks/orchestration.py [--tunix PYTHON] [--rounds N] [--quick]

Episodes of four turns run through what a real run has between source and grouper: `EpisodeSlots`, an environment
actor and a conversation for each, bounded channels, the sampler actor. Only the engine answers at once, on an
accelerator that calls inline. Time counts from the first task sent to the last episode received.

`--tunix` names a Python that has Tunix (`python -m venv DIR && DIR/bin/pip install google-tunix==0.1.7`); it plays the
same episodes through Tunix's orchestrator, in turns with ours. Its environments run in threads, as they always do
there; ours are async, and once more plain ones in threads (`threads` in the table).
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np
import reporting
import trio
from scenario import (
    ANSWER,
    FIRST,
    GROUP,
    LAWS,
    MEAN_LATENCY,
    OBSERVATION,
    STEP_REWARD,
    SYSTEM,
    TURNS,
    ToolTime,
    latency,
)

from trouper.actors.account import NOT_TIMED, DeviceTime
from trouper.actors.config import Environment as Deadlines
from trouper.actors.episode import Breaker, EpisodeRules, EpisodeSlots
from trouper.actors.garbage import collecting_rarely
from trouper.actors.sampler import Generate, Sampler
from trouper.actors.trace import NO_TRACE, Trace
from trouper.channels import (
    Attempt,
    Channel,
    Episode,
    Message,
    Outcome,
    Receiver,
    Sampling,
    Sender,
    Task,
    Turn,
    Weights,
)
from trouper.envs import PlainChat, Rewards, StepResult
from trouper.envs.agents import prompted_agent
from trouper.learner.request import Finished, Request, check

T = TypeVar("T")

Isolation = Literal["inline", "thread"]

CHAT = PlainChat("".join(sorted(set(SYSTEM + FIRST + ANSWER + OBSERVATION))), ";")
CONTEXT = 512

PEER = Path(__file__).parent / "peers" / "orchestration_tunix.py"


class InlineAccelerator:
    """Calls right here: what is measured is what stands around the device."""

    busy_seconds = 0.0
    running = None

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)`."""
        await trio.lowlevel.checkpoint()
        return call(*args)


class InstantEngine:
    """Refuses what the real engine refuses and gives every other request the same turn, at once."""

    needs_prefill = False
    can_decode = True

    def __init__(self, weights: Weights) -> None:
        tokens = CHAT.prompt([Message("assistant", ANSWER)])
        self._turn = Turn(
            tokens=tokens,
            logprobs=np.full(len(tokens), -1.0, np.float32),
            versions=np.full(len(tokens), weights.step, np.int32),
            finish="stop",
            kv_version=weights.step,
        )
        self._submitted: list[int] = []

    def check(self, request: Request) -> None:
        """As the real engine does."""
        check(request, length=CONTEXT, vocabulary=CHAT.vocab_size)

    def submit(self, request: Request) -> None:
        """Queue it."""
        self._submitted.append(request.id)

    def decode(self) -> list[Finished]:
        """Answer all that was submitted."""
        submitted, self._submitted = self._submitted, []
        return [Finished(id, self._turn) for id in submitted]

    def cancel(self, id: int) -> None:
        """Nothing runs between two steps."""

    def release(self, conversation: int) -> None:
        """Nothing is kept."""

    def warm_up(self) -> None:
        """Nothing to compile."""


class Room:
    """The scenario as an async environment.

    Args:
        seconds: draws a tool call's latency.
        tools: is told of every call.
    """

    isolation: ClassVar[Isolation] = "inline"

    def __init__(self, seconds: Callable[[], float], tools: ToolTime) -> None:
        self._seconds = seconds
        self._tools = tools

    async def reset(self, task: Task) -> str:
        """Begin."""
        self._left = TURNS
        return FIRST

    async def step(self, action: str) -> StepResult:
        """A tool call."""
        seconds = self._seconds()
        if seconds:
            self._tools.add(time.perf_counter(), seconds)
            await trio.sleep(seconds)
        return self._result()

    def _result(self) -> StepResult:
        self._left -= 1
        return StepResult(OBSERVATION, STEP_REWARD, done=self._left == 0)


class PlainRoom(Room):
    """The same with plain methods, which run in threads."""

    isolation = "thread"

    def reset(self, task: Task) -> str:  # type: ignore[override]
        """Begin."""
        self._left = TURNS
        return FIRST

    def step(self, action: str) -> StepResult:  # type: ignore[override]
        """A tool call."""
        seconds = self._seconds()
        if seconds:
            self._tools.add(time.perf_counter(), seconds)
            time.sleep(seconds)
        return self._result()


def slots_and_sampler(
    concurrency: int,
    make_environment: Callable[[], Any],
    isolation: Isolation,
    trace: Trace = NO_TRACE,
    device: DeviceTime = NOT_TIMED,
) -> tuple[EpisodeSlots, Sampler]:
    """What runs between source and grouper, with an engine that answers at once."""
    weights = Weights(life=1, step=0, params=None, checksum=0)
    # As a launched run with a place in the engine for each episode has it.
    waiting, accelerator = 2 * concurrency, InlineAccelerator()
    sampler = Sampler(InstantEngine, weights, accelerator, max_waiting=waiting, time=device)  # type: ignore[arg-type]
    slots = EpisodeSlots(
        concurrency,
        make_environment=make_environment,
        agent=prompted_agent([{"role": "system", "content": SYSTEM}]),
        chat=CHAT,
        rewards=Rewards({}, ()),
        rules=EpisodeRules(
            sampling=Sampling(),
            max_prompt_tokens=CONTEXT,
            max_response_tokens=32,
            max_turns=TURNS,
            max_context_tokens=CONTEXT,
            episode_timeout=3600.0,
            max_attempts=3,
        ),
        deadlines=Deadlines(isolation=isolation),
        sampler=sampler,
        breaker=Breaker(10, 0.5),
        note=print,
        trace=trace,
    )
    return slots, sampler


async def give(tasks: Sender[Attempt], episodes: int) -> None:
    """The source: as many attempts, in groups, as there shall be episodes."""
    with tasks:
        for number in range(episodes):
            draw, member = divmod(number, GROUP)
            await tasks.send(Attempt(draw, draw, member, 0, 0, Task(str(draw), {"seed": draw})))


async def run_slots(
    slots: EpisodeSlots, sampler: Sampler, concurrency: int, episodes: int, received: Callable[[Outcome], None]
) -> float:
    """Play so many episodes.

    Returns:
        When the first task was sent, by the performance counter.
    """
    tasks = Channel[Attempt]("tasks", Attempt, GROUP)
    outcomes = Channel[Outcome]("episodes", Outcome, 64)
    requests = Channel[Generate]("requests", Generate, concurrency)

    async def take(inbox: Receiver[Outcome]) -> None:
        async for outcome in inbox:
            received(outcome)

    async with trio.open_nursery() as nursery:
        await nursery.start(sampler.run, requests.receiver())
        nursery.start_soon(take, outcomes.receiver())
        began = time.perf_counter()
        nursery.start_soon(give, tasks.sender(), episodes)
        tasks.finish()
        with requests.sender() as asks, outcomes.sender() as outbox:
            requests.finish()
            outcomes.finish()
            await slots.run(tasks.receiver(), outbox, asks)
    return began


class Figures(msgspec.Struct):
    """One measurement.

    Attributes:
        episodes_per_second: from the first task sent to the last episode received.
        cpu_microseconds_per_turn: of the whole process.
        share: of the ideal, from the first task to the moment when no task is left to give.
    """

    episodes_per_second: float
    cpu_microseconds_per_turn: float
    share: float


def ours(room: type[Room], concurrency: int, episodes: int, law: str) -> Figures:
    """Play it here."""
    tools, over = ToolTime(), []
    slots, sampler = slots_and_sampler(concurrency, partial(room, latency(law), tools), room.isolation)

    def received(outcome: Outcome) -> None:
        if not isinstance(outcome, Episode) or outcome.turns != TURNS or outcome.reward != 1.0:
            raise RuntimeError(f"this should be an episode of {TURNS} turns and reward 1: {outcome}")
        over.append(time.perf_counter())

    with collecting_rarely():
        cpu = time.process_time()
        began = trio.run(run_slots, slots, sampler, concurrency, episodes, received)
        cpu = time.process_time() - cpu
    # Until then there was a task for every slot that had ended one.
    until = over[-min(concurrency, episodes // 2)]
    return Figures(
        episodes / (over[-1] - began), cpu / (episodes * TURNS) * 1e6, tools.share(concurrency, began, until)
    )


class Peer:
    """The same scenario in another interpreter, which stays for all measurements."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen([python, PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, concurrency: int, episodes: int, law: str) -> Figures:
        """Play it there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"concurrency": concurrency, "episodes": episodes, "law": law}), file=self._process.stdin)
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{PEER.name} has ended without an answer; what it printed stands above")
        return msgspec.json.decode(answer, type=Figures)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


Side = Callable[[int, int, str], Figures]


def alternate(sides: Mapping[str, Side], rounds: int, *what: Any) -> dict[str, list[Figures]]:
    """Each side in turn, `rounds` times, the order reversed each time."""
    measured: dict[str, list[Figures]] = {name: [] for name in sides}
    for round_ in range(rounds):
        for name in sorted(sides, reverse=bool(round_ % 2)):
            measured[name].append(sides[name](*what))
    return measured


def compare(sides: Mapping[str, Side], sizes: Mapping[int, int], rounds: int) -> dict[str, Any]:
    """Instant model and tools: episodes per second and CPU of a turn."""
    rows, figures = [], {}
    for concurrency, episodes in sizes.items():
        measured = alternate(sides, rounds, concurrency, episodes, "none")
        rates = {name: [each.episodes_per_second for each in measured[name]] for name in sides}
        cpu = {name: [each.cpu_microseconds_per_turn for each in measured[name]] for name in sides}
        figures[str(concurrency)] = {"episodes_per_second": rates, "cpu_microseconds_per_turn": cpu}
        for name in sides:
            against = (
                "-" if name == "tunix" or "tunix" not in sides else reporting.median_ratio(rates[name], rates["tunix"])
            )
            rows.append([concurrency, name, reporting.spread(rates[name]), reporting.spread(cpu[name]), against])
    columns = ["concurrency", "side", "episodes/s", "CPU µs/turn", "times Tunix"]
    reporting.show("Instant model and tools", columns, rows)
    return figures


def under_latency(sides: Mapping[str, Side], sizes: Mapping[int, int], rounds: int) -> dict[str, Any]:
    """Slow tools: what part of the slots' time they were in a tool call."""
    rows, figures = [], {}
    for concurrency, episodes in sizes.items():
        for law in LAWS[1:]:
            measured = alternate(sides, rounds, concurrency, episodes, law)
            shares = {name: [each.share for each in measured[name]] for name in sides}
            figures[f"{concurrency} {law}"] = shares
            rows.append([concurrency, law, *(reporting.spread(shares[name]) for name in sides)])
    title = f"Share of the ideal, tools of {MEAN_LATENCY * 1000:g} ms"
    reporting.show(title, ["concurrency", "law", *sides], rows)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix", metavar="PYTHON", help="an interpreter that has google-tunix 0.1.7")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few episodes of each kind, once")
    options = parser.parse_args()
    sides: dict[str, Side] = {"trouper": partial(ours, Room), "threads": partial(ours, PlainRoom)}
    peer = Peer(options.tunix) if options.tunix else None
    if peer is not None:
        sides["tunix"] = peer
    else:
        print("without --tunix PYTHON there is no side to compare with; see --help")
    # So many that a slot plays eight or more (two where slots are thousands), under latency sixteen.
    instant = {8: 64} if options.quick else {8: 2000, 64: 2000, 512: 4096, 4096: 8192}
    slow = {64: 64} if options.quick else {64: 1024, 512: 8192}
    rounds = 1 if options.quick else options.rounds
    try:
        figures = {
            "instant": compare(sides, instant, rounds),
            "share of ideal": under_latency(sides, slow, 1 if options.quick else max(1, rounds // 2)),
        }
    finally:
        if peer is not None:
            peer.close()
    if not options.quick:
        reporting.record("orchestration", figures)


if __name__ == "__main__":
    main()

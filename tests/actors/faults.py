"""What goes wrong in a simulated run, drawn from one seed, and the parts of a run in which it does.

Knows where user code, devices, disk and actors can fail. Does not know what has to hold all the same.
"""

import errno
import math
from collections import Counter
from random import Random
from typing import Any, ClassVar

import pytest
import trio

from trouper.actors.segment import Segment
from trouper.actors.simulation import (
    MemoryCheckpoints,
    SimulatedAccelerator,
    SimulatedEngine,
    SimulatedLearner,
    default_seconds,
)
from trouper.channels import Message, Receiver, SamplerError, Sender, Task
from trouper.envs import Rewards, StepResult

RATES = {
    "raise": 0.05,  # calls to an environment
    "hang": 0.01,
    "slow": 0.02,
    "truncate": 0.03,
    "judge raises": 0.02,
    "judge hangs": 0.01,
    "judge says infinity": 0.005,
    "judge says nothing": 0.01,
    "agent raises": 0.02,
    "agent hangs": 0.005,
    "engine refuses": 0.01,
    "engine is not made": 0.1,
    "engine dies": 0.004,
    "swap dies": 0.1,
    "swap is slow": 0.15,
    "checksum is wrong": 0.05,
    "add": 0.02,
    "update": 0.05,
    "updated": 0.05,
    "publish": 0.04,
    "rewind": 0.1,
    "save": 0.08,
    "saved": 0.08,
    "disk is full": 0.004,
    "disk thread": 0.01,
    "task": 0.01,
    "actor": 0.004,  # at each message
}
"""How often each thing goes wrong where it can, often where that is seldom; a run may leave some out or double them."""

FRAGILE = {"tasks", "episodes", "groups", "weights"}
"""Channels whose senders crash. Their receivers do, too, all but the barrier: its failure ends a run."""


class Faults:
    """Says when something goes wrong.

    Attributes:
        scale: multiplies all rates.
        armed: nothing goes wrong before it is set.
        hits: what went wrong so far.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(f"faults {seed}")
        self.scale = 1.0
        self.armed = False
        self.hits: Counter[str] = Counter()
        self._rates = {kind: rate * self.random.choice((0, 1, 1, 2)) for kind, rate in RATES.items()}

    def __call__(self, kind: str) -> bool:
        if not self.armed or trio.current_effective_deadline() == -math.inf:  # who is killed does not fail any more
            return False
        hit = self.random.random() < self._rates[kind] * self.scale
        self.hits[kind] += hit
        return hit

    def crash(self, kind: str) -> None:
        """Raise what no code of the run's own raises."""
        if self(kind):
            raise MemoryError(kind)


def faulty(faults: Faults, letters: Any, stream: Any, tasks: int | None, slow_swap: float) -> dict[str, Any]:
    """The parts of a run, which fail as `faults` says.

    Args:
        faults: decides.
        letters: the environment that works.
        stream: the tasks that can be drawn.
        tasks: how many there are.
        slow_swap: seconds, at most.
    """

    class Environment(letters):
        def __init__(self) -> None:
            self.steps = faults.random.randint(1, 3)
            self.tools = (self.hum,)

        async def disturbed(self) -> None:
            if faults("raise"):
                raise OSError("the world broke")
            if faults("hang"):
                await trio.sleep_forever()
            await trio.sleep(faults.random.expovariate(1.0) * (100 if faults("slow") else 1))

        async def hum(self, tune: str) -> str:
            """Hum."""
            await self.disturbed()
            return tune

        async def reset(self, task: Task) -> str:
            await self.disturbed()
            return await super().reset(task)

        async def step(self, action: str) -> StepResult:
            await self.disturbed()
            result = await super().step(action)
            return StepResult(result.observation, done=result.done, truncated=faults("truncate"))

        async def reward(self) -> float:
            await self.disturbed()
            return super().reward()

        async def close(self) -> None:
            await self.disturbed()

    async def create() -> Environment:
        if faults("raise"):
            raise ConnectionError("no room")
        if faults("hang"):
            await trio.sleep_forever()
        return Environment()

    async def agent(talk: Any, world: Any) -> None:
        talk.user(await world.reset())
        while not world.done:
            try:
                turn = await talk.generate()
                await world.call("hum", {"tune": turn.text})
                answer = await world.step(turn.text)
            except Exception:  # agents do such things
                return
            if faults("agent raises"):
                raise LookupError("a clumsy agent")
            if faults("agent hangs"):
                await trio.sleep_forever()
            talk.user(answer)

    async def judge(task: Task, messages: tuple[Message, ...], text: str) -> float | None:
        if faults("judge raises"):
            raise ZeroDivisionError
        if faults("judge hangs"):
            await trio.sleep_forever()
        if faults("judge says infinity"):
            return float("inf")
        return None if faults("judge says nothing") else judged(int(task.id))

    class Engine(SimulatedEngine):
        made: ClassVar[list[SimulatedEngine]] = []

        def __init__(self, *args: Any, **options: Any) -> None:
            faults.crash("engine is not made")
            super().__init__(*args, **options)
            self.made.append(self)

        def check(self, request: Any) -> None:
            if faults("engine refuses"):
                raise SamplerError("not this one")
            super().check(request)

        def prefill(self) -> None:
            faults.crash("engine dies")
            super().prefill()

        def decode(self) -> Any:
            faults.crash("engine dies")
            return super().decode()

        def swap(self, *args: Any) -> None:
            faults.crash("swap dies")
            super().swap(*args)

        def checksum(self) -> int:
            return super().checksum() + faults("checksum is wrong")

    def seconds(call: str) -> float:
        slow = slow_swap * faults.random.random() if call == "swap" and faults("swap is slow") else 0.0
        return default_seconds(call) * faults.random.uniform(0.5, 1.5) + slow

    class Accelerator(SimulatedAccelerator):
        async def run(self, call: Any, *args: Any) -> Any:
            result = await super().run(call, *args)
            if self.name == "ledger":
                faults.crash("disk thread")
            return result

    class Tasks(stream):
        def task(self, draw: int) -> Task | None:
            faults.crash("task")
            return super().task(draw)

    return {
        "make_environment": create,
        "agent": agent,
        "rewards": Rewards({"judge": judge}, (1.0,)),
        "make_engine": Engine,
        "make_accelerator": lambda name: Accelerator(name, seconds),
        "learner": _learner(faults),
        "tasks": Tasks(tasks),
    }


def judged(draw: int) -> float:
    """What the judge gives for a task."""
    return draw % 5 / 5


def _learner(faults: Faults) -> SimulatedLearner:
    class Learner(SimulatedLearner):
        def warm_up(self) -> None:
            faults.armed = True  # from here on there is a supervisor who can do something about it

        def add(self, groups: Any) -> None:
            faults.crash("add")
            super().add(groups)

        def update(self) -> dict[str, float]:
            faults.crash("update")
            metrics = super().update()
            faults.crash("updated")  # parameters have changed by now
            return metrics

        def publish(self) -> tuple[Any, int]:
            faults.crash("publish")
            return super().publish()

        def rewind(self, checkpoints: MemoryCheckpoints) -> Any:
            faults.crash("rewind")
            return super().rewind(checkpoints)

    return Learner()


def fragile_checkpoints(faults: Faults) -> MemoryCheckpoints:
    """Checkpoints whose saving fails before or after the commit."""

    class Checkpoints(MemoryCheckpoints):
        def save(self, *args: Any) -> None:
            faults.crash("save")
            super().save(*args)
            faults.crash("saved")

    return Checkpoints()


def break_actors_and_disk(faults: Faults, patch: pytest.MonkeyPatch) -> None:
    """Actors crash before or after they hand over a message, or with one in hand; the ledger's disk gets full."""
    send, receive, append = Sender.send, Receiver.receive, Segment.append

    async def fragile_send(self: Sender[Any], message: Any) -> None:
        fragile = self.name in FRAGILE
        if fragile:
            faults.crash("actor")
        await send(self, message)
        if fragile:
            faults.crash("actor")

    async def fragile_receive(self: Receiver[Any]) -> Any:
        message = await receive(self)
        if self.name in FRAGILE - {"weights"}:
            faults.crash("actor")
        return message

    def fragile_append(self: Segment, records: Any) -> None:
        if faults("disk is full"):
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        append(self, records)

    patch.setattr(Sender, "send", fragile_send)
    patch.setattr(Receiver, "receive", fragile_receive)
    patch.setattr(Segment, "append", fragile_append)

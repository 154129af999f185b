"""Environments that do in a process of their own what no environment should."""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Literal

import numpy as np

from trouper.channels import EnvironmentFailure, RunError, Task
from trouper.envs import StepResult, ToolError


def nothing() -> None: ...


def raise_() -> None:
    raise OSError("env 42")


def hang() -> None:
    time.sleep(1000)


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def ignore_everything() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError):
            signal.signal(number, signal.SIG_IGN)
    hang()


def segfault() -> None:
    print("the last thing it said")
    ctypes.string_at(0)


def exit_at_once() -> None:
    print("the last thing it said")
    os._exit(3)


def raise_in_a_circle() -> None:
    error = OSError("env 42")
    raise error from error


def ask_for_a_loop() -> None:
    asyncio.get_running_loop()


def exit_politely() -> None:
    sys.exit(4)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_its_group() -> None:
    os.killpg(0, signal.SIGKILL)


def take_memory() -> None:
    bytearray(4 << 30)


def burn() -> None:
    while True:
        pass


def bomb() -> None:
    """Double eight times: enough for the limits of tests, and the end of no machine."""
    for _ in range(8):
        os.fork()
        time.sleep(0.02)
    hang()


def daemonize() -> None:
    """Leave a daemon behind that no process group, session or parent leads to."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        os._exit(0)
    os.wait()


def daemonize_and_die() -> None:
    daemonize()
    os._exit(5)


def start_a_shell() -> None:
    subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1000 & wait; done"], start_new_session=True)


def come_back_twice() -> None:
    os.fork()


def run_away() -> None:
    """Be another process every millisecond, for some seconds."""
    if os.fork() == 0:
        hops = 10_000
        while hops and os.fork() == 0:
            hops -= 1
        os._exit(0)


def scribble() -> None:
    """Write into every file that is open, the socket to the run among them."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 8)


class Misbehaving:
    """Does `how` in the call `where`, and is otherwise an environment of two steps."""

    def __init__(self, where: str = "", how: str = "nothing") -> None:
        self._where, self._how = where, how
        self._act("create")
        self.tools = (self.count,)
        self._count = 0

    def _act(self, call: str) -> None:
        if call == self._where:
            globals()[self._how]()

    def reset(self, task: Task) -> str:
        self._act("reset")
        self._steps = 0
        return "go"

    def step(self, action: str) -> StepResult:
        self._act("step")
        self._steps += 1
        return StepResult(action, reward=0.25, done=self._steps == 2)

    def count(self, by: int = 1) -> int:
        """Count."""
        self._act("tool")
        self._count += by
        return self._count

    def reward(self) -> float:
        self._act("reward")
        return 1.0

    def close(self) -> None:
        self._act("close")


def returns() -> dict[str, Any]:
    return {
        "fine": StepResult("seen", 0.5, metrics={"a": 1}),
        "numpy": StepResult("seen", np.float32(0.5), np.bool_(True), metrics={"a": np.int64(3)}),  # type: ignore[arg-type]
        "three": ("o", 1.0, True),
        "gymnasium": ("o", 1.0, True, False, {}),
        "nan": StepResult("o", float("nan")),
        "bytes": StepResult(b"o"),  # type: ignore[arg-type]
        "metric": StepResult("o", metrics={"a": "b"}),  # type: ignore[dict-item]
        "long": StepResult("x" * 1_000_000),
        "endless": StepResult("x" * (17 << 20)),
    }


class Talkative:
    """Plain and async methods, tools of every kind, and answers of which some are none."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.tools = (self.measure, self.think, self.give)

    def reset(self, task: Task) -> str:
        return f"{self.unit} {task.id} {sorted(task.payload.items())}"

    def step(self, action: str) -> Any:
        if action == "noise":
            print("noise " * 1_000_000)
            return StepResult("quiet again")
        if action == "alarm":  # only a main thread may do this
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            return StepResult("armed")
        if action == "hopeless":
            raise EnvironmentFailure("env_error", "this task cannot be played", retry=False)
        if action == "end":
            raise RunError("the run must end")
        if action == "group":
            raise ExceptionGroup("many", [ExceptionGroup("inner", [KeyError("k")])])
        return returns()[action]

    def measure(self, what: str, how: Literal["fast", "exact"] = "fast", digits: "int | None" = None) -> str:
        """Measure something.

        The model does not see this.
        """
        if what == "nothing":
            raise ToolError("there is nothing to measure")
        if what == "zero":
            raise ZeroDivisionError("by zero")
        if what == "broken":
            raise OSError("the ruler broke")
        return f"{what} {how} {digits}"

    async def think(self, seconds: float) -> dict[str, float]:
        return {"seconds": seconds}

    def give(self, kind: str) -> Any:
        return {"numpy": np.int64(4), "set": {1}, "list": [1, None, "é"]}[kind]

    async def reward(self) -> Any:
        return np.float64(0.75)


class Ticking:
    """Written for asyncio: a task of its own goes on between calls."""

    def __init__(self) -> None:
        self._ticks = 0

    async def reset(self, task: Task) -> str:
        self._task = asyncio.create_task(self._tick())
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self._ticks += 1

    async def step(self, action: str) -> StepResult:
        return StepResult(str(self._ticks), done=True)

    async def close(self) -> None:
        self._task.cancel()


class Global:
    """Keeps its state where everybody may see it."""

    def reset(self, task: Task) -> str:
        os.environ["WHO"] = task.id
        os.chdir(task.payload["directory"])
        return task.id

    def step(self, action: str) -> StepResult:
        return StepResult(f"{os.environ['WHO']} in {os.getcwd()}", done=True)

"""Environments that make it hard: one fails as a function of the attempt, one does not listen to signals."""

import ctypes
import os
import random
import signal
import time

import trio

from trouper.channels import Task
from trouper.envs import StepResult
from trouper.envs.guess import Guess


class ShakyGuess(Guess):
    """Raises for one seed in sixteen, and writes down every attempt that it is reset for."""

    def reset(self, task: Task, seed: int) -> str:
        """Note the attempt, then fail or begin."""
        with open(os.environ["RESETS"], "a") as resets:
            resets.write(f"{seed}\n")
        if seed % 16 == 0:
            raise OSError("the world broke")
        return super().reset(task)


class StubbornGuess(Guess):
    """Takes a moment for each step, and no notice of SIGTERM and SIGINT."""

    def __init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def step(self, action: str) -> StepResult:
        """Compare a guess with the secret."""
        time.sleep(0.002)
        return super().step(action)


def daemon() -> None:
    """Leave a process behind that is in no group of ours."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(10**6)
        os._exit(0)


class HostileGuess(Guess):
    """Does everything an environment should not, as the attempt's seed says.

    Args:
        deadly: also what only a process of its own survives.
    """

    def __init__(self, deadly: bool) -> None:
        self.deadly = deadly
        self.seed = 0
        if random.random() < 0.1:
            self.misbehave(random.randrange(2))

    def misbehave(self, how: int) -> None:
        """Raise or hang; or segfault, exit, leave a daemon and raise, or lock up with the signals blocked."""
        match how % (6 if self.deadly else 2):
            case 0:
                raise OSError("the world broke")
            case 1:
                time.sleep(3)  # six deadlines; a thread that lasts for ever would only be a thread more
            case 2:
                ctypes.string_at(0)
            case 3:
                os._exit(3)
            case 4:
                daemon()
                raise OSError("and left a daemon")
            case 5:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                time.sleep(10**6)

    def maybe(self, where: int) -> None:
        """Misbehave in one of three places, in a fifth of all attempts."""
        if self.seed % 15 == where:
            self.misbehave(self.seed // 15)

    def reset(self, task: Task, seed: int) -> str:
        """Begin, or not."""
        self.seed = seed
        self.maybe(0)
        return super().reset(task)

    def step(self, action: str) -> StepResult:
        """Compare, or not."""
        self.maybe(1)
        return super().step(action)

    def reward(self) -> float:
        """The score, or not."""
        self.maybe(2)
        return super().reward()

    def close(self) -> None:
        """End, or not."""
        if random.random() < 0.5:
            self.misbehave(random.randrange(2))


class DeafGuess(Guess):
    """Waits once, in a way that nobody can cancel."""

    waited = False

    async def step(self, action: str) -> StepResult:
        """Wait a day, or compare a guess with the secret."""
        if not DeafGuess.waited:
            DeafGuess.waited = True
            await trio.to_thread.run_sync(time.sleep, 86400.0)
        return super().step(action)

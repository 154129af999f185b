"""What both sides of the orchestration benchmark play: texts, turns and the laws of tool latency.

Imports no framework, so that a peer's script can use it in an environment of its own.
"""

import math
import random
from collections.abc import Callable

TURNS = 4
GROUP = 8
SYSTEM = "You are an agent."
FIRST = "You stand in a room. What do you do?"
ANSWER = "look around;"
OBSERVATION = "You see a wall."
STEP_REWARD = 0.25

MEAN_LATENCY = 0.1
"""Seconds of one tool call."""

LAWS = ("none", "constant", "exponential", "lognormal", "bimodal")


def latency(law: str, seed: int = 0) -> Callable[[], float]:
    """Draws the seconds of one tool call after another.

    Args:
        law: one of `LAWS`; all but `none` have a mean of `MEAN_LATENCY`, `bimodal` (95 % at half of it, 5 % at ten
            times it) a little less.
        seed: the same seed gives the same draws.
    """
    draw, sigma = random.Random(seed), 1.5
    mu = math.log(MEAN_LATENCY) - sigma**2 / 2
    return {
        "none": lambda: 0.0,
        "constant": lambda: MEAN_LATENCY,
        "exponential": lambda: draw.expovariate(1 / MEAN_LATENCY),
        "lognormal": lambda: draw.lognormvariate(mu, sigma),
        "bimodal": lambda: MEAN_LATENCY * (10 if draw.random() < 0.05 else 0.5),
    }[law]


class ToolTime:
    """Every tool call's start and drawn seconds: how much of the slots' time tools took is the share of the ideal.

    A scheduler that costs nothing keeps every slot in a tool call all the time. What a call takes longer than was
    drawn counts against it, and so does the time between two calls and between two episodes.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []

    def add(self, started: float, seconds: float) -> None:
        """A call began at `started` that takes `seconds`."""
        self._calls.append((started, seconds))

    def share(self, slots: int, since: float, until: float) -> float:
        """Part of the time of `slots` slots between two moments that went into the drawn seconds of tool calls."""
        inside = sum(max(0.0, min(until, start + seconds) - max(since, start)) for start, seconds in self._calls)
        return inside / (slots * (until - since))

"""What both sides of the pipeline benchmark play: the sizes of scene and model, the laws of tool latency.

Imports no framework, so that a peer's script can use it in an environment of its own.
"""

import math
from collections.abc import Callable
from random import Random

GROUPS, MEMBERS, TURNS, TOKENS = 4, 4, 4, 8
"""Prompts of a step, members of each, model calls of an episode, tokens of a call."""

SIZES = f"{GROUPS} prompts x {MEMBERS} members x {TURNS} turns x {TOKENS} tokens"

ALPHABET = "abcdefghijklmno;"
FIRST, OBSERVATION = "a", "b"

LAYERS, WIDTH, HEADS, MLP_WIDTH = 2, 32, 2, 64
"""The model's size."""

LEARNING_RATE = 3e-3

LAWS: dict[str, Callable[[Random, float], float]] = {
    "constant": lambda random, mean: mean,
    "exponential": lambda random, mean: random.expovariate(1 / mean),
    "lognormal": lambda random, mean: random.lognormvariate(math.log(mean) - 1.5**2 / 2, 1.5),
    "bimodal": lambda random, mean: mean * (10.5 if random.random() < 0.05 else 0.5),
}
"""Each draws the seconds of one tool call, of a given mean."""


def score(text: str) -> float:
    """Share of the letter a."""
    return text.count("a") / max(1, len(text))

"""The one-turn calculator task that `calculator.py` gives to both sides: its questions, prompt and reward.

The model is shown one call and writes another: `calc(34*57)` for "What is 34 times 57?". Needs numpy and nothing else,
since the other side runs in an environment of its own.
"""

import re
from typing import NamedTuple

import numpy as np

GROUPS_PER_STEP = 4
MEMBERS = 8
MAX_RESPONSE_TOKENS = 12
LEARNING_RATE = 1e-5

_WORDS = {"+": "plus", "*": "times"}
_CALL = re.compile(r"calc\(\d+ ?[+*] ?\d+\)")


class Question(NamedTuple):
    """Two numbers and `+` or `*`."""

    a: int
    b: int
    sign: str

    @property
    def text(self) -> str:
        """In words."""
        return f"What is {self.a} {_WORDS[self.sign]} {self.b}?"

    @property
    def call(self) -> str:
        """The right answer."""
        return f"calc({self.a}{self.sign}{self.b})"


def questions(count: int, seed: int) -> list[Question]:
    """The first `count` questions of a seed."""
    random = np.random.default_rng(seed)
    drawn = random.integers((2, 2, 0), (99, 99, 2), size=(count, 3)).tolist()
    return [Question(a, b, "+*"[sign]) for a, b, sign in drawn]


def messages(question: Question) -> list[dict[str, str]]:
    """The prompt: what to do, one example with the same sign, the question."""
    example = Question(3, 4, question.sign)
    return [
        {"role": "system", "content": "Reply only with a calc call."},
        {"role": "user", "content": example.text},
        {"role": "assistant", "content": example.call},
        {"role": "user", "content": question.text},
    ]


def reward(text: str, question: Question, *, ended: bool) -> float:
    """What a completion earns: 1 where it is the right call and nothing else, a part of it for coming near.

    Args:
        text: of the completion.
        question: that it answers.
        ended: the model stopped by itself.
    """
    text = text.strip()
    parts = (
        (0.2, "calc(" in text),
        (0.2, _CALL.search(text) is not None),
        (0.3, question.call in text.replace(" ", "")),
        (0.3, exact(text, question, ended=ended)),
    )
    return sum(share for share, earned in parts if earned)


def exact(text: str, question: Question, *, ended: bool) -> bool:
    """Whether a completion is the right call and nothing else."""
    return ended and text.strip() == question.call

"""Reward functions: found by name, checked at the border, summed by weight.

Does not know environments or groups. A function gives a number or None, where it cannot judge; it never gives a NaN.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from trouper.channels import ConfigError, Message, RewardError, Task
from trouper.envs.calls import split_reasoning
from trouper.envs.dotted import load_object
from trouper.envs.protocols import Invoke, as_float, inline


class Score(Struct, frozen=True):
    """What the reward functions gave one episode.

    Attributes:
        total: weighted sum of those that gave a number; None where none did.
        parts: each function's own number, unweighted, by its name.
    """

    total: float | None
    parts: dict[str, float | None]


class Rewards:
    """Several reward functions and their weights.

    Args:
        functions: name -> `fn(task, messages, text) -> float | None`, plain or async; `text` is what the assistant
            said last, outside its thinking.
        weights: one per function.
    """

    def __init__(self, functions: dict[str, Callable[..., Any]], weights: Sequence[float]) -> None:
        self._functions = functions
        self._weights = tuple(weights)

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names, in order."""
        return tuple(self._functions)

    async def score(self, task: Task, messages: tuple[Message, ...], invoke: Invoke = inline) -> Score:
        """Judge one episode.

        Args:
            task: what was asked.
            messages: the whole conversation.
            invoke: runs each function; the caller decides about threads and deadlines.

        Raises:
            RewardError: a function raised, or returned something that is no reward; the message names it.
        """
        last = next((message.content for message in reversed(messages) if message.role == "assistant"), "")
        text = split_reasoning(last)[1]
        parts: dict[str, float | None] = {}
        for name, function in self._functions.items():
            try:
                value = await invoke(functools.partial(function, task, messages, text))
            except Exception as error:  # User code: whatever it raises means that this episode cannot be judged.
                raise RewardError(
                    f"reward function {name!r} raised {type(error).__name__} for task {task.id!r}: {error}"
                ) from error
            parts[name] = checked_reward(name, value)
        given = [weight * part for weight, part in zip(self._weights, parts.values(), strict=True) if part is not None]
        return Score(_sum(given) if given else None, parts)


def _sum(parts: Sequence[float]) -> float:
    try:
        total = math.fsum(parts)
    except (OverflowError, ValueError):  # too large in between, or infinities of both signs
        total = math.inf
    if not math.isfinite(total):
        raise RewardError(f"the weighted sum of {list(parts)} is no finite number; give smaller rewards or weights")
    return total


def checked_reward(name: str, value: Any) -> float | None:
    """A function's return value as a finite Python float; None and NaN mean that it could not judge.

    Raises:
        RewardError: an infinity, or no number.
    """
    if value is None:
        return None
    number = as_float(value)
    if number is None:
        kind = type(value).__name__
        raise RewardError(f"reward function {name!r} returned {value!r} ({kind}); return a number or None")
    if math.isinf(number):
        raise RewardError(f"reward function {name!r} returned {number}; return a finite number, or None for no reward")
    return None if math.isnan(number) else number


def load_rewards(names: Sequence[str | Callable[..., Any]], weights: Sequence[float] | None = None) -> Rewards:
    """Reward functions by dotted name.

    Args:
        names: `module:function` each, or a function itself.
        weights: one per name; 1 each when left out.

    Raises:
        ConfigError: a name that cannot be found or called, a name given twice, or another number of weights.
    """
    weights = [1.0] * len(names) if weights is None else weights
    if len(weights) != len(names):
        raise ConfigError(f"{len(names)} reward functions were given {len(weights)} weights; give one per function")
    functions: dict[str, Callable[..., Any]] = {}
    for name in names:
        function = load_object(name) if isinstance(name, str) else name
        if not callable(function):
            raise ConfigError(f"reward function {name!r} is a {type(function).__name__} and cannot be called")
        short = name.partition(":")[2] if isinstance(name, str) else getattr(name, "__name__", type(name).__name__)
        if short in functions:
            raise ConfigError(f"two reward functions are called {short!r}; their metrics would be mixed: rename one")
        functions[short] = function
    return Rewards(functions, weights)

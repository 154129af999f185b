"""What an environment, a world and an agent are, and the checks at the border where user code hands us values.

Knows messages and tools. Does not know who runs an environment: deadlines, threads, retries and the deep copy of a
task's payload that every attempt gets belong to the actor behind a `World`.
"""

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from msgspec import Struct

from trouper.channels import EnvironmentFailure, Task
from trouper.envs.tools import Tool, ToolResult

if TYPE_CHECKING:
    from trouper.envs.conversation import Conversation


class StepResult(Struct, frozen=True):
    """What one step of an environment gives back.

    Attributes:
        observation: text for the model.
        reward: what this step earned; summed over the episode unless the environment has a `reward` method.
        done: the scenario has ended.
        truncated: a limit of the environment ended it. The episode stops on either flag.
        metrics: named numbers; the last value of a name is the episode's.
    """

    observation: str
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    metrics: dict[str, float] = {}


class Environment(Protocol):
    """One scenario at a time. Each episode slot makes and owns its own instance; nothing is shared.

    Methods may be plain or async. A `reset` that has a parameter `seed` is given the attempt's, from which everything
    random should follow: then the attempt can be played again as it was.

    Three more members are optional: `reward() -> float | None`, the final score
    (else it is the sum of the step rewards); `close()`; and `tools`, callables that the model may call.
    An environment that changes process-wide state (`os.environ`, the working directory) must run in a process of its
    own (`environment.isolation = "process"`): within one process nothing can keep two of those apart. A factory must
    not return one object twice, unless its class says `thread_safe = True`.
    """

    def reset(self, task: Task) -> Any:
        """Begin `task`; returns the first observation, a string."""

    def step(self, action: str) -> Any:
        """Take the model's text; returns a `StepResult`."""


class World(Protocol):
    """The agent's face of an environment. Its failures never reach the agent: the attempt is cancelled and retried."""

    @property
    def task(self) -> Task:
        """What is to be done."""

    @property
    def done(self) -> bool:
        """Whether the environment has ended the episode."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What `call` accepts."""

    async def reset(self) -> str:
        """Begin; returns the first observation."""

    async def step(self, action: str) -> str:
        """Act; returns the observation. The world keeps reward and `done`."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. A wrong name or wrong arguments are a result with `failed` set, for the model to read."""


Agent: TypeAlias = "Callable[[Conversation, World], Awaitable[None]]"
"""Plays one episode: an async function of a conversation and a world."""

Invoke: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs user code, plain or async, and returns its value: the caller decides about threads and deadlines."""


async def inline(function: Callable[[], Any]) -> Any:
    """The simplest `Invoke`: right here, without a thread or a deadline."""
    value = function()
    return await value if inspect.isawaitable(value) else value


def checked_observation(environment: Any, value: Any, step: int) -> str:
    """The observation, if it is text.

    Args:
        environment: whose it is, for the message.
        value: what `reset` returned, or a `StepResult`'s observation.
        step: 0 for `reset`, else the number of the step, from 1.

    Raises:
        EnvironmentFailure: it is not a string.
    """
    if isinstance(value, str):
        return value
    if step == 0 and isinstance(value, tuple):
        hint = "return the text alone; what else reset knows belongs on the environment"
    else:
        hint = "turn it into text, since a language model reads it"
    raise _failure(environment, "observation", step, f"is {_shown(value)}, not a string; {hint}")


def checked_step(environment: Any, value: Any, step: int) -> StepResult:
    """A `StepResult` whose every field is what it says, the reward a Python float.

    Raises:
        EnvironmentFailure: another type, an observation that is not text, a flag that is not a bool, a reward or
            metric that is not a finite number; the message names environment, field and step.
    """
    if not isinstance(value, StepResult):
        hint = "return trouper.envs.StepResult(observation, reward, done, truncated)"
        raise _failure(environment, "return value", step, f"is {_shown(value)}, not a StepResult; {hint}")
    for field, flag in (("done", value.done), ("truncated", value.truncated)):
        if not isinstance(flag, (bool, np.bool_)):  # a union would be made anew at every call
            raise _failure(environment, field, step, f"is {_shown(flag)}, not a bool")
    if not isinstance(value.metrics, dict) or not all(isinstance(name, str) for name in value.metrics):
        raise _failure(environment, "metrics", step, f"is {_shown(value.metrics)}, not a dict of names and numbers")
    return StepResult(
        observation=checked_observation(environment, value.observation, step),
        reward=_number(environment, "reward", step, value.reward),
        done=bool(value.done),
        truncated=bool(value.truncated),
        metrics={
            name: _number(environment, f"metrics[{name!r}]", step, number) for name, number in value.metrics.items()
        },
    )


def checked_score(environment: Any, value: Any, step: int) -> float | None:
    """What an environment's `reward` method returned: a finite number, or None where none can be given.

    Raises:
        EnvironmentFailure: anything else.
    """
    return None if value is None else _number(environment, "reward()", step, value)


def as_float(value: Any) -> float | None:
    """A real number, a bool or an array of one of those as a Python float (perhaps not finite); else None."""
    if type(value) is float:
        return value
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.reshape(-1)[0]
    return float(value) if isinstance(value, numbers.Real | np.bool_) else None


def _number(environment: Any, field: str, step: int, value: Any) -> float:
    number = as_float(value)
    if number is None or not math.isfinite(number):
        raise _failure(environment, field, step, f"is {_shown(value)}, not a finite number")
    return number


def _failure(environment: Any, field: str, step: int, problem: str) -> EnvironmentFailure:
    where = "reset" if step == 0 else f"step {step}"
    return EnvironmentFailure("env_error", f"{type(environment).__qualname__}: {field} at {where} {problem}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return f"{shown if len(shown) <= 80 else shown[:77] + '...'} ({type(value).__name__})"

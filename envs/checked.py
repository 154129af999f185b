"""An environment object behind the checks of `protocols.py` and `tools.py`: what comes out is what the types say.

The same checks run beside the agent and in an environment's own process. Does not know about deadlines or restarts.
"""

import inspect
from functools import partial
from typing import Any

from trouper.channels import Task
from trouper.envs.protocols import Invoke, StepResult, checked_observation, checked_score, checked_step
from trouper.envs.tools import Tool, ToolResult, call_tool, tools_of


class CheckedEnvironment:
    """One environment object, of which only checked values are seen.

    Every method raises what the object raises, and `EnvironmentFailure` where it answered with what is no answer.

    Args:
        environment: what the user wrote.
        invoke: runs its methods, plain or async.

    Attributes:
        judges: whether `score` asks the object; else it is what `step` gave.
    """

    def __init__(self, environment: Any, invoke: Invoke) -> None:
        self._environment = environment
        self._invoke = invoke
        self._steps = 0
        self.judges = hasattr(environment, "reward")
        self._takes_seed = "seed" in inspect.signature(environment.reset).parameters

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self._environment).__qualname__

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What `call_tool` accepts."""
        return tools_of(self._environment)

    async def reset(self, task: Task, seed: int) -> str:
        """Begin; returns the first observation."""
        self._steps = 0
        given = {"seed": seed} if self._takes_seed else {}
        observation = await self._invoke(partial(self._environment.reset, task, **given))
        return checked_observation(self._environment, observation, 0)

    async def step(self, action: str) -> StepResult:
        """Act."""
        self._steps += 1
        return checked_step(self._environment, await self._invoke(partial(self._environment.step, action)), self._steps)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool; a call that does not fit is a result for the model."""
        return await call_tool(self._environment, name, arguments, self._invoke)

    async def score(self, rewards: float) -> float | None:
        """What its `reward` method gives; `rewards`, the sum of the steps', where it has none."""
        score: Any = rewards
        if self.judges:
            score = await self._invoke(self._environment.reward)
        return checked_score(self._environment, score, self._steps)

    async def close(self) -> None:
        """Have it closed, if it can be."""
        if hasattr(self._environment, "close"):
            await self._invoke(self._environment.close)

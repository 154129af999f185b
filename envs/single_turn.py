"""One prompt, one answer: the environment of a task that reward functions judge."""

from trouper.channels import ConfigError, Task
from trouper.envs.protocols import StepResult


class SingleTurn:
    """Shows the task's prompt and ends with the answer; it gives no reward of its own.

    Args:
        field: which field of the task's payload is the prompt.
    """

    def __init__(self, field: str = "prompt") -> None:
        self._field = field

    async def reset(self, task: Task) -> str:
        """The prompt."""
        if self._field not in task.payload:
            known = ", ".join(task.payload) or "none"
            raise ConfigError(f"task {task.id!r} has no field {self._field!r} to be shown; it has: {known}")
        return str(task.payload[self._field])

    async def step(self, action: str) -> StepResult:
        """The answer ends the episode."""
        return StepResult("", done=True)

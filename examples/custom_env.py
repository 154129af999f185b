"""A new environment and its tasks, for the model of examples/guess.toml.

Run it from the repository's top with
`trouper train examples/guess.toml run.name=countdown environment.name=examples.custom_env:Countdown
tasks.source=examples.custom_env:Starts`.
"""

from trouper.channels import Task
from trouper.envs import StepResult


class Countdown:
    """Shows a digit; the model counts down from it. Each of three turns earns 1/3 when it is the next digit and `;`."""

    def reset(self, task: Task) -> str:
        """Show the digit to start from."""
        self.next, self.turns = task.payload["start"] - 1, 0
        return str(task.payload["start"])

    def step(self, action: str) -> StepResult:
        """Compare a turn with the next digit."""
        right = action == f"{self.next};"
        self.next, self.turns = self.next - 1, self.turns + 1
        return StepResult(observation="", reward=right / 3, done=not right or self.turns == 3)


class Starts:
    """The digits 3 to 9, again and again."""

    def task(self, draw: int) -> Task:
        """The digit of a draw number."""
        return Task(id=str(draw), payload={"start": 3 + draw % 7})

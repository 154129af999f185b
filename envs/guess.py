"""Guess a secret digit in five turns: small enough to be learned from nothing in a minute.

The chat format is `PlainChat(ALPHABET, STOP)`: one id per character. The model says a digit and `;`, the environment
answers `<` (the secret is smaller), `>` or `=`.
"""

import numpy as np

from trouper.channels import Task
from trouper.envs.protocols import StepResult

ALPHABET = "0123456789;<>=?"
STOP = ";"
MAX_GUESSES = 5


class Guess:
    """The environment. The score is `1 - 0.1 * (n - 1)` when guess `n` is right, else 0.05 for each well-formed guess.

    What is not a digit and `;` ends the episode.
    """

    def reset(self, task: Task) -> str:
        """Take the secret; the prompt is `?`."""
        self._secret: int = task.payload["secret"]
        self._guesses = 0
        self._found = False
        return "?"

    def step(self, action: str) -> StepResult:
        """Compare a guess with the secret."""
        if len(action) != 2 or action[0] not in "0123456789" or action[1] != STOP:
            return StepResult("", done=True)
        guess = int(action[0])
        self._guesses += 1
        self._found = guess == self._secret
        answer = "=" if self._found else "<" if self._secret < guess else ">"
        return StepResult(answer, done=self._found or self._guesses == MAX_GUESSES)

    def reward(self) -> float:
        """The score so far."""
        return 1 - 0.1 * (self._guesses - 1) if self._found else 0.05 * self._guesses


class GuessTasks:
    """Secrets, endless.

    Args:
        seed: of the secrets.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def task(self, draw: int) -> Task:
        """The secret of a draw number."""
        secret = int(np.random.default_rng((self._seed, draw)).integers(10))
        return Task(f"guess-{draw}", {"secret": secret})


def guess_tasks(seed: int = 0) -> GuessTasks:
    """The task stream for a configuration."""
    return GuessTasks(seed)

"""An environment whose faults are a function of the attempt, and that writes down every attempt it is reset for."""

import os

from trouper.channels import Task
from trouper.envs.guess import Guess


class ShakyGuess(Guess):
    """Raises for one seed in sixteen."""

    def reset(self, task: Task, seed: int) -> str:
        """Note the attempt, then fail or begin."""
        with open(os.environ["RESETS"], "a") as resets:
            resets.write(f"{seed}\n")
        if seed % 16 == 0:
            raise OSError("the world broke")
        return super().reset(task)

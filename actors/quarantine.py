"""Which tasks are not drawn any more, because infrastructure lost every member of their groups.

Knows counts and causes; the grouper tells it what was lost, the source asks it, ledger and checkpoint remember it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from trouper.channels import Lost


class Quarantine:
    """Tasks by id, each with the cause.

    Args:
        after: groups of a task that must be lost whole; 0 quarantines nothing.
        known: those of earlier lives.
        remember: told of each new one, with its cause.
    """

    def __init__(self, after: int, known: Mapping[str, str], remember: Callable[[str, str], None]) -> None:
        self.causes = dict(known)
        self._after = after
        self._remember = remember
        self._lost: Counter[str] = Counter()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self.causes

    def lose(self, members: Sequence[Lost]) -> None:
        """A whole group was lost. What the sampler could not do is not the task's fault."""
        task_id = members[0].attempt.task.id
        if any(lost.kind == "sampler_error" for lost in members) or task_id in self.causes:
            return
        self._lost[task_id] += 1
        if self._lost[task_id] == self._after:
            cause = self.causes[task_id] = f"{members[0].kind}: {members[0].cause}"
            self._remember(task_id, cause)

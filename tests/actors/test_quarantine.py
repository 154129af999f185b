"""Tasks that always fail: given up once, named, and not drawn again, in this life or in a later one."""

from typing import Any

import pytest

from trouper.actors.quarantine import Quarantine
from trouper.channels import Attempt, HopelessRun, Lost, Task


def lost(task_id: str, kind: Any = "env_error") -> Lost:
    return Lost(Attempt(0, 0, 0, 2, 0, Task(task_id)), kind, f"{task_id} broke")


def test_a_task_is_given_up_after_so_many_lost_groups() -> None:
    told: list[tuple[str, str]] = []
    quarantine = Quarantine(2, {"old": "of an earlier life"}, lambda *each: told.append(each))
    for task_id in ("a", "b", "a", "a", "old"):
        quarantine.lose([lost(task_id), lost(task_id)])
    assert told == [("a", "env_error: a broke")]
    assert [task_id in quarantine for task_id in ("a", "b", "old")] == [True, False, True]


@pytest.mark.parametrize(("after", "kind"), [(0, "env_error"), (1, "sampler_error")])
def test_what_is_not_the_tasks_fault_is_not_held_against_it(after: int, kind: str) -> None:
    quarantine = Quarantine(after, {}, lambda *each: pytest.fail("told of nothing"))
    quarantine.lose([lost("a"), lost("a", kind)])
    assert "a" not in quarantine


class Cursed:
    """Every fourth draw is the same task, which never works."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def task(self, draw: int) -> Task:
        self.drawn.append(draw)
        return Task("cursed" if draw % 4 == 1 else str(draw))


def unlucky(letters: Any, begun: list[str]) -> Any:
    class Unlucky(letters):
        async def reset(self, task: Task) -> str:
            begun.append(task.id)
            if task.id == "cursed":
                raise OSError("no such world")
            return await super().reset(task)

    return Unlucky


async def test_a_task_that_always_fails_is_tried_once_and_stays_away_after_a_resume(
    autojump_clock, play, letters
) -> None:
    begun: list[str] = []
    given = {"rollout": {"max_attempts": 3, "max_staleness": 0}, "checkpoint": {"save_interval_steps": 1}}
    life = play(tasks=Cursed(), make_environment=unlucky(letters, begun), kill_at=12.0, **given)
    await life()
    assert begun.count("cursed") == 2 * 3  # members, and tries of each
    assert life.run.life.quarantine.causes == {"cursed": "env_error: reset: OSError: no such world"}
    assert any("'cursed' is not drawn any more" in note for note in life.screen.notes)
    done = life.checkpoints.latest()
    again = await play(
        resume=life, tasks=Cursed(), make_environment=unlucky(letters, begun), train={"max_steps": done + 4}, **given
    )()
    assert begun.count("cursed") == 2 * 3
    assert again.metrics[done + 4]["tasks/quarantined"] == 1
    slots = sorted(group.slot for _, group in again.groups)
    assert slots == list(range(2 * done, 2 * (done + 4)))
    assert all(group.void is None and group.draw % 4 != 1 for _, group in again.groups)


async def test_when_every_task_is_cursed_the_run_says_so(autojump_clock, play, letters) -> None:
    class Hopeless:
        def task(self, draw: int) -> Task:
            return Task("cursed")

    with pytest.raises(HopelessRun, match=r"10000 draws in a row gave tasks that are quarantined \(1 are\)"):
        await play(tasks=Hopeless(), make_environment=unlucky(letters, []))()

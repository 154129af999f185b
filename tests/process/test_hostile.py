"""Whole runs whose environments hang, raise, crash and fork: every slot is trained, and the process ends by itself."""

import pytest

from tests.process.running import GROUPS, finish, marked, trained
from trouper.actors.metrics import read_metrics

STEPS = 10
OPTIONS = [
    "environment.name=shaky:HostileGuess",
    *(f"environment.{call}_timeout=0.5" for call in ("reset", "step", "reward", "close")),
    "environment.create_timeout=2.0",
    "environment.restart_backoff=0.0",
    "environment.max_abandoned_threads=64",
    "rollout.max_attempts=8",
    f"train.max_steps={STEPS}",
    "rollout.max_lost_fraction=1.0",
]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_every_group_is_delivered_and_nothing_is_left(folder, mark, isolation):
    run = folder / f"hostile-{isolation}"
    own = isolation == "process"
    finish(
        folder, run, *OPTIONS, f"environment.isolation={isolation}", f"environment.arguments.deadly={str(own).lower()}"
    )
    assert marked(mark) == {}
    assert len({slot for step in trained(run).values() for slot, _ in step}) == STEPS * GROUPS
    metrics = read_metrics(run / "metrics.jsonl").values()
    lost = {name for record in metrics for name, value in record.items() if name.startswith("env/failures/") and value}
    assert {"env/failures/env_error", "env/failures/env_timeout"} <= lost
    assert ("env/failures/env_died" in lost) == own
    assert (run / "log.txt").read_text().count("HostileGuess.close failed") > 0

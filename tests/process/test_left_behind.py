"""User code that does not end when it is cancelled: attempts are lost, the run trains on, and the process ends."""

import pytest

from tests.process.running import STEPS, finish
from trouper.actors.metrics import read_metrics


@pytest.mark.slow
def test_a_run_ends_by_itself_though_a_call_never_does(folder, mark):
    run = folder / "left-behind"
    options = ["environment.name=shaky:DeafGuess", "environment.step_timeout=0.2", "environment.isolation=inline"]
    finish(folder, run, *options, "rollout.max_attempts=3")
    assert max(read_metrics(run / "metrics.jsonl")) == STEPS
    assert "env_timeout: step took longer than environment.step_timeout = 0.2 s" in (run / "log.txt").read_text()
    assert "leaving behind what does not end: " in (folder / "left-behind.out").read_text()

"""A real run that is killed leaves a trace that can be read, and the run that goes on leaves its own."""

import signal

import pytest

from tests.actors.trace_reading import read
from tests.process.running import finish, lines, started, wait_for
from trouper.actors.perfetto import numbered

pytestmark = pytest.mark.slow


def test_a_killed_run_leaves_a_trace_of_all_it_did(folder):
    run = folder / "traced"
    with started(folder, run) as process:
        wait_for(lambda: lines(run / "metrics.jsonl") >= 8 and _steps(run) >= 6, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    path = run / "trace.perfetto-trace"
    killed = read(path)
    assert len(killed.of("trainer device", "optimizer step")) >= 6
    assert {"compile", "prefill", "decode", "swap", "attest"} <= {span.name for span in killed.of("sampler device")}
    assert {"reset", "step"} <= {span.name for span in killed.of("environment 0")}
    assert killed.counters.keys() >= {"queue/groups/depth", "memory/resident_mib", "throughput/tokens_per_s"}
    assert all(span.outer in killed.of("slot 0", "attempt") for span in killed.of("slot 0", "generate"))
    assert any(flow in span.flows for span in killed.of("slot 0", "generate") for flow in _trained(killed))
    finish(folder, run, "--resume")
    assert [span.name for span in read(numbered(path, 1)).spans] == [span.name for span in killed.spans]
    assert read(path).of("trainer device", "optimizer step")[-1].annotations == {"step": 24}


def _steps(run):
    """Optimizer steps that the trace has; also while it is being written."""
    path = run / "trace.perfetto-trace"
    return len(read(path).of("trainer device", "optimizer step")) if path.exists() else 0


def _trained(reading):
    return [flow for span in reading.of("trainer device", "optimizer step") for flow in span.flows]

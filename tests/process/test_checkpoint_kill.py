"""Real kills while a checkpoint is being written: nothing partial is ever read, nothing acknowledged is ever lost."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict

import jax
import numpy as np
import pytest

from trouper.learner.checkpoint import Checkpoints

# Imports once, then forks a writer for each line of its input: JAX starts in the writers, so none inherits its threads.
WRITERS = """
import os, sys
import numpy as np
from trouper.learner.checkpoint import Checkpoints

def tree(step):
    noise = np.random.default_rng(step).random((4, 1 << 15), np.float32)
    return {"params": {str(n): row for n, row in enumerate(noise)}, "step": np.asarray(step, np.int32)}

def write():
    checkpoints = Checkpoints(sys.argv[1], max_to_keep=2, keep_best=1)
    step = checkpoints.latest() or 0
    while True:
        step += 1
        print("begin", step, flush=True)
        checkpoints.save(step, tree(step), {"step": step, "cursor": 2 * step}, float(step % 7))
        checkpoints.wait()
        print("saved", step, flush=True)

for _ in sys.stdin:
    writer = os.fork()
    if not writer:
        write()
    print("writer", writer, flush=True)
    print("\\nended", os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]), flush=True)
"""


def tree(step):
    noise = np.random.default_rng(step).random((4, 1 << 15), np.float32)
    return {"params": {str(n): row for n, row in enumerate(noise)}, "step": np.asarray(step, np.int32)}


def kill_while_saving(writers, rng):
    """Kill a writer at a random moment of its saves; returns the newest step that it had acknowledged, or None."""
    writers.stdin.write("go\n")
    writers.stdin.flush()
    said = defaultdict(list)
    begun, killed = rng.randint(1, 4), False
    for line in writers.stdout:
        if len(words := line.split()) == 2:  # a line may be torn, too
            said[words[0]].append(int(words[1]))
        if "writer" in said and len(said["begin"]) >= begun and not killed:
            time.sleep(rng.uniform(0, 0.06))  # the moment itself is what is tried: a save takes about this long
            os.kill(said["writer"][0], signal.SIGKILL)
            killed = True
        if "ended" in said:
            break
    assert said["ended"] == [-signal.SIGKILL], said
    return max(said["saved"], default=None)


def check(folder, acknowledged):
    """What a resume finds: whole, all of one step, and not older than what was acknowledged."""
    notes = []
    with Checkpoints(folder, max_to_keep=2, keep_best=1, note=notes.append) as checkpoints:
        latest = checkpoints.latest()
        if latest is None:
            assert acknowledged is None
            return None
        found, record = checkpoints.restore(None, tree(0))
    assert notes == []
    assert acknowledged is None or acknowledged <= latest
    assert record == {"step": latest, "cursor": 2 * latest}
    jax.tree.map(np.testing.assert_array_equal, found, tree(latest))
    return latest


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints(tmp_path):
    rng, latest = random.Random(0), None
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WRITERS, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ) as writers:
        for _ in range(10):
            acknowledged = kill_while_saving(writers, rng)
            found = check(tmp_path, latest if acknowledged is None else acknowledged)
            assert latest is None or found >= latest
            latest = found
        writers.stdin.close()
    assert latest is not None
    assert writers.returncode == 0

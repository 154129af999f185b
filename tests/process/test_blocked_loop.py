"""Code that blocks the event loop of a real process is named while it does."""

import subprocess
import sys
from pathlib import Path

ENVIRONMENT = """
import threading

class Sleepy:
    def reset(self, task):
        return "a"

    def step(self, action):
        threading.Event().wait(1.5)  # as a call that nobody made async
        return "b", 0.0, True
"""

PROGRAM = """
import sys
import trio
from trouper.actors.graph import Graph
from trouper.actors.supervisor import NEVER
from trouper.actors.threads import Threads
from sleepy import Sleepy

async def step() -> None:
    threads = Threads(1, 1, "inline")
    await trio.sleep(0.5)  # the loop has been seen alive
    await threads.call(lambda: Sleepy().step("b"))
    await trio.sleep(0.5)

graph = Graph("program")
graph.actor("step", step, restart=NEVER)
trio.run(graph.run)
print(graph.heartbeat.incidents, graph.heartbeat.blocked_seconds >= 1.0)
"""


def test_an_inline_step_that_blocks_is_named_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(ENVIRONMENT)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "1 True\n"  # and the listening thread kept nobody waiting
    first, *stack = ended.stderr.splitlines()
    assert first.startswith("the event loop has been blocked for 1.0 s by Sleepy.step at ")
    assert f"{tmp_path / 'sleepy.py'}:9, and every actor waits for it" in first
    assert "threading.Event().wait(1.5)  # as a call that nobody made async" in map(str.strip, stack)
    assert ended.stderr.count("the event loop") == 1

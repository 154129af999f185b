"""A graph in a process of its own, and the signals that a terminal or a scheduler sends."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import sys
import time
import trio
from trouper.actors.graph import Graph
from trouper.actors.run import run
from trouper.actors.supervisor import NEVER

async def polite(stop: trio.Event) -> None:
    print("up", flush=True)
    if sys.argv[1] == "never listens":
        print("busy", flush=True)
        time.sleep(1000)
    await stop.wait()
    print("stopping", flush=True)
    if sys.argv[1] == "deaf":
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()
    if sys.argv[1] == "blocked":
        time.sleep(1000)
    if sys.argv[1] == "slow":
        try:
            await trio.sleep_forever()
        finally:
            print("cancelled", flush=True)
    print("tidied", flush=True)

graph = Graph("program")
graph.actor("polite", polite, restart=NEVER, grace=1000.0)
stopped_by = run(graph)
sys.exit(128 + stopped_by)
"""


def start(manner: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, manner], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    expect(process, "up")
    return process


def expect(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line


def end(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_lets_actors_tidy_up(number: signal.Signals, code: int) -> None:
    process = start("tidy")
    process.send_signal(number)
    assert end(process) == (code, "stopping\ntidied\n", "")


def test_two_signals_cancel() -> None:
    process = start("slow")
    process.send_signal(signal.SIGTERM)
    expect(process, "stopping")
    process.send_signal(signal.SIGTERM)
    assert end(process) == (143, "cancelled\n", "")


@pytest.mark.parametrize("manner", ["deaf", "blocked", "never listens"])
def test_what_does_not_end_when_it_is_cancelled_ends_with_the_process(manner: str) -> None:
    process = start(manner)
    if manner == "never listens":
        expect(process, "busy")
    process.send_signal(signal.SIGINT)
    if manner != "never listens":
        expect(process, "stopping")
    process.send_signal(signal.SIGTERM)
    code, _, err = end(process)
    assert (code, "leaving it" in err) == (130, True)


def test_the_third_signal_ends_at_once() -> None:
    process = start("deaf")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)  # signals of one kind that come together are one
    assert end(process)[0] == 143

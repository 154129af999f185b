import signal
import threading

import pytest
import trio

from trouper.actors.graph import Graph
from trouper.actors.run import attend, run
from trouper.actors.supervisor import NEVER
from trouper.channels import GraphError


def graph_of(*actors: object) -> Graph:
    graph = Graph("test")
    for number, actor in enumerate(actors):
        graph.actor(f"actor-{number}", actor, restart=NEVER)  # type: ignore[arg-type]
    return graph


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_for_the_graceful_stop(number: signal.Signals) -> None:
    events = []

    async def tidy(stop: trio.Event) -> None:
        await stop.wait()
        await trio.lowlevel.checkpoint()
        events.append("tidied")

    async def signalled() -> None:
        signal.raise_signal(number)
        await trio.sleep_forever()

    assert run(graph_of(tidy, signalled)) is number
    assert events == ["tidied"]


def test_the_second_signal_cancels() -> None:
    async def stubborn(stop: trio.Event) -> None:
        await stop.wait()
        signal.raise_signal(signal.SIGTERM)
        await trio.sleep_forever()

    async def signalled() -> None:
        signal.raise_signal(signal.SIGINT)
        await trio.sleep_forever()

    graph = Graph("test")
    graph.actor("stubborn", stubborn, restart=NEVER, grace=10_000.0)
    graph.actor("signalled", signalled, restart=NEVER)
    assert run(graph) is signal.SIGINT


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def nothing() -> None: ...

    assert run(graph_of(nothing)) is None
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_errors_come_out_unwrapped() -> None:
    async def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run(graph_of(broken))
    with pytest.raises(GraphError, match="no actors"):
        run(Graph("empty"))


def test_runs_off_the_main_thread_without_heeding_signals() -> None:
    done = []

    async def work() -> None:
        done.append(1)

    thread = threading.Thread(target=run, args=(graph_of(work),))
    thread.start()
    thread.join()
    assert done == [1]


async def test_attend_runs_inside_a_loop() -> None:
    done = []

    async def work() -> None:
        done.append(1)

    assert await attend(graph_of(work)) is None
    assert done == [1]

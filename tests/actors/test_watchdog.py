"""Stalls are found and named, and nothing that can still go on is taken for one."""

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from trouper.actors.accelerator import DeviceThread
from trouper.actors.graph import Graph
from trouper.actors.grouper import Grouper
from trouper.actors.lending import Lending
from trouper.actors.pacer import Pacer
from trouper.actors.portal import AsyncioPortal
from trouper.actors.run import attend
from trouper.actors.supervisor import NEVER
from trouper.actors.wait_graph import WaitGraph
from trouper.channels import Episode, Outcome, Receiver, Reply, Sender, Stalled

FOUND = 40.0
"""Seconds within which a stall is found, and found again after the actors were asked to stop."""


class Notes(list[str]):
    def graph(self, name: str = "graph") -> Graph:
        return Graph(name, note=self.append)


async def collect(inbox: Receiver[int]) -> None:
    async for _ in inbox:
        pass


def fed_by(function: Callable[..., Awaitable[None]], notes: Notes, **given: Any) -> Graph:
    """An actor whose consumer waits for it: that alone is a wait on a channel. Replies come from the consumer."""
    graph = notes.graph()
    numbers = graph.channel("numbers", int, capacity=1)
    graph.actor("producer", function, outbox=numbers, restart=NEVER, **given)
    graph.actor("consumer", collect, inbox=numbers, restart=NEVER)
    graph.link("consumer", "producer", "replies")
    return graph


async def stall(graph: Graph, seconds: float = FOUND) -> str:
    """The report of a graph that must stall within so many seconds."""
    with pytest.raises(Stalled) as stalled, trio.fail_after(seconds):
        await graph.run()
    return str(stalled.value)


# Stalls --------------------------------------------------------------------------------------------------------


async def test_actors_that_wait_for_each_other_over_two_channels_are_a_cycle(autojump_clock: Any) -> None:
    async def split(left: Sender[int], right: Sender[int]) -> None:
        for number in range(4):
            await left.send(number)
        await right.send(0)

    async def join(left: Receiver[int], right: Receiver[int]) -> None:
        await right.receive()
        await left.receive()

    notes = Notes()
    graph = notes.graph("fork")
    left, right = graph.channel("left", int, capacity=2), graph.channel("right", int, capacity=2)
    graph.actor("split", split, left=left, right=right, restart=NEVER)
    graph.actor("join", join, left=left, right=right, restart=NEVER)
    report = await stall(graph)
    assert report.startswith("graph 'fork' is stalled: ")
    assert "  join: receiving from channel 'right' (0/2), for 20.0 s; waits for: split\n" in report
    assert "  split: sending into channel 'left' (2/2), for 20.0 s; waits for: join\n" in report
    assert report.endswith("  cycle: join -> channel right -> split -> channel left -> join")
    assert notes == [report]


async def test_a_full_channel_and_a_lock_that_its_producer_holds_are_a_cycle(autojump_clock: Any) -> None:
    lock = trio.Lock()

    async def produce(outbox: Sender[int]) -> None:
        async with lock:
            for number in range(9):
                await outbox.send(number)

    async def consume(inbox: Receiver[int]) -> None:
        async for _ in inbox:
            async with lock:
                pass

    graph = Graph("locked")
    numbers = graph.channel("numbers", int, capacity=3)
    graph.actor("producer", produce, outbox=numbers, restart=NEVER)
    graph.actor("consumer", consume, inbox=numbers, restart=NEVER)
    report = await stall(graph)
    assert "producer: sending into channel 'numbers' (3/3), for 20.0 s; waits for: consumer\n" in report
    assert "consumer: waiting at test_a_full_channel" in report
    assert "for a lock, held at " in report
    assert "waits for: producer\n" in report
    assert report.splitlines()[-1].startswith("  cycle: consumer -> lock at test_a_full_channel")


async def test_a_lost_permit_is_the_end_of_a_chain(autojump_clock: Any) -> None:
    permits = trio.Semaphore(4)

    async def work(outbox: Sender[int]) -> None:
        for number in range(30):
            await permits.acquire()
            if number % 5:  # every fifth one is lost on the way, and its permit with it
                await outbox.send(number)
                permits.release()

    async def gather(inbox: Receiver[int], outbox: Sender[int]) -> None:
        async for number in inbox:
            await outbox.send(number)

    graph = Graph("permits")
    found, groups = graph.channel("found", int, capacity=2), graph.channel("groups", int, capacity=2)
    graph.actor("worker", work, outbox=found, restart=NEVER)
    graph.actor("grouper", gather, inbox=found, outbox=groups, restart=NEVER)
    graph.actor("trainer", collect, inbox=groups, restart=NEVER)
    report = await stall(graph)
    assert "for a semaphore (value 0)" in report
    assert "  chain: trainer -> channel groups -> grouper -> channel found -> worker -> semaphore at " in report


async def test_a_pacer_waits_for_weights_that_nobody_publishes(autojump_clock: Any) -> None:
    pacer = Pacer(groups_per_step=2, max_staleness=0, max_steps=3, max_redraws=0, weight_sync_steps=1)

    async def draw(outbox: Sender[int]) -> None:
        while (slot := await pacer.acquire()) is not None:
            await outbox.send(slot)

    async def train(inbox: Receiver[int]) -> None:
        async for slot in inbox:
            pacer.close(slot)

    graph = Graph("paced")
    slots = graph.channel("slots", int, capacity=2)
    graph.actor("source", draw, outbox=slots, restart=NEVER)
    graph.actor("trainer", train, inbox=slots, restart=NEVER)
    graph.link("trainer", "source", "attested step")
    report = await stall(graph)
    assert (
        "source: waiting for a training slot (2 of 6 admitted, 2 closed, 0 open; samplers hold weights of step 0); "
        "waits for: trainer\n"
    ) in report
    assert report.endswith("cycle: source -> training slot -> trainer -> channel slots -> source")


async def test_an_actor_that_ended_is_named_as_not_running(autojump_clock: Any) -> None:
    async def leave(outbox: Sender[int]) -> None:
        kept.append(outbox.clone())

    kept: list[Sender[int]] = []
    report = await stall(fed_by(leave, Notes()))
    assert "consumer: receiving from channel 'numbers' (0/1), for 20.0 s; waits for: producer (not running)" in report
    assert report.endswith("chain: consumer -> channel numbers -> producer (not running)")


async def test_equal_waits_are_folded_and_inner_tasks_belong_to_their_actor(autojump_clock: Any) -> None:
    reply: Reply[int] = Reply()

    async def slots(outbox: Sender[int]) -> None:
        async with trio.open_nursery() as nursery:
            for seconds in range(64):
                nursery.start_soon(slot, seconds)

    async def slot(seconds: float) -> None:
        await trio.sleep(seconds)
        await reply.wait()

    report = await stall(fed_by(slots, Notes()), 63.0 + FOUND)
    assert "  producer: 64 tasks waiting at test_equal_waits_are_folded" in report
    assert "for a reply; waits for: consumer\n" in report


async def test_who_can_stop_is_asked_to_before_all_are_cancelled(autojump_clock: Any) -> None:
    done: list[str] = []

    async def deaf(outbox: Sender[int], stop: trio.Event) -> None:
        try:
            await Reply[int]().wait()
        finally:
            done.append("deaf was cancelled")

    async def saves(inbox: Receiver[int], stop: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect, inbox)
            await stop.wait()
            await trio.sleep(100.0)
            done.append("saved")
            nursery.cancel_scope.cancel()

    graph = Graph("polite")
    numbers = graph.channel("numbers", int, capacity=1)
    graph.actor("deaf", deaf, outbox=numbers, restart=NEVER, grace=float("inf"))
    graph.actor("saves", saves, inbox=numbers, restart=NEVER, grace=float("inf"))
    graph.link("saves", "deaf", "replies")
    await stall(graph, 200.0)
    assert done == ["saved", "deaf was cancelled"]


async def test_what_actors_raise_while_they_end_is_the_cause(autojump_clock: Any) -> None:
    async def spiteful(outbox: Sender[int]) -> None:
        try:
            await Reply[int]().wait()
        finally:
            raise ValueError("in its own way")

    with pytest.raises(Stalled) as stalled:
        await fed_by(spiteful, Notes()).run()
    assert "in its own way" in repr(stalled.value.__cause__)


@pytest.mark.parametrize("what", [trio.Event, Reply])
async def test_an_event_that_a_thread_may_set_is_reported_once_and_ends_nothing(autojump_clock: Any, what: Any) -> None:
    async def wait(outbox: Sender[int]) -> None:
        await what().wait()

    notes = Notes()
    with trio.move_on_after(1000.0) as still_running:
        graph = notes.graph()
        numbers = graph.channel("numbers", int, capacity=1)
        graph.actor("producer", wait, outbox=numbers, restart=NEVER)
        graph.actor("consumer", collect, inbox=numbers, restart=NEVER)
        await graph.run()
    assert still_running.cancelled_caught
    assert len(notes) == 1
    assert notes[0].startswith("graph 'graph' may be stalled: ")
    assert "producer: waiting at test_an_event_that_a_thread_may_set" in notes[0]


async def test_the_standard_run_ends_by_name_when_a_member_is_swallowed(
    autojump_clock: Any, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Swallows(Grouper):
        def _accept(self, outcome: Outcome) -> bool:
            return (not isinstance(outcome, Episode) or outcome.attempt.id != "3.0.0") and super()._accept(outcome)

    monkeypatch.setattr("trouper.actors.life.Grouper", Swallows)
    planted = play()
    with pytest.raises(Stalled) as stalled:
        await planted()
    report = str(stalled.value)
    assert "  grouper: receiving from channel 'episodes' (0/4), for " in report
    assert "  episodes: 8 tasks receiving from channel 'tasks' (0/2), longest " in report
    assert "  trainer: receiving from channel 'groups' (0/2), for " in report
    assert (
        "(6 of 8 admitted, 5 closed, 1 open: 3; samplers hold weights of step 1); waits for: barrier, grouper" in report
    )
    assert "cycle: grouper -> channel episodes -> source -> training slot -> grouper" in report
    assert planted.screen.notes[-1] == report
    assert max(planted.checkpoints.saved) == planted.run.life.trainer.step == 1  # what was trained is saved


# No stalls -----------------------------------------------------------------------------------------------------


async def test_a_slow_tool_is_waited_for(autojump_clock: Any) -> None:
    async def work(outbox: Sender[int]) -> None:
        with trio.fail_after(7200.0):
            await trio.sleep(3600.0)
        with trio.move_on_after(3600.0):
            await trio.Event().wait()
        with trio.move_on_after(3600.0):
            await Reply[int]().wait()

    await fed_by(work, Notes()).run()
    assert trio.current_time() >= 3 * 3600.0


async def test_a_timer_counts_also_beyond_a_deadline_that_would_end_the_whole_graph(autojump_clock: Any) -> None:
    async def work(outbox: Sender[int]) -> None:
        await trio.sleep(3600.0)

    notes = Notes()
    with trio.move_on_after(1800.0) as whole:
        await fed_by(work, notes).run()
    assert whole.cancelled_caught
    assert not notes


async def test_backoff_before_a_restart_is_no_stall(autojump_clock: Any, play: Any, letters: Any) -> None:
    class Broken(letters):  # type: ignore[misc]
        made = 0

        def __init__(self) -> None:
            Broken.made += 1
            if Broken.made < 5:
                raise OSError("not yet")

    await play(
        make_environment=Broken,
        environment={"restart_backoff": 1000.0, "restart_backoff_max": 1000.0},
        rollout={"max_attempts": 9, "max_concurrency": 1, "episode_timeout": 1e5},
    )()


async def test_a_graph_that_waits_only_to_be_told_to_stop_is_not_stalled(autojump_clock: Any) -> None:
    async def serve(stop: trio.Event) -> None:
        await stop.wait()

    notes = Notes()
    graph = notes.graph()
    graph.actor("server", serve, restart=NEVER)
    with trio.move_on_after(1000.0) as still_running:
        await graph.run()
    assert still_running.cancelled_caught
    assert not notes


async def test_actors_that_never_sleep_are_not_stalled(autojump_clock: Any) -> None:
    """Whenever the watchdog looks, both seem to wait: the one that runs next has not left its receive yet."""

    async def serve(inbox: Receiver[int], outbox: Sender[int]) -> None:
        async for number in inbox:
            await outbox.send(number)

    async def hurry(outbox: Sender[int]) -> None:
        for number in range(3000):
            await outbox.send(number)
            autojump_clock.jump(1.0)

    graph = Graph("busy")
    raw, served = graph.channel("raw", int, capacity=0), graph.channel("served", int, capacity=0)
    graph.actor("collect", collect, inbox=served, restart=NEVER)
    graph.actor("serve", serve, inbox=raw, outbox=served, restart=NEVER)
    graph.actor("hurry", hurry, outbox=raw, restart=NEVER)
    await graph.run()
    assert trio.current_time() >= 3000.0


async def test_days_of_tool_latency_are_no_stall(autojump_clock: Any, play: Any, letters: Any) -> None:
    class Slow(letters):  # type: ignore[misc]
        async def step(self, action: str) -> Any:
            await trio.sleep(8 * 3600.0)
            return await super().step(action)

    played = await play(
        make_environment=Slow,
        environment={"step_timeout": 1e5},
        rollout={"episode_timeout": 3e5},
        train={"max_steps": 2},
    )()
    assert played.seconds > 24 * 3600.0


async def held_by(function: Callable[[], Awaitable[Any]]) -> str:
    """Who can end the wait that this function comes to."""

    async def wait(outbox: Sender[int]) -> None:
        await function()

    graph = fed_by(wait, Notes())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(graph.run)
        await trio.testing.wait_all_tasks_blocked(0.01)
        picture = waits_of(graph).look(nursery)
        nursery.cancel_scope.cancel()
    return dict(picture.waits)["producer"].ender


def waits_of(graph: Graph) -> WaitGraph:
    return WaitGraph(Lending(graph._root).ends, [])


@pytest.mark.parametrize("way", ["thread", "limiter", "device", "asyncio", "socket", "pipe", "signal", "timer"])
async def test_what_the_outside_world_can_end_is_no_stall(way: str) -> None:
    gate, portal, limiter = threading.Event(), AsyncioPortal(), trio.CapacityLimiter(1)

    async def asyncio_call() -> None:
        await portal.call(lambda: asyncio.sleep(3600.0))

    async def threads() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_thread)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()  # the thread keeps its place
        await in_thread()

    async def in_thread() -> None:
        await trio.to_thread.run_sync(gate.wait, limiter=limiter, abandon_on_cancel=True)

    async def pipe() -> None:
        reader, writer = os.pipe()
        async with trio.lowlevel.FdStream(writer), trio.lowlevel.FdStream(reader) as stream:
            await stream.receive_some()

    async def sockets() -> None:
        near, _far = trio.socket.socketpair()
        with near, _far:
            await near.recv(1)

    async def signals() -> None:
        with trio.open_signal_receiver(signal.SIGUSR1) as received:
            async for _ in received:
                pass

    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "thread": in_thread,
        "limiter": threads,
        "device": lambda: DeviceThread("device").run(gate.wait),
        "asyncio": asyncio_call,
        "socket": sockets,
        "pipe": pipe,
        "signal": signals,
        "timer": partial(trio.sleep, 3600.0),
    }
    opener = threading.Timer(1.0, gate.set)  # the device's caller outlives its cancellation
    opener.start()
    try:
        assert await held_by(ways[way]) == "world"
    finally:
        gate.set()
        opener.cancel()
        opener.join()
        await portal.close()


async def test_a_task_outside_of_the_graph_may_still_hear_from_the_world(autojump_clock: Any) -> None:
    reply: Reply[int] = Reply()

    async def wait(outbox: Sender[int]) -> None:
        await reply.wait()

    async def answer() -> None:
        near, far = trio.socket.socketpair()
        with near, far:
            await near.recv(1)
            reply.set(1)

    with trio.move_on_after(1000.0) as still_running:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            await fed_by(wait, Notes()).run()
    assert still_running.cancelled_caught


async def test_who_listens_for_signals_is_no_hope(autojump_clock: Any) -> None:
    async def wait(outbox: Sender[int]) -> None:
        await Reply[int]().wait()

    with pytest.raises(Stalled), trio.fail_after(FOUND):
        await attend(fed_by(wait, Notes()))

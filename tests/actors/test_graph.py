import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import trio
from msgspec import Struct
from trio.testing import MockClock

from trouper.actors.graph import Graph
from trouper.actors.supervisor import ALWAYS, NEVER, ON_ERROR, Restart, Strategy
from trouper.channels import Channel, Exited, GraphError, Receiver, RestartLimit, RunError, Sender, StartError


class Number(Struct, frozen=True):
    value: int


class Odd(Number, frozen=True):
    pass


class Letter(Struct, frozen=True):
    value: str


Either: TypeAlias = Number | Letter


async def count(outbox: Sender[Number], upto: int) -> None:
    for value in range(upto):
        await outbox.send(Number(value))


async def double(inbox: Receiver[Number], outbox: Sender[Number]) -> None:
    async for number in inbox:
        await outbox.send(Number(2 * number.value))


class Sink:
    def __init__(self) -> None:
        self.values: list[int] = []

    async def collect(self, inbox: Receiver[Number]) -> None:
        async for number in inbox:
            self.values.append(number.value)

    async def __call__(self, inbox: Receiver[Number]) -> None:
        await self.collect(inbox)


def pipeline(sink: Sink, upto: int = 5, *, worker: Any = double, replicas: int = 1, **options: Any) -> Graph:
    graph = Graph("pipeline", **options)
    raw = graph.channel("raw", Number, capacity=2)
    doubled = graph.channel("doubled", Number, capacity=2)
    graph.actor("count", count, outbox=raw, upto=upto, restart=NEVER)
    graph.actor("double", worker, inbox=raw, outbox=doubled, restart=ON_ERROR, replicas=replicas)
    graph.actor("collect", sink.collect, inbox=doubled, restart=NEVER)
    return graph


# Running -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 3])
async def test_data_flows_to_the_end_and_the_graph_ends_by_itself(autojump_clock: MockClock, replicas: int) -> None:
    sink = Sink()
    graph = pipeline(sink, replicas=replicas)
    await graph.run()
    assert sorted(sink.values) == [0, 2, 4, 6, 8]
    assert [(s.name, s.sent, s.received, s.depth) for s in graph.statistics()] == [
        ("raw", 5, 5, 0),
        ("doubled", 5, 5, 0),
    ]


async def test_actors_may_be_methods_callable_objects_and_partials(autojump_clock: MockClock) -> None:
    sink = Sink()
    graph = Graph("shapes")
    numbers = graph.channel("numbers", Number, capacity=0)
    graph.actor("partial", partial(count, upto=2), outbox=numbers, restart=NEVER)
    graph.actor("method", sink.collect, inbox=numbers, restart=NEVER)
    graph.actor("object", sink, inbox=numbers, restart=NEVER)
    await graph.run()
    assert sorted(sink.values) == [0, 1]


async def test_fan_in_ends_only_when_every_producer_has(autojump_clock: MockClock) -> None:
    async def late(outbox: Sender[Number]) -> None:
        await trio.sleep(100.0)
        await outbox.send(Number(7))

    sink = Sink()
    graph = Graph("fan-in")
    numbers = graph.channel("numbers", Number, capacity=1)
    graph.actor("early", count, outbox=numbers, upto=2, restart=NEVER)
    graph.actor("late", late, outbox=numbers, restart=NEVER)
    graph.actor("collect", sink.collect, inbox=numbers, restart=NEVER)
    await graph.run()
    assert sink.values == [0, 1, 7]


async def test_an_optional_end_may_be_left_out(autojump_clock: MockClock) -> None:
    async def work(outbox: Sender[Number] | None, note: "Sender[Letter] | None" = None) -> None:
        assert outbox is None
        assert note is None

    graph = Graph("optional")
    graph.actor("work", work, outbox=None, restart=NEVER)
    await graph.run()


async def test_a_crash_leaves_neighbours_waiting_and_loses_only_the_message_in_hand(autojump_clock: MockClock) -> None:
    exits: list[Exited] = []

    async def fragile(inbox: Receiver[Number], outbox: Sender[Number]) -> None:
        async for number in inbox:
            if number.value == 2:
                raise ValueError("two")
            await outbox.send(number)

    sink = Sink()
    graph = pipeline(sink, worker=fragile, on_exit=exits.append)
    await graph.run()
    assert sink.values == [0, 1, 3, 4]
    assert graph.restarts == 1
    assert sorted((exited.name, exited.reason, exited.attempt) for exited in exits) == [
        ("collect", "returned", 1),
        ("count", "returned", 1),
        ("double", "failed", 1),
        ("double", "returned", 2),
    ]


async def test_workers_that_all_die_fail_the_run_at_once_with_the_root_cause(autojump_clock: MockClock) -> None:
    joined = []

    async def dies(inbox: Receiver[Number], outbox: Sender[Number]) -> None:
        for _ in range(3):
            await outbox.send(await inbox.receive())
        raise ValueError("root cause")

    async def train(inbox: Receiver[Number]) -> None:
        try:
            async for _ in inbox:
                pass
        finally:
            joined.append("train")

    graph = Graph("dying")
    raw, done = (graph.channel(name, Number, capacity=4) for name in ("raw", "done"))
    graph.actor("train", train, inbox=done, restart=NEVER)
    graph.actor("worker", dies, inbox=raw, outbox=done, restart=NEVER, replicas=4)
    graph.actor("count", count, outbox=raw, upto=100, restart=NEVER)
    started = trio.current_time()
    with pytest.raises((ValueError, ExceptionGroup)) as caught:
        await graph.run()
    errors = caught.value.exceptions if isinstance(caught.value, ExceptionGroup) else [caught.value]
    assert {str(error) for error in errors} == {"root cause"}
    assert trio.current_time() == started
    assert joined == ["train"]


async def test_a_worker_that_leaves_before_its_data_ends_is_named(autojump_clock: MockClock) -> None:
    async def leaves(inbox: Receiver[Number], outbox: Sender[Number]) -> None:
        await outbox.send(await inbox.receive())

    with pytest.raises(RunError, match=r"'double' returned, but none of its inboxes \(raw\) has ended"):
        await pipeline(Sink(), upto=100, worker=leaves).run()


@pytest.mark.parametrize("restart", [NEVER, ON_ERROR])
async def test_a_significant_consumer_may_leave_and_ends_the_graph(autojump_clock: MockClock, restart: Restart) -> None:
    async def head(inbox: Receiver[Number]) -> None:
        await inbox.receive()

    graph = Graph("head")
    raw = graph.channel("raw", Number, capacity=1)
    graph.actor("count", count, outbox=raw, upto=10**9, restart=restart)
    graph.actor("head", head, inbox=raw, restart=ON_ERROR, significant=True)
    await graph.run()


async def test_a_producer_does_not_wait_for_consumers_that_are_over(autojump_clock: MockClock) -> None:
    async def until_told(inbox: Receiver[Number], orders: Receiver[Letter]) -> None:
        await inbox.receive()
        async for _ in orders:
            pass

    async def order(outbox: Sender[Letter]) -> None:
        await outbox.send(Letter("enough"))

    graph = Graph("unread")
    raw = graph.channel("raw", Number, capacity=1)
    orders = graph.channel("orders", Letter, capacity=1)
    graph.actor("count", count, outbox=raw, upto=100, restart=NEVER)
    graph.actor("order", order, outbox=orders, restart=NEVER)
    graph.actor("reader", until_told, inbox=raw, orders=orders, restart=ON_ERROR)
    with pytest.raises(RunError, match=r"actor 'count' sent into channel 'raw', but its consumers \(reader\)"):
        await graph.run()


async def test_stop_event_and_readiness_are_passed_to_those_who_want_them(autojump_clock: MockClock) -> None:
    events = []

    async def polite(name: str, *, stop: trio.Event, task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep(2.0)
        task_status.started()
        await stop.wait()
        events.append(name)

    async def rude(stop_me_never: int) -> None:
        events.append("rude is up")
        try:
            await trio.sleep_forever()
        finally:
            events.append("rude")

    graph = Graph("polite")
    graph.actor("one", partial(polite, "one"), restart=NEVER)
    graph.actor("rude", rude, stop_me_never=1, grace=1000.0, restart=NEVER)
    graph.actor("two", partial(polite, "two"), restart=NEVER)
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(graph.run)
        graph.stop()
    assert events == ["rude is up", "two", "rude", "one"]
    assert trio.current_time() - started == 4.0


async def test_an_actor_that_was_asked_to_stop_may_leave_its_inbox(autojump_clock: MockClock) -> None:
    async def produce(outbox: Sender[Number]) -> None:
        while True:
            await trio.sleep(1.0)
            await outbox.send(Number(1))

    async def take(inbox: Receiver[Number], stop: trio.Event) -> None:
        while not stop.is_set():
            await inbox.receive()

    graph = Graph("leaving")
    numbers = graph.channel("numbers", Number, capacity=1)
    graph.actor("produce", produce, outbox=numbers, restart=NEVER)
    graph.actor("take", take, inbox=numbers, restart=NEVER)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(graph.run)
        await trio.sleep(2.5)
        graph.stop()


async def test_an_actor_that_never_comes_up_is_named(autojump_clock: MockClock) -> None:
    async def slow(task_status: trio.TaskStatus[None]) -> None:
        await trio.sleep_forever()

    graph = Graph("slow")
    graph.actor("compile", slow, restart=ALWAYS, start_timeout=30.0)
    with pytest.raises(StartError, match=r"'compile' under 'slow' was not up within start_timeout = 30 s"):
        await graph.run()


async def test_a_domain_restarts_its_members_and_escalates_its_limit(autojump_clock: MockClock) -> None:
    lives: Counter[str] = Counter()

    async def member(name: str, fails: bool) -> None:
        lives[name] += 1
        if fails:
            await trio.sleep(1.0)
            raise ValueError(name)
        await trio.sleep_forever()

    graph = Graph("domains")
    graph.actor("outside", partial(member, "outside", False), restart=ON_ERROR)
    with graph.domain("learning", strategy=Strategy.REST_FOR_ONE, max_restarts=2, window=60.0):
        graph.actor("first", partial(member, "first", False), restart=ON_ERROR)
        graph.actor("second", partial(member, "second", True), restart=ON_ERROR)
        graph.actor("third", partial(member, "third", False), restart=ON_ERROR)
    with pytest.raises(
        RestartLimit, match="'learning' would need 3 restarts within 60 s, and max_restarts = 2: 'second'"
    ) as caught:
        await graph.run()
    assert lives == {"outside": 1, "first": 1, "second": 3, "third": 3}
    assert graph.restarts == 2
    assert caught.value.__notes__ == ["raised by 'learning' (life 1) under 'domains'"]


async def test_when_a_domain_ends_with_its_significant_member_its_channels_end_too(autojump_clock: MockClock) -> None:
    async def forever(outbox: Sender[Number]) -> None:
        await outbox.send(Number(1))
        await trio.sleep_forever()

    async def main() -> None:
        await trio.sleep(5.0)

    sink = Sink()
    graph = Graph("ending")
    numbers = graph.channel("numbers", Number, capacity=1)
    with graph.domain("inner", strategy=Strategy.ONE_FOR_ONE):
        graph.actor("main", main, restart=NEVER, significant=True)
        graph.actor("produce", forever, outbox=numbers, restart=ON_ERROR)
    graph.actor("collect", sink.collect, inbox=numbers, restart=NEVER)
    await graph.run()
    assert sink.values == [1]


async def test_who_was_done_stays_done_when_its_one_for_one_domain_is_restarted(autojump_clock: MockClock) -> None:
    lives = 0

    async def fragile(inbox: Receiver[Number], outbox: Sender[Number]) -> None:
        nonlocal lives
        lives += 1
        if lives <= 2:
            await trio.sleep(1.0)
            raise ValueError("not yet")
        await double(inbox, outbox)

    sink = Sink()
    graph = Graph("revived")
    raw, done = (graph.channel(name, Number, capacity=8) for name in ("raw", "done"))
    with graph.domain("inner", strategy=Strategy.ONE_FOR_ONE, max_restarts=0, restart=ON_ERROR):
        graph.actor("count", count, outbox=raw, upto=3, restart=NEVER)
        graph.actor("double", fragile, inbox=raw, outbox=done, restart=ON_ERROR)
    graph.actor("collect", sink.collect, inbox=done, restart=NEVER)
    await graph.run()
    assert sink.values == [0, 2, 4]
    assert graph.restarts == 2


async def test_a_graph_runs_once(autojump_clock: MockClock) -> None:
    graph = pipeline(Sink())
    await graph.run()
    with pytest.raises(GraphError, match="has run before"):
        await graph.run()


def test_whatever_crashes_no_message_is_lost_or_doubled_but_those_in_hand(run_seeded: Callable[..., Any]) -> None:
    for seed in range(200):
        run_seeded(seed, _crashing_pipeline, seed)


async def _crashing_pipeline(seed: int) -> None:
    rng = random.Random(seed)
    sent, received, in_hand = [], [], Counter[int]()

    async def source(outbox: Sender[Number]) -> None:
        while len(sent) < 40:
            number = Number(len(sent))
            await outbox.send(number)
            sent.append(number.value)
            if rng.random() < 0.1:
                raise ValueError("source")

    async def relay(inbox: Receiver[Number], outbox: Sender[Number]) -> None:
        async for number in inbox:
            await trio.sleep(rng.choice([0.0, 0.0, 1.0]))
            if rng.random() < 0.1:
                in_hand[number.value] += 1
                raise ValueError("relay")
            await outbox.send(number)

    async def sink(inbox: Receiver[Number]) -> None:
        async for number in inbox:
            if rng.random() < 0.1:
                in_hand[number.value] += 1
                raise ValueError("sink")
            received.append(number.value)

    graph = Graph("fuzz", max_restarts=10**6, seed=seed)
    first, second = (graph.channel(name, Number, capacity=rng.choice([0, 1, 5])) for name in ("first", "second"))
    graph.actor("source", source, outbox=first, restart=ON_ERROR)
    graph.actor("relay", relay, inbox=first, outbox=second, restart=ON_ERROR, replicas=rng.randint(1, 3))
    graph.actor("sink", sink, inbox=second, restart=ON_ERROR)
    await graph.run()
    assert Counter(received) + in_hand == Counter(range(40))


# Checking ------------------------------------------------------------------------------------------------------


def problems(graph: Graph) -> str:
    with pytest.raises(GraphError) as caught:
        graph.check()
    return str(caught.value)


def graph_of(*channels: tuple[str, Any]) -> tuple[Graph, list[Channel[Any]]]:
    graph = Graph("test")
    return graph, [graph.channel(name, message_type, capacity=1) for name, message_type in channels]


def test_a_sound_graph_passes() -> None:
    pipeline(Sink()).check()


def test_all_problems_come_in_one_message() -> None:
    graph, [raw] = graph_of(("raw", Number))
    graph.actor("a", count, outbox=raw, restart=NEVER)
    graph.actor("a", count, outbox=raw, upto=1, restart=NEVER)
    text = problems(graph)
    assert text.startswith("graph 'test' cannot run:\n  - ")
    assert "the name 'a' is used 2 times" in text
    assert "actor 'a': parameter 'upto' (int) was not given; pass upto=..." in text
    assert "channel 'raw' has no consumer" in text


def test_an_empty_graph_is_refused() -> None:
    assert "it has no actors" in problems(Graph("empty"))


def test_a_channel_needs_a_producer() -> None:
    graph, [raw] = graph_of(("raw", Number))
    graph.actor("sink", Sink(), inbox=raw, restart=NEVER)
    assert "channel 'raw' has no producer; pass it to an actor's Sender parameter" in problems(graph)


def test_two_channels_of_one_name_are_refused() -> None:
    graph, [one, two] = graph_of(("raw", Number), ("raw", Number))
    graph.actor("double", double, inbox=one, outbox=two, restart=NEVER)
    assert "2 channels are named 'raw'" in problems(graph)


def test_replicas_share_the_namespace_of_actors() -> None:
    graph, [raw] = graph_of(("raw", Number))
    graph.actor("w", count, outbox=raw, upto=1, restart=NEVER, replicas=2)
    graph.actor("w-1", Sink(), inbox=raw, restart=NEVER)
    assert "the name 'w-1' is used 2 times" in problems(graph)


async def _send_either(outbox: Sender[Either]) -> None: ...
async def _send_odd(outbox: Sender[Odd]) -> None: ...
async def _send_bare(outbox: Sender) -> None: ...  # type: ignore[type-arg]
async def _send_ints(outbox: Sender[list[int]]) -> None: ...
async def _take_either(inbox: "Receiver[Number | Letter]") -> None: ...
async def _take_letter(inbox: Receiver[Letter]) -> None: ...
async def _take_number(inbox: Receiver[Number]) -> None: ...
async def _take_any(inbox: Receiver[Any]) -> None: ...
async def _take_list(inbox: Receiver[list]) -> None: ...  # type: ignore[type-arg]


@pytest.mark.parametrize(
    ("send", "carried", "take", "problem"),
    [
        (_send_odd, Number, _take_either, None),
        (_send_odd, Either, _take_either, None),
        (_send_either, Either, _take_any, None),
        (_send_bare, Letter, _take_letter, None),
        (_send_ints, list[int], _take_list, None),
        (_send_either, Number, _take_number, "'outbox' sends Number | Letter into channel 'c', which carries Number"),
        (_send_odd, Either, _take_letter, "'inbox' receives Letter from channel 'c', which carries Number | Letter"),
        (_send_odd, Number, _take_letter, "'inbox' receives Letter from channel 'c', which carries Number;"),
        (_send_ints, list[str], _take_list, "'outbox' sends list[int] into channel 'c', which carries list[str]"),
    ],
)
def test_message_types_must_agree(send: Any, carried: Any, take: Any, problem: str | None) -> None:
    graph, [channel] = graph_of(("c", carried))
    graph.actor("send", send, outbox=channel, restart=NEVER)
    graph.actor("take", take, inbox=channel, restart=NEVER)
    if problem is None:
        graph.check()
    else:
        assert problem in problems(graph)


def test_a_cycle_of_bounded_sends_is_named() -> None:
    graph, [ab, bc, ca, out] = graph_of(("ab", Number), ("bc", Number), ("ca", Number), ("out", Number))

    async def fork(inbox: Receiver[Number], one: Sender[Number], two: Sender[Number]) -> None: ...

    graph.actor("a", double, inbox=ca, outbox=ab, restart=NEVER)
    graph.actor("b", double, inbox=ab, outbox=bc, restart=NEVER)
    graph.actor("c", fork, inbox=bc, one=ca, two=out, restart=NEVER)
    graph.actor("sink", Sink(), inbox=out, restart=NEVER)
    text = problems(graph)
    assert "the bounded sends form a cycle, which can wedge with every channel full: a -> b -> c -> a; make one" in text
    assert text.count("cycle") == 1


def test_an_actor_that_feeds_itself_is_a_cycle() -> None:
    graph, [loop] = graph_of(("loop", Number))
    graph.actor("retry", double, inbox=loop, outbox=loop, restart=NEVER)
    assert "retry -> retry" in problems(graph)


def test_a_diamond_is_no_cycle() -> None:
    async def fork(one: Sender[Number], two: Sender[Number]) -> None: ...

    graph, [a, b, c] = graph_of(("a", Number), ("b", Number), ("c", Number))
    graph.actor("fork", fork, one=a, two=b, restart=NEVER)
    graph.actor("left", double, inbox=a, outbox=c, restart=NEVER)
    graph.actor("right", double, inbox=b, outbox=c, restart=NEVER)
    graph.actor("join", Sink(), inbox=c, restart=NEVER)
    graph.check()


def test_ends_and_annotations_must_match() -> None:
    graph, [raw] = graph_of(("raw", Number))
    graph.actor("no end", count, outbox=3, upto=1, restart=NEVER)
    graph.actor("end elsewhere", count, outbox=raw, upto=raw, restart=NEVER)
    graph.actor("sink", Sink(), inbox=raw, colour="red", restart=NEVER)
    text = problems(graph)
    assert "actor 'no end': parameter 'outbox' is annotated Sender[Number] but was given 3; give it a channel" in text
    assert (
        "actor 'end elsewhere': parameter 'upto' was given channel 'raw' but is annotated int; "
        "annotate it Receiver[Number] or Sender[Number]"
    ) in text
    assert "actor 'sink' has no parameter 'colour' that can be passed by name; it has: inbox" in text


def test_what_is_no_async_function_is_refused() -> None:
    def plain() -> None: ...

    graph = Graph("test")
    graph.actor("plain", plain, restart=NEVER)
    graph.actor("object", object(), restart=NEVER)  # type: ignore[arg-type]
    text = problems(graph)
    assert "actor 'plain' was given <function" in text
    assert "actor 'object' was given <object" in text
    assert text.count("declare it with `async def`") == 2


def test_an_annotation_that_cannot_be_resolved_is_named() -> None:
    async def work(outbox: "Sender[Nowhere]") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    graph, [raw] = graph_of(("raw", Number))
    graph.actor("work", work, outbox=raw, restart=NEVER)
    assert "actor 'work': an annotation cannot be resolved (name 'Nowhere' is not defined)" in problems(graph)


def test_a_channel_of_another_graph_is_refused() -> None:
    graph, [raw] = graph_of(("raw", Number))
    _, [other] = graph_of(("raw", Number))
    graph.actor("count", count, outbox=other, upto=1, restart=NEVER)
    graph.actor("count2", count, outbox=raw, upto=1, restart=NEVER)
    graph.actor("sink", Sink(), inbox=raw, restart=NEVER)
    assert "actor 'count': parameter 'outbox' was given channel 'raw' of another graph" in problems(graph)


def test_links_must_name_actors() -> None:
    graph = pipeline(Sink())
    graph.link("count", "nobody", "credit")
    assert "link 'credit' names 'nobody', which is no actor; there are: collect, count, double" in problems(graph)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"replicas": 0}, "replicas = 0; it must be 1 or more"),
        ({"grace": -1.0}, "grace = -1.0 seconds; it must be 0 or more"),
        ({"start_timeout": 0.0}, "start_timeout = 0.0 seconds; it must be more than 0"),
    ],
)
def test_impossible_numbers_are_refused(options: dict[str, Any], problem: str) -> None:
    graph = Graph("test")
    graph.actor("idle", trio.sleep_forever, restart=NEVER, **options)
    assert f"actor 'idle': {problem}" in problems(graph)


@pytest.mark.parametrize("capacity", [-1, 1.5, float("inf")])
def test_a_channel_has_a_bound(capacity: Any) -> None:
    with pytest.raises(GraphError, match=f"channel 'raw' was given capacity {capacity}; it must be a whole number"):
        Graph("test").channel("raw", Number, capacity=capacity)


async def test_a_wrong_graph_does_not_start() -> None:
    ran = []

    async def work() -> None:
        ran.append(1)

    graph, [_] = graph_of(("unused", Number))
    graph.actor("work", work, restart=NEVER)
    with pytest.raises(GraphError, match="unused"):
        await graph.run()
    assert not ran


# Drawing -------------------------------------------------------------------------------------------------------


def test_draws_itself() -> None:
    graph, [raw, done] = graph_of(("raw", Number), ("done", Number))
    graph.actor("count", count, outbox=raw, upto=1, restart=NEVER)
    graph.actor("double", double, inbox=raw, outbox=done, restart=NEVER, replicas=2)
    with graph.domain("learning", strategy=Strategy.REST_FOR_ONE):
        graph.actor('the "sink"', Sink(), inbox=done, restart=NEVER)
    graph.link('the "sink"', "double", "weights")
    assert graph.mermaid() == (
        "flowchart LR\n"
        '    n0["count"]\n'
        '    n1["double × 2"]\n'
        '    subgraph n2["learning: rest_for_one"]\n'
        '        n3["the #quot;sink#quot;"]\n'
        "    end\n"
        '    n0 -->|"raw (1)"| n1\n'
        '    n1 -->|"done (1)"| n3\n'
        '    n3 -.->|"weights"| n1\n'
    )

"""Failure domains whose members begin again together: what becomes of their channels and of who had returned."""

import random
from collections.abc import Callable

import pytest
import trio
from msgspec import Struct
from trio.testing import MockClock

from trouper.actors.graph import Graph
from trouper.actors.supervisor import NEVER, ON_ERROR, Restart, Strategy
from trouper.channels import Receiver, Sender


class Item(Struct, frozen=True):
    life: int
    value: int


class Domain:
    """Actors that count their lives and record what each of them receives."""

    def __init__(self, upto: int = 5) -> None:
        self.upto = upto
        self.lives: dict[str, int] = {}
        self.got: dict[str, list[list[Item]]] = {}
        self.ended_at: dict[str, float] = {}

    def born(self, name: str) -> int:
        self.lives[name] = self.lives.get(name, 0) + 1
        self.got.setdefault(name, []).append([])
        return self.lives[name]

    async def source(self, outbox: Sender[Item]) -> None:
        life = self.born("source")
        for value in range(self.upto):
            await outbox.send(Item(life, value))

    async def relay(self, inbox: Receiver[Item], outbox: Sender[Item]) -> None:
        self.born("relay")
        async for item in inbox:
            self.got["relay"][-1].append(item)
            await outbox.send(item)

    def sink(self, name: str = "sink", *, fails: int = 0, at: int = -1, after: float = 0.0) -> "Sink":
        return Sink(self, name, fails, self.upto - 1 if at < 0 else at, after)

    def values(self, name: str) -> list[list[int]]:
        """What each life of an actor received; all of it must be of that same life of the source."""
        for life, items in enumerate(self.got[name], 1):
            assert {item.life for item in items} <= {life}
        return [[item.value for item in items] for items in self.got[name]]


class Sink:
    """Reads to the end; its first `fails` lives crash `after` seconds after they got the value `at`."""

    def __init__(self, domain: Domain, name: str, fails: int, at: int, after: float) -> None:
        self.domain, self.name, self.fails, self.at, self.after = domain, name, fails, at, after

    async def __call__(self, inbox: Receiver[Item]) -> None:
        life = self.domain.born(self.name)
        async for item in inbox:
            self.domain.got[self.name][-1].append(item)
            if life <= self.fails and item.value == self.at:
                await trio.sleep(self.after)
                raise ValueError(f"{self.name} broke")
        self.domain.ended_at[self.name] = trio.current_time()


async def sleep(seconds: float) -> None:
    await trio.sleep(seconds)


# Who had returned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE])
async def test_a_crash_at_the_last_item_plays_everything_again(autojump_clock: MockClock, strategy: Strategy) -> None:
    served: list[int] = []
    waits: list[bool] = []

    async def episodes(inbox: Receiver[Item], outbox: Sender[Item], requests: Sender[Item]) -> None:
        domain.born("episodes")
        async for item in inbox:
            await requests.send(item)
            await outbox.send(item)

    async def sampler(requests: Receiver[Item]) -> None:
        domain.born("sampler")
        async for item in requests:
            served.append(item.value)  # noqa: PERF401
        domain.ended_at["sampler"] = trio.current_time()

    class Trainer(Sink):
        async def __call__(self, inbox: Receiver[Item]) -> None:
            waits.append("sampler" not in domain.ended_at)
            await super().__call__(inbox)
            await trio.sleep(5.0)

    domain = Domain(upto=5)
    graph = Graph("training")
    tasks, done, requests = (graph.channel(name, Item, capacity=2) for name in ("tasks", "done", "requests"))
    graph.actor("sampler", sampler, requests=requests, restart=ON_ERROR)
    with graph.domain("learning", strategy=strategy):
        graph.actor("trainer", Trainer(domain, "trainer", 2, 4, 10.0), inbox=done, restart=ON_ERROR)
        graph.actor("episodes", episodes, inbox=tasks, outbox=done, requests=requests, restart=ON_ERROR)
        graph.actor("source", domain.source, outbox=tasks, restart=ON_ERROR)
    await graph.run()
    assert domain.lives == {"sampler": 1, "trainer": 3, "episodes": 3, "source": 3}
    assert domain.values("trainer") == [[0, 1, 2, 3, 4]] * 3
    assert served == [0, 1, 2, 3, 4] * 3
    assert waits == [True] * 3
    assert domain.ended_at["sampler"] == domain.ended_at["trainer"] + 5.0  # as soon as nobody could come back
    assert graph.restarts == 2
    assert [(s.name, s.sent, s.received, s.depth) for s in graph.statistics()] == [
        ("tasks", 15, 15, 0),
        ("done", 15, 15, 0),
        ("requests", 15, 15, 0),
    ]


async def test_who_may_not_restart_is_not_revived_and_its_channel_ends_at_once(autojump_clock: MockClock) -> None:
    domain = Domain(upto=3)
    graph = Graph("once")
    numbers = graph.channel("numbers", Item, capacity=5)
    with graph.domain("inner", strategy=Strategy.ONE_FOR_ALL):
        graph.actor("source", domain.source, outbox=numbers, restart=NEVER)
        graph.actor("sink", domain.sink(fails=1, at=1), inbox=numbers, restart=ON_ERROR)
    await graph.run()
    assert domain.values("sink") == [[0, 1], []]


@pytest.mark.parametrize("strategy", [Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE])
async def test_a_group_domain_that_is_restarted_as_a_whole_begins_again(
    autojump_clock: MockClock, strategy: Strategy
) -> None:
    domain = Domain()
    graph = Graph("outer")
    numbers = graph.channel("numbers", Item, capacity=5)
    with graph.domain("inner", strategy=strategy, max_restarts=0, restart=ON_ERROR):
        graph.actor("sink", domain.sink(fails=2, at=2, after=1.0), inbox=numbers, restart=ON_ERROR)
        graph.actor("source", domain.source, outbox=numbers, restart=NEVER)
    await graph.run()
    assert domain.values("sink") == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("inner", Strategy)
async def test_a_domain_inside_a_group_begins_again_with_all_its_members(
    autojump_clock: MockClock, inner: Strategy
) -> None:
    domain = Domain()
    graph = Graph("nested", strategy=Strategy.ONE_FOR_ALL)
    raw, done = (graph.channel(name, Item, capacity=5) for name in ("raw", "done"))
    with graph.domain("inner", strategy=inner, restart=ON_ERROR):
        graph.actor("source", domain.source, outbox=raw, restart=ON_ERROR)
        graph.actor("relay", domain.relay, inbox=raw, outbox=done, restart=ON_ERROR)
    graph.actor("sink", domain.sink(fails=1, after=1.0), inbox=done, restart=ON_ERROR)
    await graph.run()
    assert domain.lives == {"source": 2, "relay": 2, "sink": 2}
    assert domain.values("sink") == [[0, 1, 2, 3, 4]] * 2


# Channels ------------------------------------------------------------------------------------------------------


async def test_nothing_of_a_dead_life_reaches_the_next_one(autojump_clock: MockClock) -> None:
    domain = Domain(upto=50)
    graph = Graph("stale", strategy=Strategy.ONE_FOR_ALL)
    raw, done = (graph.channel(name, Item, capacity=8) for name in ("raw", "done"))
    graph.actor("sink", domain.sink(fails=2, at=3, after=1.0), inbox=done, restart=ON_ERROR)
    graph.actor("relay", domain.relay, inbox=raw, outbox=done, restart=ON_ERROR, replicas=2)
    graph.actor("source", domain.source, outbox=raw, restart=ON_ERROR)
    await graph.run()
    last = domain.got["sink"][-1]
    assert sorted(item.value for item in last) == list(range(50))
    assert {item.life for item in last} == {3}
    assert [max(item.value for item in items) for items in domain.got["sink"][:2]] == [3, 3]


@pytest.mark.parametrize(("restart", "ends_after"), [(ON_ERROR, 50.0), (NEVER, 0.0)])
async def test_what_leaves_a_domain_ends_when_nobody_is_left_who_could_restart_it(
    autojump_clock: MockClock, restart: Restart, ends_after: float
) -> None:
    domain = Domain()
    graph = Graph("leaving")
    out = graph.channel("out", Item, capacity=9)
    graph.actor("sink", domain.sink(), inbox=out, restart=ON_ERROR)
    with graph.domain("middle", strategy=Strategy.ONE_FOR_ONE):
        with graph.domain("inner", strategy=Strategy.ONE_FOR_ALL):
            graph.actor("source", domain.source, outbox=out, restart=ON_ERROR)
            graph.actor("other", sleep, seconds=50.0, restart=restart)
        graph.actor("aside", sleep, seconds=99.0, restart=ON_ERROR)  # cannot restart the domain beside it
    started = trio.current_time()
    await graph.run()
    assert domain.ended_at["sink"] - started == ends_after


async def test_a_domain_that_may_be_restarted_from_outside_keeps_its_claims(autojump_clock: MockClock) -> None:
    domain = Domain()

    async def other() -> None:
        await trio.sleep(10.0)
        if domain.born("other") == 1:
            raise ValueError("other broke")

    graph = Graph("claims")
    out = graph.channel("out", Item, capacity=9)
    graph.actor("sink", domain.sink(), inbox=out, restart=ON_ERROR)
    with graph.domain("outer", strategy=Strategy.ONE_FOR_ALL):
        with graph.domain("inner", strategy=Strategy.ONE_FOR_ONE, restart=ON_ERROR):
            graph.actor("source", domain.source, outbox=out, restart=ON_ERROR)
        graph.actor("other", other, restart=ON_ERROR)
    await graph.run()
    assert domain.lives == {"sink": 1, "source": 2, "other": 2}
    assert [item.value for item in domain.got["sink"][0]] == [0, 1, 2, 3, 4] * 2
    assert domain.ended_at["sink"] >= 20.0


async def test_what_enters_a_domain_stays_open_for_a_member_that_may_come_back(autojump_clock: MockClock) -> None:
    domain = Domain()

    async def reader(inbox: Receiver[Item], orders: Receiver[Item]) -> None:
        domain.born("reader")
        domain.got["reader"][-1].append(await inbox.receive())
        async for _ in orders:
            pass

    async def other() -> None:
        domain.born("other")
        await trio.sleep(10.0)
        if domain.lives["other"] <= 3:
            raise ValueError("other broke")

    graph = Graph("entering")
    numbers, orders = (graph.channel(name, Item, capacity=1) for name in ("numbers", "orders"))
    graph.actor("outside", domain.source, outbox=numbers, restart=NEVER)
    with graph.domain("inner", strategy=Strategy.ONE_FOR_ALL, max_restarts=9):
        graph.actor("reader", reader, inbox=numbers, orders=orders, restart=ON_ERROR)
        graph.actor("order", Domain(upto=1).source, outbox=orders, restart=ON_ERROR)
        graph.actor("other", other, restart=ON_ERROR)
    await graph.run()
    # The reader has returned each time before the other one crashes, and the sender outside has waited.
    assert domain.lives == {"source": 1, "reader": 4, "other": 4}
    assert [item.value for items in domain.got["reader"] for item in items] == [0, 1, 2, 3]


async def test_inside_a_domain_the_data_ends_when_no_restart_could_bring_back_its_producers(
    autojump_clock: MockClock,
) -> None:
    """The source is revived with the relay between it and the sink, which keeps the sink's channel as it is."""
    domain = Domain()
    lives = 0

    async def relay(inbox: Receiver[Item], outbox: Sender[Item]) -> None:
        nonlocal lives
        lives += 1
        async for _ in inbox:
            pass
        await trio.sleep(1.0)
        if lives == 1:
            raise ValueError("relay broke")

    async def source(outbox: Sender[Item], direct: Sender[Item]) -> None:
        await domain.source(outbox)
        await direct.send(Item(1, 7))

    graph = Graph("backwards", strategy=Strategy.REST_FOR_ONE)
    raw, done = (graph.channel(name, Item, capacity=9) for name in ("raw", "done"))
    graph.actor("sink", domain.sink(), inbox=done, restart=ON_ERROR)
    graph.actor("relay", relay, inbox=raw, outbox=done, restart=ON_ERROR)
    graph.actor("source", source, outbox=raw, direct=done, restart=ON_ERROR)
    await graph.run()
    assert domain.lives == {"sink": 1, "source": 2}
    assert domain.values("sink") == [[7, 7]]


@pytest.mark.parametrize("restart", [NEVER, ON_ERROR])
async def test_a_significant_domain_that_ends_fails_nobody_who_still_sends_to_it(
    autojump_clock: MockClock, restart: Restart
) -> None:
    async def head(inbox: Receiver[Item]) -> None:
        await inbox.receive()

    domain = Domain(upto=10**9)
    graph = Graph("head")
    numbers = graph.channel("numbers", Item, capacity=1)
    graph.actor("source", domain.source, outbox=numbers, restart=restart)
    with graph.domain("inner", strategy=Strategy.ONE_FOR_ALL, significant=True):
        graph.actor("head", head, inbox=numbers, restart=ON_ERROR, significant=True)
    await graph.run()


async def test_a_stop_while_a_domain_restarts_ends_the_graph(autojump_clock: MockClock) -> None:
    domain = Domain()
    graph = Graph("stopped")
    numbers, out = (graph.channel(name, Item, capacity=9) for name in ("numbers", "out"))
    graph.actor("outside", domain.sink("outside"), inbox=out, restart=ON_ERROR)
    with graph.domain("inner", strategy=Strategy.ONE_FOR_ALL):
        graph.actor("sink", domain.sink(fails=1), inbox=numbers, restart=ON_ERROR)
        graph.actor("source", domain.source, outbox=numbers, restart=ON_ERROR)
        graph.actor("other", Domain().source, outbox=out, restart=ON_ERROR)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(graph.run)
        await trio.testing.wait_all_tasks_blocked()
        assert graph.restarts == 1  # and all of the domain are dead, in backoff
        graph.stop()
    assert domain.lives == {"outside": 1, "sink": 1, "source": 1}
    assert "outside" not in domain.ended_at  # what it reads was still claimed


# Under any schedule --------------------------------------------------------------------------------------------


def test_every_life_of_a_domain_sees_only_its_own_messages(run_seeded: Callable[..., object]) -> None:
    for seed in range(200):
        run_seeded(seed, _crashing_domain, seed)


async def _crashing_domain(seed: int) -> None:
    """source -> relay (-> server outside) -> sink, and the source straight to the sink; each may crash at any item."""
    rng = random.Random(seed)
    crashes = rng.randint(1, 6)
    upto = rng.randint(1, 8)
    life = 0
    alive: set[object] = set()
    received: list[int] = []
    served: list[Item] = []

    async def work() -> None:
        nonlocal crashes
        await trio.sleep(rng.choice([0.0, 0.0, 1.0]))
        if crashes and rng.random() < 0.15:
            crashes -= 1
            raise ValueError("crashed")

    async def sink(inbox: Receiver[Item]) -> None:  # the first to start, with nobody of the last life alive
        nonlocal life
        life += 1
        assert not alive
        received.clear()
        with Present(alive):
            async for item in inbox:
                assert item.life == life
                await work()
                received.append(item.value)
            await work()

    async def relay(inbox: Receiver[Item], outbox: Sender[Item], requests: Sender[Item]) -> None:
        with Present(alive):
            async for item in inbox:
                assert item.life == life
                await work()
                await requests.send(item)
                await outbox.send(item)
            await work()

    async def source(outbox: Sender[Item], direct: Sender[Item]) -> None:
        with Present(alive):
            mine = life
            for value in range(upto):
                await work()
                await (direct if value % 3 == 2 else outbox).send(Item(mine, value))

    async def server(requests: Receiver[Item]) -> None:
        async for item in requests:
            await trio.sleep(rng.choice([0.0, 1.0]))
            served.append(item)

    graph = Graph("fuzz", seed=seed)
    raw, done, requests = (graph.channel(n, Item, capacity=rng.choice([0, 1, 5])) for n in ("raw", "done", "requests"))
    graph.actor("server", server, requests=requests, restart=ON_ERROR)
    nested = rng.random() < 0.5
    with graph.domain("learning", strategy=Strategy.ONE_FOR_ALL, max_restarts=99):
        graph.actor("sink", sink, inbox=done, restart=ON_ERROR)
        if nested:  # its own restarts are none, so that each failure inside is one of the whole
            with graph.domain("inner", strategy=rng.choice(list(Strategy)), max_restarts=0, restart=ON_ERROR):
                graph.actor("relay", relay, inbox=raw, outbox=done, requests=requests, restart=ON_ERROR, replicas=2)
        else:
            graph.actor("relay", relay, inbox=raw, outbox=done, requests=requests, restart=ON_ERROR, replicas=2)
        graph.actor("source", source, outbox=raw, direct=done, restart=ON_ERROR)
    tasks = trio.lowlevel.current_statistics().tasks_living
    await graph.run()
    assert sorted(received) == list(range(upto))
    assert sorted(item.value for item in served if item.life == life) == [v for v in range(upto) if v % 3 != 2]
    assert life == 1 + graph.restarts
    assert not alive
    for channel in graph.statistics():
        assert (channel.depth, channel.senders_waiting, channel.receivers_waiting) == (0, 0, 0)
    assert trio.lowlevel.current_statistics().tasks_living == tasks


class Present:
    """An actor that is alive."""

    def __init__(self, alive: set[object]) -> None:
        self.alive = alive

    def __enter__(self) -> None:
        self.alive.add(self)

    def __exit__(self, *_: object) -> None:
        self.alive.discard(self)


def test_a_rest_for_one_domain_always_ends_and_loses_nothing(run_seeded: Callable[..., object]) -> None:
    for seed in range(200):
        run_seeded(seed, _crashing_rest, seed)


async def _crashing_rest(seed: int) -> None:
    rng = random.Random(seed)
    crashes = rng.randint(1, 6)
    received: list[int] = []

    async def work() -> None:
        nonlocal crashes
        await trio.sleep(rng.choice([0.0, 0.0, 1.0]))
        if crashes and rng.random() < 0.2:
            crashes -= 1
            raise ValueError("crashed")

    async def sink(inbox: Receiver[Item]) -> None:
        received.clear()
        async for item in inbox:
            received.append(item.value)
            await work()

    async def relay(inbox: Receiver[Item], outbox: Sender[Item]) -> None:
        async for item in inbox:
            await outbox.send(item)
            await work()
        await work()

    async def source(outbox: Sender[Item], direct: Sender[Item]) -> None:
        for value in range(6):
            await (direct if value % 3 == 2 else outbox).send(Item(0, value))
            await work()

    graph = Graph("rest", seed=seed, strategy=Strategy.REST_FOR_ONE, max_restarts=99)
    raw, done = (graph.channel(name, Item, capacity=rng.choice([0, 1, 5])) for name in ("raw", "done"))
    graph.actor("sink", sink, inbox=done, restart=ON_ERROR)
    graph.actor("relay", relay, inbox=raw, outbox=done, restart=ON_ERROR)
    graph.actor("source", source, outbox=raw, direct=done, restart=ON_ERROR)
    await graph.run()
    assert set(received) == set(range(6))

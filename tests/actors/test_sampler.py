"""The sampler over a simulated engine: answers, weights between two chunks, and what a death costs."""

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import trio

from trouper.actors.account import DeviceTime
from trouper.actors.generator import Generator
from trouper.actors.sampler import MAX_DELIVERIES, Generate, Sampler
from trouper.actors.simulation import SimulatedAccelerator, SimulatedEngine, checksum_of
from trouper.channels import Channel, Reply, SamplerError, Sampling, Turn, Weights
from trouper.learner.engine import Finished, Request

CONTEXT = np.array([1, 2, 3], np.int32)


def weights(step: int) -> Weights:
    return Weights(life=1, step=step, params=step, checksum=checksum_of(step))


class Bench:
    """A sampler, the channel to it, and every engine it made."""

    def __init__(self, engine: Callable[..., Any] = SimulatedEngine, *, slots: int = 4, **options: Any) -> None:
        self.engines: list[Any] = []

        def make(held: Weights) -> Any:
            self.engines.append(engine(held, slots=slots, chunk=2))
            return self.engines[-1]

        self.sampler = Sampler(make, weights(0), SimulatedAccelerator("sampler"), **{"max_waiting": 4, **options})
        self.requests = Channel[Generate]("requests", Generate, 2)

    async def ask(
        self,
        tokens: int,
        seed: int = 0,
        scope: trio.CancelScope | None = None,
        stop: tuple[int, ...] = (),
        context: Any = CONTEXT,
    ) -> Turn:
        """A turn of so many tokens, a chunk of two every 0.1 s."""
        with self.requests.sender() as sender:
            generator = Generator(self.sampler, sender, seed, scope or trio.CancelScope())
            try:
                return await generator(context, max_tokens=tokens, stop=stop, sampling=Sampling())
            finally:
                generator.close()

    async def live(self, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Life after life, as under a supervisor."""
        while not self.sampler.ended:
            try:
                with self.requests.receiver() as receiver:
                    await self.sampler.run(receiver, task_status=task_status)
                    assert self.sampler.ended
            except* RuntimeError:
                task_status = trio.TASK_STATUS_IGNORED
                await trio.sleep(1.0)

    async def __call__(self, *scenes: Callable[[], Awaitable[Any]]) -> None:
        """Play scenes side by side; when they are over, the sampler has to end by itself."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.live)
            async with trio.open_nursery() as askers:
                for scene in scenes:
                    askers.start_soon(scene)
            self.requests.finish()
        assert self.sampler.ended
        assert self.engines[-1].live == 0
        assert not self.sampler._waiting
        assert not self.sampler._running


async def at(time: float, function: Callable[..., Any], *args: Any) -> Any:
    await trio.sleep_until(time)
    return await function(*args)


def expected(seed: int, count: int, start: int = len(CONTEXT)) -> list[int]:
    engine = SimulatedEngine(weights(0))
    return [engine.token(seed, start + index) for index in range(count)]


async def test_answers_are_the_engines_and_have_a_digest(autojump_clock) -> None:
    bench = Bench()
    turns: list[Turn] = []

    async def scene() -> None:
        turns.append(await bench.ask(5, seed=1))
        turns.append(await bench.ask(40, seed=2, stop=(expected(2, 40)[3],)))

    await bench(scene)
    first, second = turns
    assert (first.tokens.tolist(), first.finish) == (expected(1, 5), "length")
    assert second.finish == "stop"
    assert second.tokens[-1] == expected(2, 40)[3]
    assert bench.sampler.sampled_tokens == sum(len(turn.tokens) for turn in turns)


async def test_a_turn_tried_again_is_drawn_anew_and_a_conversation_that_goes_on_keeps_its_seed(autojump_clock) -> None:
    bench = Bench()
    lives: list[list[list[int]]] = []

    async def scene() -> None:
        with bench.requests.sender() as sender:
            generator = Generator(bench.sampler, sender, 7, trio.CancelScope())
            contexts = [CONTEXT, np.arange(8, dtype=np.int32), CONTEXT, CONTEXT, np.arange(8, dtype=np.int32)]
            turns = [await generator(c, max_tokens=5, stop=(), sampling=Sampling()) for c in contexts]
            generator.close()
        lives.append([turn.tokens.tolist() for turn in turns])

    await bench(scene, scene)
    assert lives[0] == lives[1]  # a replayed attempt gives the same tokens
    first, second, again, once_more, _ = lives[0]
    engine = SimulatedEngine(weights(0))
    assert first + second == [engine.token(7, position) for position in range(3, 13)]
    assert len({tuple(turn) for turn in (first, again, once_more)}) == 3


async def test_more_requests_than_anything_holds_are_all_answered(autojump_clock) -> None:
    bench, answered = Bench(slots=2, max_waiting=1), []

    def scene(seed: int) -> Callable[[], Awaitable[None]]:
        async def ask() -> None:
            turn = await bench.ask(3, seed)
            answered.append(turn.tokens.tolist() == expected(seed, 3))

        return ask

    await bench(*map(scene, range(40)))
    assert answered == [True] * 40


class Filling(SimulatedEngine):
    """A context is prefilled in calls of this many tokens; writes down the calls."""

    BOUND = 2

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[str] = []
        self._missing: dict[int, int] = {}

    @property
    def needs_prefill(self) -> bool:
        return super().needs_prefill or bool(self._missing)

    @property
    def can_decode(self) -> bool:
        return len(self._sampled) > len(self._missing)

    def prefill(self) -> None:
        self.calls.append("prefill")
        for id in self._requests.keys() - self._sampled.keys():
            self._missing[id] = len(self._requests[id].tokens)
        super().prefill()
        left = {id: missing - self.BOUND for id, missing in self._missing.items()}
        self._missing = {id: missing for id, missing in left.items() if missing > 0}

    def decode(self) -> list[Finished]:
        self.calls.append("decode")
        held = {id: self._sampled.pop(id) for id in self._missing}
        finished = super().decode()
        self._sampled |= held
        return finished


async def test_a_long_context_is_prefilled_between_the_chunks_of_the_others(autojump_clock) -> None:
    said: list[str] = []
    time = DeviceTime(lambda flows, annotations: said.append(time.activity))
    bench, turns = Bench(Filling, time=time), {}

    async def ask(seed: int, tokens: int) -> None:
        turns[seed] = (await bench.ask(tokens, seed, context=np.arange(8 * seed + 2, dtype=np.int32))).tokens.tolist()

    await bench(lambda: ask(0, 12), lambda: at(0.05, ask, 1, 4))
    calls = bench.engines[0].calls
    assert calls == ["prefill", "decode", *["prefill", "decode"] * 5, "decode"], "no prefill where nothing waits for it"
    assert [what for what in said if what in ("prefill", "decode")] == calls
    assert turns == {0: expected(0, 12, start=2), 1: expected(1, 4, start=10)}


async def test_a_context_that_nobody_waits_beside_is_prefilled_without_chunks(autojump_clock) -> None:
    bench = Bench(Filling)
    await bench(lambda: bench.ask(2, context=np.arange(6, dtype=np.int32)))
    assert bench.engines[0].calls == ["prefill", "prefill", "prefill", "decode"]


async def test_new_weights_come_between_two_prefill_calls(autojump_clock) -> None:
    bench = Bench(Filling)
    bench.sampler._accelerator = SimulatedAccelerator("sampler", lambda call: 1.0 if call == "prefill" else 0.1)

    async def ask() -> None:
        turn = await bench.ask(2, context=np.arange(6, dtype=np.int32))
        assert turn.versions.tolist() == [1, 1]

    async def update() -> None:
        await at(1.5, bench.sampler.update, weights(1))
        assert trio.current_time() < 2.5

    await bench(ask, update)


# New weights ---------------------------------------------------------------------------------------------------


async def test_in_flight_weights_come_between_two_chunks_and_stamp_what_follows(autojump_clock) -> None:
    bench = Bench(mode="in_flight")

    async def ask() -> None:
        turn = await bench.ask(8)
        assert turn.versions.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
        assert turn.kv_version == 0

    async def update() -> None:
        assert await at(0.15, bench.sampler.update, weights(1)) == checksum_of(1)

    await bench(ask, update)
    assert bench.sampler.weights.step == 1


@pytest.mark.parametrize(("kv", "oldest"), [("keep", 0), ("recompute", 1)])
async def test_a_conversation_goes_on_with_kept_keys_or_with_new_ones(autojump_clock, kv, oldest) -> None:
    bench = Bench(kv=kv)

    async def scene() -> None:
        with bench.requests.sender() as sender:
            generator = Generator(bench.sampler, sender, 0, trio.CancelScope())
            first = await generator(CONTEXT, max_tokens=4, stop=(), sampling=Sampling())
            await bench.sampler.update(weights(1))
            context = np.concatenate([CONTEXT, first.tokens])
            second = await generator(context, max_tokens=4, stop=(), sampling=Sampling())
            generator.close()
        assert (second.versions.tolist(), second.kv_version) == ([1] * 4, oldest)

    await bench(scene)


async def test_drain_lets_running_generations_end_and_new_ones_wait(autojump_clock) -> None:
    bench = Bench(mode="drain")
    ended = []

    async def running() -> None:
        turn = await bench.ask(8)
        assert turn.versions.tolist() == [0] * 8
        ended.append(trio.current_time())

    async def update() -> None:
        await at(0.15, bench.sampler.update, weights(1))
        assert ended

    async def late() -> None:
        turn = await at(0.2, bench.ask, 2)
        assert turn.versions.tolist() == [1, 1]

    await bench(running, update, late)


class Watched(SimulatedEngine):
    """Writes down what is asked of it: (context, max_tokens), or the id that is aborted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.log: list[Any] = []

    def submit(self, request: Request) -> None:
        self.log.append((len(request.tokens), request.max_tokens))
        super().submit(request)

    def abort(self, id: int) -> Turn | None:
        self.log.append("abort")
        return super().abort(id)


@pytest.mark.parametrize(("options", "before"), [({"mode": "abort"}, 4), ({"mode": "drain", "drain_timeout": 0.3}, 10)])
async def test_aborted_generations_go_on_under_the_new_weights(autojump_clock, options, before) -> None:
    bench = Bench(Watched, **options)

    async def ask() -> None:
        turn = await bench.ask(20, seed=5)
        assert turn.tokens.tolist() == expected(5, 20)
        assert turn.versions.tolist() == [0] * before + [1] * (20 - before)
        assert (len(turn.logprobs), turn.kv_version, turn.finish) == (20, 0, "length")

    await bench(ask, lambda: at(0.15, bench.sampler.update, weights(1)))
    assert bench.engines[0].log == [(3, 20), "abort", (3 + before, 20 - before)]
    assert bench.sampler.sampled_tokens == 20


async def test_what_had_sampled_nothing_yet_is_asked_again_as_it_was(autojump_clock) -> None:
    bench = Bench(Watched, slots=1, mode="abort")

    async def queued() -> None:
        turn = await at(0.05, bench.ask, 4)
        assert (turn.versions.tolist(), turn.kv_version) == ([1] * 4, 1)

    await bench(lambda: bench.ask(8), queued, lambda: at(0.15, bench.sampler.update, weights(1)))
    assert bench.engines[0].log == [(3, 8), (3, 4), "abort", "abort", (7, 4), (3, 4)]


async def test_a_generation_aborted_by_every_update_is_whole_in_the_end(autojump_clock) -> None:
    bench = Bench(mode="abort")

    async def ask() -> None:
        turn = await bench.ask(30, seed=5, stop=(expected(5, 30)[28],))
        assert turn.tokens.tolist() == expected(5, 30)[: len(turn.tokens)]
        assert turn.finish == "stop"
        assert set(turn.versions.tolist()) == set(range(len(set(turn.versions.tolist()))))
        assert len(set(turn.versions.tolist())) > 2

    async def updates() -> None:
        for step in range(1, 8):
            await at(0.15 * step, bench.sampler.update, weights(step))

    await bench(ask, updates)


@pytest.mark.parametrize(("limit", "stop", "length"), [(9, (), 9), (40, (expected(5, 8)[7],), 8)])
async def test_an_abort_that_leaves_nothing_to_ask_is_an_answer(autojump_clock, limit, stop, length) -> None:
    """As of a server that had just finished when it was told to abort."""

    class Late(Watched):
        def abort(self, id: int) -> Turn | None:
            while True:
                for finished in super().decode():
                    return finished.turn

    bench = Bench(Late, mode="abort")

    async def ask() -> None:
        turn = await bench.ask(limit, seed=5, stop=stop)
        assert turn.tokens.tolist() == expected(5, length)
        assert turn.finish == ("stop" if stop else "length")

    await bench(ask, lambda: at(0.15, bench.sampler.update, weights(1)))
    assert bench.engines[0].version == (1, 1)
    assert bench.engines[0].log == [(3, limit)]


async def test_weights_reach_an_idle_sampler(autojump_clock) -> None:
    bench = Bench(mode="drain")
    await bench(lambda: at(5.0, bench.sampler.update, weights(1)))
    assert trio.current_time() < 6
    assert bench.engines[0].version == (1, 1)


# Askers that go ------------------------------------------------------------------------------------------------


async def test_a_cancelled_asker_takes_its_request_back_wherever_it_is(autojump_clock) -> None:
    bench, left = Bench(slots=1, max_waiting=1), []

    async def gone() -> None:
        with trio.move_on_after(0.25):
            await bench.ask(1000)
        left.append(trio.current_time())

    async def stays() -> None:
        await at(0.3, bench.ask, 2)

    await bench(*[gone] * 8, stays)  # one runs, others wait in the engine, in the sampler, in the channel, in `send`
    assert left == [0.25] * 8
    assert trio.current_time() < 1


async def test_a_refused_request_fails_its_asker_alone(autojump_clock) -> None:
    bench = Bench()
    scope = trio.CancelScope()

    async def refused() -> None:
        with scope:
            await bench.ask(5000, scope=scope)
            raise AssertionError("agent code went on")

    async def other() -> None:
        assert len((await bench.ask(4)).tokens) == 4

    await bench(refused, other)
    assert scope.cancelled_caught


async def test_a_refusal_reaches_an_asker_that_shields_itself(autojump_clock) -> None:
    bench = Bench()

    async def shielded() -> None:
        with trio.CancelScope(shield=True), pytest.raises(SamplerError, match="beyond the engine's length"):
            await bench.ask(5000)

    await bench(shielded)


# Deaths --------------------------------------------------------------------------------------------------------


def mortal(deaths: list[float]) -> type[SimulatedEngine]:
    """Dies in the first chunk at or after each of these times."""

    class Mortal(SimulatedEngine):
        def decode(self) -> Any:
            if deaths and trio.current_time() >= deaths[0]:
                deaths.pop(0)
                raise RuntimeError("device lost")
            return super().decode()

    return Mortal


async def test_after_a_death_the_same_requests_are_asked_again(autojump_clock) -> None:
    bench, answers = Bench(mortal([0.15]), slots=1), {}

    def scene(seed: int) -> Callable[[], Awaitable[None]]:
        async def ask() -> None:
            answers[seed] = (await bench.ask(6, seed)).tokens.tolist()

        return ask

    await bench(*map(scene, range(3)))
    assert answers == {seed: expected(seed, 6) for seed in range(3)}
    assert len(bench.engines) == 2


async def test_a_request_in_flight_at_two_deaths_is_failed_and_the_others_live(autojump_clock) -> None:
    deaths = [0.15, 1.0]
    assert len(deaths) == MAX_DELIVERIES
    bench = Bench(mortal(deaths))

    async def poison() -> None:
        with (
            trio.CancelScope(shield=True),
            pytest.raises(SamplerError, match=r"in flight at 2 deaths of the sampler .* was RuntimeError: device lost"),
        ):
            await bench.ask(40)

    async def later() -> None:
        assert (await at(1.5, bench.ask, 6)).tokens.tolist() == expected(0, 6)

    await bench(poison, later)
    assert len(bench.engines) == 3


async def test_what_was_cancelled_while_the_sampler_was_dead_is_not_asked_again(autojump_clock) -> None:
    bench = Bench(mortal([0.15]))
    submitted = []

    class Watched(mortal([])):
        def submit(self, request: Request) -> None:
            submitted.append(request.id)
            super().submit(request)

    async def gone() -> None:
        with trio.move_on_after(0.5):  # between its two lives
            await bench.ask(40)
        bench.sampler._make_engine = lambda held: bench.engines.append(Watched(held)) or bench.engines[-1]

    await bench(gone)
    assert submitted == []


async def test_weights_that_came_while_the_sampler_was_dead_are_taken_by_its_next_life(autojump_clock) -> None:
    bench = Bench(mortal([0.15]))

    async def update() -> None:
        assert await at(0.5, bench.sampler.update, weights(1)) == checksum_of(1)

    await bench(lambda: bench.ask(4), update)
    assert bench.engines[1].version == (1, 1)


async def test_an_answered_request_in_the_channel_is_left_alone(autojump_clock) -> None:
    bench = Bench()

    async def scene() -> None:
        reply: Reply[Turn] = Reply()
        reply.fail(SamplerError("gone"))
        with bench.requests.sender() as sender:
            await sender.send(Generate(Request(99, 1, CONTEXT, 5000), reply))

    await bench(scene)
    assert bench.sampler.sampled_tokens == 0


@pytest.mark.parametrize("mode", ["in_flight", "drain", "abort"])
@pytest.mark.parametrize("seed", range(20))
def test_no_request_is_lost_under_any_schedule(run_seeded, mode, seed) -> None:
    random = Random(seed)
    deaths = sorted(random.uniform(0, 30) for _ in range(random.randint(0, 3)))
    ends: list[str] = []

    async def scenario() -> None:
        options = {"drain_timeout": random.choice((0.0, 0.2, 60.0)), "max_waiting": random.randint(1, 4)}
        bench = Bench(mortal(deaths), slots=random.randint(1, 4), mode=mode, **options)

        async def asker() -> None:
            for _ in range(8):
                tokens, seed = random.randint(1, 12), random.randint(0, 99)
                with trio.move_on_after(random.choice((0.2, 1.0, 1e5))) as scope:
                    with trio.CancelScope(shield=random.random() < 0.5):
                        try:
                            turn = await bench.ask(tokens, seed)
                            assert turn.tokens.tolist() == expected(seed, tokens)
                            assert (np.diff(turn.versions) >= 0).all()
                            ends.append("answered")
                        except SamplerError:
                            ends.append("failed")
                if scope.cancelled_caught:
                    ends.append("gone")
                await trio.sleep(random.uniform(0, 1))

        async def update() -> None:
            for step in range(1, 10):
                with trio.move_on_after(random.choice((0.05, 100.0))):
                    assert await bench.sampler.update(weights(step)) == checksum_of(step)
                await trio.sleep(random.uniform(0, 2))

        await bench(*[asker] * 6, update)

    run_seeded(seed, scenario)
    assert len(ends) == 48
    assert ends.count("answered") > 20

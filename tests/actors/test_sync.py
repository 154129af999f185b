"""New weights, all the way: a barrier, a sampler under a supervisor, and what askers get, whatever goes wrong."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import jax
import numpy as np
import pytest
import trio
from flax import nnx

from trouper.actors.backoff import Backoff
from trouper.actors.barrier import Attested, Barrier
from trouper.actors.child import NEVER, ON_ERROR
from trouper.actors.generator import Generator
from trouper.actors.sampler import Generate, Sampler
from trouper.actors.simulation import SimulatedAccelerator, SimulatedEngine, checksum_of, default_seconds
from trouper.actors.supervisor import Child, Supervisor
from trouper.channels import Channel, SamplerError, Sampling, SyncError, Turn, Weights
from trouper.learner.decoder import Decoder
from trouper.learner.engine import Engine, Request
from trouper.learner.model_config import ModelConfig

MODES = ("in_flight", "drain", "abort")
KV = ("keep", "recompute")
TIMEOUT = 10.0
CONTEXT = np.array([1, 2, 3], np.int32)
FREE, GREEDY = Sampling(), Sampling(temperature=0.0)


def weights(step: int, life: int = 1) -> Weights:
    return Weights(life=life, step=step, params=(life, step), checksum=checksum_of((life, step)))


class System:
    """A sampler and a barrier under a supervisor; the test publishes and asks."""

    def __init__(self, make: Callable[[Weights], Any], first: Weights, seconds: Any = default_seconds, **options: Any):
        self.engines: list[Any] = []
        self.make = make
        accelerator = SimulatedAccelerator("sampler", seconds)
        self.sampler = Sampler(self._make, first, accelerator, **{"max_waiting": 4, **options})
        self.attested: list[tuple[tuple[int, int], float]] = []
        known = Attested(first.life, first.step)
        self.barrier = Barrier([self.sampler], self._attest, first=known, timeout=TIMEOUT)
        self.requests = Channel[Generate]("requests", Generate, 2)
        self.weights = Channel[Weights]("weights", Weights, 1)
        self.publish = self.weights.sender()
        self.lives = self.alive = 0

    def _make(self, held: Weights) -> Any:
        self.engines.append(self.make(held))
        return self.engines[-1]

    def _attest(self, held: Weights) -> None:
        assert self.sampler.ended or self.engines[-1].version == held.version
        self.attested.append((held.version, trio.current_time()))

    async def _serve(self, stop: trio.Event, *, task_status: Any) -> None:
        self.lives, self.alive = self.lives + 1, self.alive + 1
        try:
            assert self.alive == 1, "two lives at once"
            with self.requests.receiver() as inbox:
                await self.sampler.run(inbox, task_status=task_status)
        finally:
            self.alive -= 1

    async def _bring(self, stop: trio.Event, *, task_status: Any) -> None:
        task_status.started()
        with self.weights.receiver() as inbox:
            await self.barrier.run(inbox)

    async def ask(self, tokens: int, seed: int = 0, context: Any = CONTEXT, sampling: Sampling = FREE) -> Turn:
        with self.requests.sender() as sender:
            generator = Generator(self.sampler, sender, seed, trio.CancelScope())
            try:
                return await generator(context, max_tokens=tokens, stop=(), sampling=sampling)
            finally:
                generator.close()

    async def __call__(self, *scenes: Callable[[], Awaitable[Any]]) -> None:
        """Play scenes side by side; when they are over, everything has to end by itself."""
        children = [Child("sampler", self._serve, ON_ERROR), Child("barrier", self._bring, NEVER)]
        supervisor = Supervisor("run", children, max_restarts=100, backoff=partial(Backoff, longest=1.0))
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            async with trio.open_nursery() as players:
                for scene in scenes:
                    players.start_soon(scene)
            self.requests.finish()
            self.publish.close()
            self.weights.finish()
        assert self.sampler.ended
        assert not self.sampler._waiting
        assert not self.sampler._running


def leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return error


async def at(time: float, function: Callable[..., Any], *args: Any) -> Any:
    await trio.sleep_until(time)
    return await function(*args)


def expected(seed: int, count: int) -> list[int]:
    engine = SimulatedEngine(weights(0))
    return [engine.token(seed, len(CONTEXT) + index) for index in range(count)]


# A real model, two sets of weights that differ clearly ----------------------------------------------------------


CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    tie_word_embeddings=True,
)
PROMPT = np.arange(20, dtype=np.int32)
DECODER = Decoder(CONFIG, rngs=nnx.Rngs(0))


def scaled(seed: int) -> Any:
    state = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(seed)))[1]
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, state)


PARAMS = [scaled(0), scaled(1)]


def real_engine(held: Weights) -> Engine:
    engine = Engine(
        DECODER, slots=4, length=48, chunk=2, version=(-1, 0), prefill_rows=4, prefill_tokens=8, kv_buckets=()
    )
    engine.swap(held.params, held.version, "recompute")
    return engine


def real(which: int, life: int, step: int) -> Weights:
    probe = real_engine(Weights(life=life, step=step, params=PARAMS[which], checksum=0))
    return Weights(life=life, step=step, params=PARAMS[which], checksum=probe.checksum())


def fresh(held: Weights, context: Any, tokens: int, seed: int, sampling: Sampling) -> Turn:
    engine = real_engine(held)
    engine.submit(Request(0, 0, context, tokens, sampling=sampling, seed=seed))
    while True:
        engine.prefill()
        for finished in engine.decode():
            return finished.turn


def same(turn: Turn, other: Turn) -> None:
    assert turn.tokens.tolist() == other.tokens.tolist()
    np.testing.assert_allclose(turn.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("old", "new"), [((0, 0), (0, 1)), ((1, 5), (2, 3))], ids=["next step", "new life"])
async def test_after_new_weights_everything_is_theirs(autojump_clock, old, new, mode, kv) -> None:
    first, second = real(0, *old), real(1, *new)
    system = System(real_engine, first, mode=mode, kv=kv)

    async def in_flight() -> None:
        turn = await system.ask(4, 0, PROMPT, GREEDY)
        step = 4 if mode == "drain" else 2
        assert turn.versions.tolist() == [old[1]] * step + [new[1]] * (4 - step)
        assert turn.kv_version == old[1]
        assert turn.tokens[:step].tolist() == fresh(first, PROMPT, 4, 0, GREEDY).tokens[:step].tolist()
        if step < 4 and (kv == "recompute" or old[0] != new[0]):
            context = np.concatenate([PROMPT, turn.tokens[:2]])
            assert turn.tokens[2:].tolist() == fresh(second, context, 2, 0, GREEDY).tokens.tolist()

    async def before_and_after() -> None:
        for sampling in (GREEDY, FREE):
            same(await system.ask(4, 7, PROMPT, sampling), fresh(first, PROMPT, 4, 7, sampling))
        await trio.sleep_until(10.05)
        await system.publish.send(second)
        for sampling in (GREEDY, FREE):
            turn = await at(10.1, system.ask, 4, 7, PROMPT, sampling)
            same(turn, fresh(second, PROMPT, 4, 7, sampling))
            assert turn.versions.tolist() == [new[1]] * 4
            assert turn.kv_version == new[1]

    await system(lambda: at(10.0, in_flight), before_and_after)
    assert [version for version, _ in system.attested] == [new]
    assert system.lives == 1


@pytest.mark.parametrize("mode", MODES)
async def test_the_first_weights_are_attested_and_cost_no_keys(autojump_clock, mode) -> None:
    first = real(0, 1, 0)
    system = System(real_engine, first, mode=mode, kv="recompute")

    async def scene() -> None:
        with system.requests.sender() as sender:
            generator = Generator(system.sampler, sender, 3, trio.CancelScope())
            ask = partial(generator, max_tokens=4, stop=(), sampling=GREEDY)
            turn = await ask(PROMPT)
            await system.publish.send(first)
            await trio.sleep(1.0)
            before = system.engines[0].statistics.prefill_tokens
            await ask(np.concatenate([PROMPT, turn.tokens, PROMPT[:1]]))
            assert system.engines[0].statistics.prefill_tokens - before == 1
            generator.close()

    await system(scene)
    assert [version for version, _ in system.attested] == [(1, 0)]


# What goes wrong ------------------------------------------------------------------------------------------------


class Faulty(SimulatedEngine):
    """An engine whose next updates go as a script says; parameters that came out wrong give a wrong checksum."""

    script: list[str]
    deaths: list[float]

    def __init__(self, held: Weights, builds: list[str], script: list[str], deaths: list[float]) -> None:
        super().__init__(held, slots=4, chunk=2)
        self.script, self.deaths = script, deaths
        self.wrong = bool(builds) and builds.pop(0) == "wrong"
        self.swaps = 0

    def swap(self, params: Any, version: tuple[int, int], kv: Any) -> None:
        self.swaps += 1
        action = self.script.pop(0) if self.script else ""
        if action == "raises":
            self.wrong = True  # it may have got anywhere
            raise MemoryError("no room for two copies")
        super().swap(params, version, kv)
        self.wrong = action == "wrong"

    def checksum(self) -> int:
        return super().checksum() ^ self.wrong

    def decode(self) -> Any:
        assert not self.wrong, "sampled from weights that nobody has attested"
        if self.deaths and trio.current_time() >= self.deaths[0]:
            self.deaths.pop(0)
            raise RuntimeError("device lost")
        return super().decode()


def faulty(
    script: Sequence[str] = (), deaths: Sequence[float] = (), builds: Sequence[str] = (), **options: Any
) -> System:
    """Of a script, a number is how long a swap takes; `wrong` and `raises` are how it ends."""
    actions, left, made = list(script), list(deaths), ["", *builds]

    def seconds(call: str) -> float:
        if call == "swap" and actions and actions[0].isdigit():
            return float(actions.pop(0))
        return 1.0 if call == "_make" else default_seconds(call)

    return System(lambda held: Faulty(held, made, actions, left), weights(0), seconds, **options)


async def asks(system: System, tokens: int, seed: int = 0) -> None:
    turn = await system.ask(tokens, seed)
    assert turn.tokens.tolist() == expected(seed, tokens)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("script", "lives", "swaps"),
    [
        (["wrong"], 1, [2]),
        (["raises"], 1, [2]),
        (["12"], 1, [1]),  # beyond the timeout: the second attempt finds it done
        (["wrong", "wrong"], 2, [2, 0]),
        (["raises", "wrong"], 2, [2, 0]),
        (["22"], 2, [1, 0]),  # beyond both attempts
    ],
)
async def test_an_update_that_fails_is_tried_again_and_then_the_sampler_is_restarted(
    autojump_clock, mode, script, lives, swaps
) -> None:
    system = faulty(script, mode=mode)

    async def scene() -> None:
        await at(2.15, system.publish.send, weights(1))

    await system(lambda: at(2.0, asks, system, 8), lambda: at(2.3, asks, system, 8, 1), scene)
    assert [version for version, _ in system.attested] == [(1, 1)]
    assert system.lives == lives
    assert [engine.swaps for engine in system.engines] == swaps


@pytest.mark.parametrize("mode", MODES)
async def test_a_sampler_that_is_never_right_ends_the_run_with_each_attempt(autojump_clock, mode) -> None:
    system = faulty(["wrong", "raises", "wrong"], builds=["wrong"], mode=mode)
    with pytest.raises(BaseExceptionGroup) as caught:
        await system(
            lambda: at(2.0, system.publish.send, weights(1)),
            trio.sleep_forever,
        )
    why = (
        r"sampler 0 could not be brought to weights \(1, 1\): attempt 1: its checksum \w+ is not the published \w+; "
        r"attempt 2: it raised MemoryError: no room for two copies; attempt 3, after a restart: its checksum \w+ is"
    )
    with pytest.raises(SyncError, match=why):
        raise leaf(caught.value)
    assert system.attested == []


@pytest.mark.parametrize("mode", MODES)
async def test_the_next_life_carries_out_the_update_of_the_one_that_died(autojump_clock, mode) -> None:
    system = faulty(deaths=[2.2], mode=mode)
    await system(lambda: at(2.0, asks, system, 12), lambda: at(2.15, system.publish.send, weights(1)))
    assert [version for version, _ in system.attested] == [(1, 1)]
    assert system.attested[0][1] < 2.15 + TIMEOUT, "at the first attempt"
    assert system.engines[-1].version == (1, 1)


async def test_a_restart_is_not_held_against_what_was_in_flight(autojump_clock) -> None:
    """Three times, one more than a request may be in flight at deaths."""
    system = faulty(["wrong", "wrong", "wrong", "wrong", "wrong", "wrong"], mode="in_flight")

    async def publish() -> None:
        for step in range(1, 4):
            await at(5.0 * step, system.publish.send, weights(step))

    await system(lambda: at(4.9, asks, system, 400), publish)
    assert system.lives == 4
    assert len(system.attested) == 3


async def test_a_restart_in_the_middle_of_an_update_keeps_its_own_weights(autojump_clock) -> None:
    system = System(SimulatedEngine, weights(5), lambda call: 4.0 if call == "checksum" else default_seconds(call))

    async def restart() -> None:
        system.sampler.restart(weights(3, life=2), "the learner went back")

    await system(
        lambda: at(1.0, asks, system, 40),
        lambda: at(2.0, system.publish.send, weights(6)),
        lambda: at(3.0, restart),
    )
    assert [engine.version for engine in system.engines] == [(1, 6), (2, 3)]
    assert system.sampler.weights.version == (2, 3)
    assert system.attested == [], "the old life's weights came late"


async def test_an_update_waits_for_no_asker(autojump_clock) -> None:
    """One has a conversation and sits in its environment, one generates for ever, others stand in a full channel."""
    for mode in MODES:
        start = trio.current_time()
        system = System(partial(SimulatedEngine, length=10**6, slots=1), weights(0), mode=mode, drain_timeout=3.0)
        over = trio.Event()

        async def thinks(system: System = system, over: trio.Event = over) -> None:
            with system.requests.sender() as sender:
                generator = Generator(system.sampler, sender, 0, trio.CancelScope())
                await generator(CONTEXT, max_tokens=2, stop=(), sampling=FREE)
                await over.wait()
                generator.close()

        async def generates(system: System = system, over: trio.Event = over) -> None:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    for _ in range(20):
                        nursery.start_soon(endless, system)
                    await over.wait()
                    scope.cancel()

        async def endless(system: System) -> None:
            with system.requests.sender() as sender:
                generator = Generator(system.sampler, sender, 0, trio.CancelScope())
                await generator(CONTEXT, max_tokens=900_000, stop=(), sampling=FREE)

        async def publish(system: System = system, over: trio.Event = over) -> None:
            await trio.sleep(1.0)
            for step in range(1, 4):
                await system.publish.send(weights(step))
            await system.barrier.attested.wait(after=2)
            over.set()

        await system(thinks, generates, publish)
        assert trio.current_time() - start < (12.0 if mode == "drain" else 2.0)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_goes_wrong_every_request_has_one_end_and_true_versions(run_seeded, seed, mode, kv) -> None:
    random = Random(f"{seed}/{mode}/{kv}")
    actions = ["", "", "", "wrong", "raises", "2", "12"]
    script = [random.choice(actions) for _ in range(12)]
    deaths = sorted(random.uniform(0, 60) for _ in range(random.randint(0, 3)))
    builds: list[str] = []
    hopeless = random.random() < 0.25
    if hopeless:  # nothing gives the right parameters any more, not even a restart
        script, deaths, builds = [*script[:4], *["wrong"] * 1000], [], ["wrong"] * 1000
    ends: list[str] = []
    fates: list[str] = []

    async def scenario() -> None:
        system = faulty(
            script,
            deaths,
            builds,
            mode=mode,
            kv=kv,
            drain_timeout=random.choice((0.0, 0.5, 5.0)),
            max_waiting=random.randint(1, 4),
        )
        published = [weights(step) for step in range(1, 5)] + [weights(step, life=2) for step in range(2, 6)]
        steps = [0, *(each.step for each in published)]

        async def asker() -> None:
            for _ in range(6):
                tokens, seed = random.randint(1, 30), random.randint(0, 99)
                before = len(system.attested)
                try:
                    turn = await system.ask(tokens, seed)
                except SamplerError as error:
                    ends.append(str(error))
                    continue
                ends.append("answered")
                assert turn.tokens.tolist() == expected(seed, tokens)
                assert len(turn.versions) == len(turn.logprobs) == tokens
                # From the weights attested when it was asked, or later ones, in the order of publication.
                at = before
                for version in turn.versions.tolist():
                    while steps[at] != version:
                        at += 1
                await trio.sleep(random.uniform(0, 3))

        async def publish() -> None:
            for each in published:
                await trio.sleep(random.uniform(0, 4))
                await system.publish.send(each)

        try:
            await system(*[asker] * 5, publish)
        except* SyncError as group:
            fates.append(str(leaf(group)))
        else:
            fates.append("done")
            held = [version for version, _ in system.attested]
            assert held == [each.version for each in published]

    run_seeded(seed, scenario)
    (fate,) = fates
    if not hopeless:
        assert fate == "done"
        assert len(ends) == 30
        failed = [end for end in ends if end != "answered"]
        assert len(failed) <= 5 * (len(deaths) // 2)
        assert all("at 2 deaths of the sampler" in end and "RuntimeError: device lost" in end for end in failed)
    else:
        assert fate.startswith("sampler 0 could not be brought to weights")

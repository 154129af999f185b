"""The barrier: nothing is admitted under weights that a sampler does not hold."""

from typing import Any

import pytest
import trio

from trouper.actors.barrier import Attested, Barrier
from trouper.channels import Channel, SyncError, Weights


class Sampler:
    """Answers after some seconds with a checksum or an error, as its script says; None never answers."""

    def __init__(self, *script: tuple[float, int | Exception] | None, holds: tuple[int, int] = (1, 0)) -> None:
        self.script = list(script)
        self.asked: list[int] = []
        self.restarts: list[str] = []
        self.ended = False
        self.weights = published(*holds)

    async def update(self, weights: Weights) -> int:
        self.asked.append(weights.step)
        answer = self.script.pop(0)
        if answer is None:
            await trio.sleep_forever()
        seconds, checksum = answer
        await trio.sleep(seconds)
        if isinstance(checksum, Exception):
            raise checksum
        self.weights = weights
        return checksum

    def restart(self, weights: Weights, reason: str) -> None:
        self.restarts.append(reason)


def published(life: int, step: int) -> Weights:
    return Weights(life=life, step=step, params=None, checksum=7)


GOOD, WRONG, RAISES = (1.0, 7), (1.0, 8), (0.0, RuntimeError("no memory"))


class Bench:
    """A barrier over samplers, and what it attested, when."""

    def __init__(self, *samplers: Any) -> None:
        self.attested: list[tuple[tuple[int, int], float]] = []
        self.barrier = Barrier(samplers, self.attest, first=Attested(1, 0), timeout=10.0)

    def attest(self, weights: Weights) -> None:
        self.attested.append((weights.version, trio.current_time()))

    async def __call__(self, *versions: tuple[int, int]) -> None:
        weights = Channel[Weights]("weights", Weights, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.barrier.run, weights.receiver())
            with weights.sender() as sender:
                weights.finish()
                for version in versions:
                    await sender.send(published(*version))


async def test_weights_are_attested_once_every_sampler_holds_them(autojump_clock) -> None:
    bench = Bench(Sampler(GOOD, GOOD), Sampler((4.0, 7), (0.5, 7)))
    await bench((1, 1), (1, 2))
    assert bench.attested == [((1, 1), 4.0), ((1, 2), 5.0)]
    assert bench.barrier.attested.value == Attested(1, 2, final=True)
    assert bench.barrier.seconds == 5.0


@pytest.mark.parametrize("first", [WRONG, RAISES, None])
async def test_a_sampler_that_fails_once_is_asked_again(autojump_clock, first) -> None:
    sampler = Sampler(first, GOOD)
    bench = Bench(Sampler(GOOD), sampler)
    await bench((1, 1))
    assert (len(bench.attested), sampler.asked, sampler.restarts) == (1, [1, 1], [])


async def test_a_sampler_that_fails_twice_is_restarted(autojump_clock) -> None:
    sampler = Sampler(None, RAISES, GOOD)
    bench = Bench(Sampler(GOOD), sampler)
    await bench((1, 1))
    assert (len(bench.attested), sampler.asked) == (1, [1, 1, 1])
    assert sampler.restarts == [
        "sampler 1 did not take weights (1, 1): attempt 2: it raised RuntimeError: no memory",
    ]


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            (WRONG, WRONG, WRONG),
            "attempt 1: its checksum 0000000000000008 is not the published 0000000000000007; attempt 2: its checksum "
            ".*; attempt 3, after a restart: its checksum",
        ),
        ((None, None, None), "attempt 1: it did not answer within sync.timeout = 10 s; attempt 2: it did not"),
        (
            (None, RAISES, WRONG),
            "attempt 1: it did not .*; attempt 2: it raised RuntimeError: no memory; .* its checksum",
        ),
    ],
)
async def test_a_sampler_that_fails_for_good_ends_the_run_by_name(autojump_clock, script, why) -> None:
    bench = Bench(Sampler(GOOD), Sampler(*script))
    with pytest.raises(ExceptionGroup) as caught:
        await bench((1, 1))
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    with pytest.raises(SyncError, match=rf"sampler 1 could not be brought to weights \(1, 1\): {why}"):
        raise error
    assert bench.attested == []
    assert bench.barrier.attested.value == Attested(1, 0)


async def test_a_sampler_that_nobody_will_ask_again_needs_no_weights(autojump_clock) -> None:
    over = Sampler()
    over.ended = True
    bench = Bench(Sampler(GOOD), over)
    await bench((1, 1))
    assert (len(bench.attested), over.asked) == (1, [])


async def test_a_sampler_that_ends_while_it_is_asked_is_not_restarted(autojump_clock) -> None:
    class Ends(Sampler):
        async def update(self, weights: Weights) -> int:
            self.ended = True
            return await super().update(weights)

    over = Ends(None)
    bench = Bench(over)
    await bench((1, 1))
    assert (len(bench.attested), over.asked, over.restarts) == (1, [1], [])


async def test_weights_of_a_new_life_go_back_in_steps_and_late_ones_of_the_old_are_skipped(autojump_clock) -> None:
    sampler = Sampler(*[GOOD] * 4)
    bench = Bench(sampler)
    await bench((1, 5), (2, 3), (1, 6), (2, 3), (2, 4))
    assert [version for version, _ in bench.attested] == [(1, 5), (2, 3), (2, 3), (2, 4)]
    assert sampler.asked == [5, 3, 3, 4]
    assert bench.barrier.attested.value == Attested(2, 4, final=True)


async def test_weights_older_than_what_a_sampler_was_built_from_are_skipped(autojump_clock) -> None:
    ahead = Sampler(holds=(2, 3))
    bench = Bench(ahead)
    await bench((1, 6))
    assert (bench.attested, ahead.asked) == ([], [])


async def test_weights_that_are_overtaken_on_the_way_are_neither_pressed_nor_attested(autojump_clock) -> None:
    class Overtaken(Sampler):
        async def update(self, weights: Weights) -> int:
            self.weights = published(2, 0)
            return await super().update(weights)

    sampler = Overtaken((1.0, SyncError("overtaken")))
    bench = Bench(sampler)
    await bench((1, 1))
    assert (bench.attested, sampler.asked, sampler.restarts) == ([], [1], [])

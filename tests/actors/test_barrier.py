"""The barrier: nothing is admitted under weights that a sampler does not hold."""

from typing import Any

import pytest
import trio

from trouper.actors.barrier import Attested, Barrier
from trouper.actors.pacer import Pacer
from trouper.channels import Channel, SyncError, Weights


class Sampler:
    """Answers after some seconds with a checksum, as its script says; None never answers."""

    def __init__(self, *script: tuple[float, int] | None) -> None:
        self.script = list(script)
        self.asked: list[int] = []
        self.ended = False

    async def update(self, weights: Weights) -> int:
        self.asked.append(weights.step)
        answer = self.script.pop(0)
        if answer is None:
            await trio.sleep_forever()
        seconds, checksum = answer
        await trio.sleep(seconds)
        return checksum


GOOD, WRONG = (1.0, 7), (1.0, 8)


async def publish(pacer: Pacer, *samplers: Any, steps: int = 1) -> Barrier:
    barrier = Barrier(samplers, pacer, timeout=10.0)
    weights = Channel[Weights]("weights", Weights, 1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(barrier.run, weights.receiver())
        with weights.sender() as sender:
            weights.finish()
            for step in range(1, steps + 1):
                await sender.send(Weights(life=1, step=step, params=None, checksum=7))
    return barrier


async def test_the_pacer_is_told_once_every_sampler_has_attested(autojump_clock) -> None:
    pacer, told = Pacer(1, 0, None, 0, 1), []
    attest = pacer.attest
    pacer.attest = lambda step: (told.append((step, trio.current_time())), attest(step))[1]  # type: ignore[method-assign]
    barrier = await publish(pacer, Sampler(GOOD, GOOD), Sampler((4.0, 7), (0.5, 7)), steps=2)
    assert told == [(1, 4.0), (2, 5.0)]
    assert barrier.attested.value == Attested(2, final=True)
    assert barrier.seconds == 5.0


@pytest.mark.parametrize("first", [WRONG, None])
async def test_a_sampler_that_fails_once_is_asked_again(autojump_clock, first) -> None:
    pacer, sampler = Pacer(1, 0, None, 0, 1), Sampler(first, GOOD)
    await publish(pacer, Sampler(GOOD), sampler)
    assert (pacer.version, sampler.asked) == (1, [1, 1])


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ((WRONG, WRONG), "its checksum 0000000000000008 is not the published 0000000000000007; then its checksum"),
        ((None, None), "it did not answer within sync.timeout = 10 s; then it did not"),
        ((None, WRONG), "it did not answer .*; then its checksum"),
    ],
)
async def test_a_sampler_that_fails_twice_ends_the_run_by_name(autojump_clock, script, why) -> None:
    pacer = Pacer(1, 0, None, 0, 1)
    with pytest.raises(ExceptionGroup) as caught:
        await publish(pacer, Sampler(GOOD), Sampler(*script))
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    with pytest.raises(SyncError, match=rf"sampler 1 could not be brought to weights \(1, 1\): {why}"):
        raise error
    assert pacer.version == 0


async def test_a_sampler_that_nobody_will_ask_again_needs_no_weights(autojump_clock) -> None:
    pacer, over = Pacer(1, 0, None, 0, 1), Sampler()
    over.ended = True
    await publish(pacer, Sampler(GOOD), over)
    assert (pacer.version, over.asked) == (1, [])

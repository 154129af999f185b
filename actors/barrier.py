"""The barrier: brings each published set of weights to every sampler, has it attested, and tells who waits for it.

No wait in here depends on an agent, an environment or a channel of theirs: a sampler swaps between two decode chunks
of its own accord. What it then holds is attested by a checksum over its own dtype and layout.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec
import trio
from msgspec import Struct

from trouper.actors.sampler import Sampler
from trouper.actors.trace import NO_TRACK, Track
from trouper.channels import Latest, Receiver, SyncError, Weights

log = logging.getLogger(__name__)


class Attested(Struct, frozen=True):
    """The newest weights that every sampler holds.

    Attributes:
        life: of the learner that published them.
        step: their step number.
        final: no further weights will come.
    """

    life: int
    step: int
    final: bool = False


class Barrier:
    """Publishes weights.

    A sampler that does not take them is asked again, then restarted from them; then the run fails. One that dies
    meanwhile is restarted by its supervisor, and its next life takes them.

    Args:
        samplers: all that must hold them.
        attest: called with weights once every sampler holds them.
        first: the weights that the samplers begin with.
        timeout: seconds one sampler may take, each time.
        attempts: how often a sampler is asked before it is restarted.
        track: of the barrier.

    Attributes:
        attested: the newest that every sampler holds.
        seconds: spent on bringing weights, so far.
    """

    def __init__(
        self,
        samplers: Sequence[Sampler],
        attest: Callable[[Weights], None],
        *,
        first: Attested,
        timeout: float,
        attempts: int = 2,
        track: Track = NO_TRACK,
    ) -> None:
        self._samplers = samplers
        self._attest = attest
        self._timeout = timeout
        self._attempts = attempts
        self._track = track
        self.attested = Latest(first)
        self.seconds = 0.0

    async def run(self, inbox: Receiver[Weights]) -> None:
        """Publish what comes, in order.

        Raises:
            SyncError: a sampler could not be brought to the weights; it names the sampler and each attempt.
        """
        async for weights in inbox:
            started = trio.current_time()
            with self._track.span("weight sync", life=weights.life, step=weights.step):
                async with trio.open_nursery() as nursery:
                    for index, sampler in enumerate(self._samplers):
                        nursery.start_soon(self._bring, index, sampler, weights)
            self.seconds += trio.current_time() - started
            if self._overtaken(weights):
                log.info("weights %s came late: newer ones are held", weights.version)
                continue
            self._attest(weights)
            self.attested.set(Attested(weights.life, weights.step))
        self.attested.set(msgspec.structs.replace(self.attested.value, final=True))

    def _overtaken(self, weights: Weights) -> bool:
        """Whether somebody holds newer ones: an earlier life of the learner had left these in the channel."""
        newest = self.attested.value
        held = [(newest.life, newest.step), *(sampler.weights.version for sampler in self._samplers)]
        return weights.version < max(held)

    async def _bring(self, index: int, sampler: Sampler, weights: Weights) -> None:
        problems: list[str] = []
        for attempt in range(1, self._attempts + 2):
            if sampler.ended or self._overtaken(weights):  # nobody will ever ask it again, or not for these
                return
            restarted = attempt > self._attempts
            if restarted:
                sampler.restart(weights, f"sampler {index} did not take weights {weights.version}: {problems[-1]}")
            problem = await self._ask(sampler, weights)
            if problem is None:
                return
            problems.append(f"attempt {attempt}{', after a restart' * restarted}: {problem}")
            log.warning("sampler %d did not take weights %s: %s", index, weights.version, problems[-1])
        raise SyncError(
            f"sampler {index} could not be brought to weights {weights.version}: {'; '.join(problems)}. "
            "A longer sync.timeout helps where a decode chunk or the copy of the weights takes that long"
        )

    async def _ask(self, sampler: Sampler, weights: Weights) -> str | None:
        """What went wrong, if anything."""
        with trio.move_on_after(self._timeout):
            try:
                checksum = await sampler.update(weights)
            # Whatever its engine raised: what is done about it is the same.
            except Exception as error:
                return f"it raised {type(error).__name__}: {error}"
            if checksum == weights.checksum:
                return None
            return f"its checksum {checksum:016x} is not the published {weights.checksum:016x}"
        return f"it did not answer within sync.timeout = {self._timeout:g} s"

"""The barrier: brings each published set of weights to every sampler, has it attested, and tells the pacer.

No wait in here depends on an agent, an environment or a channel of theirs: a sampler swaps between two decode chunks
of its own accord. What it then holds is attested by a checksum over its own dtype and layout.
"""

from collections.abc import Sequence

import trio
from msgspec import Struct

from trouper.actors.pacer import Pacer
from trouper.actors.sampler import Sampler
from trouper.channels import Latest, Receiver, SyncError, Weights


class Attested(Struct, frozen=True):
    """The newest weights that every sampler holds.

    Attributes:
        step: their step number.
        final: no further weights will come.
    """

    step: int
    final: bool = False


class Barrier:
    """Publishes weights.

    Args:
        samplers: all that must hold them.
        pacer: admits further slots once they do.
        timeout: seconds one sampler may take.
        attempts: how often a sampler is asked before the run fails.
    """

    def __init__(self, samplers: Sequence[Sampler], pacer: Pacer, *, timeout: float, attempts: int = 2) -> None:
        self._samplers = samplers
        self._pacer = pacer
        self._timeout = timeout
        self._attempts = attempts
        self.attested = Latest(Attested(pacer.version))
        self.seconds = 0.0

    async def run(self, inbox: Receiver[Weights]) -> None:
        """Publish what comes, in order."""
        async for weights in inbox:
            started = trio.current_time()
            async with trio.open_nursery() as nursery:
                for index, sampler in enumerate(self._samplers):
                    nursery.start_soon(self._bring, index, sampler, weights)
            self.seconds += trio.current_time() - started
            self._pacer.attest(weights.step)
            self.attested.set(Attested(weights.step))
        self.attested.set(Attested(self.attested.value.step, final=True))

    async def _bring(self, index: int, sampler: Sampler, weights: Weights) -> None:
        problems: list[str] = []
        for _ in range(self._attempts):
            if sampler.ended:  # nobody will ever ask it again
                return
            with trio.move_on_after(self._timeout):
                checksum = await sampler.update(weights)
                if checksum == weights.checksum:
                    return
                problems.append(f"its checksum {checksum:016x} is not the published {weights.checksum:016x}")
                continue
            problems.append(f"it did not answer within sync.timeout = {self._timeout:g} s")
        raise SyncError(
            f"sampler {index} could not be brought to weights {weights.version}: {'; then '.join(problems)}. "
            "A longer sync.timeout helps where a decode chunk or the copy of the weights takes that long"
        )

"""One conversation's way to a sampler, as `trouper.envs.Conversation` calls it.

Knows requests, their seeds and their replies; neither engines nor weights: what it waits for may be sampled in parts,
under several weights, by several lives of a sampler.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import trio
from numpy.typing import NDArray

from trouper.actors.sampler import Generate, Sampler
from trouper.actors.trace import NO_TRACK, Track
from trouper.channels import Reply, SamplerError, Sampling, Sender, Turn
from trouper.learner.request import Request


class Generator:
    """One conversation's way to a sampler: what `Conversation` calls to get a turn.

    Args:
        sampler: who answers.
        requests: the channel to it.
        seed: of the attempt; with a token's position it decides the token.
        attempt_scope: what a failure of the sampler cancels, so that agent code never sees it.
        track: of the slot.
        flows: join the turns to the step that trains them.

    Attributes:
        failure: what the sampler could not do, if anything.
        seconds: spent waiting for turns.
    """

    __slots__ = (
        "_attempt_scope",
        "_conversation",
        "_digest",
        "_flows",
        "_reached",
        "_requests",
        "_rewrites",
        "_row_seed",
        "_sampler",
        "_seed",
        "_track",
        "failure",
        "seconds",
    )

    def __init__(
        self,
        sampler: Sampler,
        requests: Sender[Generate],
        seed: int,
        attempt_scope: trio.CancelScope,
        track: Track = NO_TRACK,
        flows: Sequence[int] = (),
    ) -> None:
        self._sampler = sampler
        self._requests = requests
        # Attempts of training and evaluation share draws and members: only a number of its own is unique.
        self._conversation = sampler.next_id()
        self._seed = self._row_seed = seed
        self._reached = self._rewrites = 0
        self._attempt_scope = attempt_scope
        self._track = track
        self._flows = flows
        self.failure: SamplerError | None = None
        self._digest = hashlib.blake2b(digest_size=16)
        self.seconds = 0.0

    async def __call__(
        self, tokens: NDArray[np.int32], *, max_tokens: int, stop: tuple[int, ...], sampling: Sampling
    ) -> Turn:
        """One model call over the whole context; a caller that is cancelled takes its request back.

        A context that was rewritten comes to positions where tokens were drawn before: with the same seed an agent
        that tries a turn again would get it word for word.
        """
        if len(tokens) < self._reached:
            self._rewrites += 1
            key = f"{self._seed}/{self._rewrites}".encode()
            self._row_seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little")
            self._reached = 0
        request = Request(
            id=self._sampler.next_id(),
            conversation=self._conversation,
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            seed=self._row_seed,
        )
        generate = Generate(request, Reply())
        started = trio.current_time()
        try:
            with self._track.span("generate", self._flows):
                await self._requests.send(generate)
                turn = await generate.reply.wait()
            self._digest.update(turn.tokens.tobytes())
            self._reached = len(tokens) + len(turn.tokens)
            return turn
        except SamplerError as error:
            self.failure = error
            self._attempt_scope.cancel()
            await trio.lowlevel.checkpoint_if_cancelled()
            raise
        finally:
            self.seconds += trio.current_time() - started
            if not generate.reply.answered:
                generate.reply.fail(SamplerError(f"nobody waits for request {request.id} any more"))
                self._sampler.cancel(request.id)

    def digest(self) -> str:
        """A hash of all ids that were sampled, in order; `Episode.digest` must equal it."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """The conversation is over."""
        self._sampler.release(self._conversation)

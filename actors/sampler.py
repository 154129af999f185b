"""The sampler: answers generation requests from the engine, and takes new weights between two of its calls.

Knows the engine's interface, not its maths: the engine is deaf to Trio and is called on the accelerator, prefill and
decode in turns. Requests come over a bounded channel; answers, cancellations and weights do not block anyone.
"""

import logging
from collections.abc import Callable
from typing import Literal

import trio
from msgspec import Struct

from trouper.actors.accelerator import Accelerator
from trouper.actors.account import NOT_TIMED, REQUESTS, DeviceTime
from trouper.actors.generation import GenerationEngine
from trouper.channels import Receiver, Reply, RunError, SamplerError, SyncError, Turn, Weights
from trouper.learner.engine import Finished, Request
from trouper.learner.request import joined, rest

MAX_DELIVERIES = 2
"""How often a request may be in flight when the sampler dies before it is failed instead of tried again."""

log = logging.getLogger(__name__)


class Generate(Struct, frozen=True, eq=False):
    """One request to a sampler and the place for its answer."""

    request: Request
    reply: Reply[Turn]


class _Job(Struct, eq=False):
    """A request that was taken in.

    Attributes:
        asked: as it came.
        left: what is still to be asked of the engine.
        so_far: what was sampled of it before it was aborted, if it was.
        deaths: how often it was in flight when the sampler died.
    """

    asked: Generate
    left: Request
    so_far: Turn | None = None
    deaths: int = 0


class _Update(Struct, frozen=True, eq=False):
    weights: Weights
    reply: Reply[int]


class Sampler:
    """One engine as an actor. The object outlives its lives: a restart rebuilds the engine and asks again.

    Args:
        make_engine: builds an engine that holds the given weights; called at every start.
        weights: the first weights.
        accelerator: where the engine's calls run.
        max_waiting: requests taken off the channel and not yet submitted; beyond it the channel fills up.
        mode: how new weights come in; see `trouper.actors.config.Sync`.
        kv: what happens to keys and values of older weights.
        drain_timeout: seconds that `drain` waits for running generations.
        time: told what the device is at.

    Attributes:
        weights: the newest that the engine was given.
        sampled_tokens: so far.
        ended: every asker has ended, and it with them: nothing will be sampled any more.
    """

    def __init__(
        self,
        make_engine: Callable[[Weights], GenerationEngine],
        weights: Weights,
        accelerator: Accelerator,
        *,
        max_waiting: int,
        mode: Literal["in_flight", "drain", "abort"] = "in_flight",
        kv: Literal["keep", "recompute"] = "keep",
        drain_timeout: float = 60.0,
        time: DeviceTime = NOT_TIMED,
    ) -> None:
        self.weights = weights
        self._make_engine = make_engine
        self._accelerator = accelerator
        self._max_waiting = max_waiting
        self._mode = mode
        self._kv = kv
        self._drain_timeout = drain_timeout if mode == "drain" else 0.0
        self._time = time
        self._waiting: dict[int, _Job] = {}
        self._running: dict[int, _Job] = {}
        self._cancelled: list[int] = []
        self._released: list[int] = []
        self._update: _Update | None = None
        # False from the beginning of a swap until its checksum holds: what would be sampled could be anything.
        self._attested = True
        self._life = trio.CancelScope()
        self._death = ""
        self._restart_reason = ""
        self._closed = False
        self._change = trio.lowlevel.ParkingLot()
        self._space = trio.lowlevel.ParkingLot()
        self._next_id = 0
        self.sampled_tokens = 0
        self.ended = False

    # ------------------------------------------------------------------ called by other actors, never blocking

    @property
    def running(self) -> int:
        """Requests that the engine has, waiting or decoded."""
        return len(self._running)

    def next_id(self) -> int:
        """An id for a request or a conversation that was never used in this process."""
        self._next_id += 1
        return self._next_id

    def cancel(self, id: int) -> None:
        """The asker of this request has gone."""
        if self._waiting.pop(id, None) is not None:
            self._space.unpark_all()
        elif id in self._running:
            self._cancelled.append(id)
            self._change.unpark_all()

    def release(self, conversation: int) -> None:
        """No further turn of this conversation will come."""
        self._released.append(conversation)

    async def update(self, weights: Weights) -> int:
        """Swap to these weights; a life that dies meanwhile leaves it to the next one.

        What the engine holds already, the same parameters under the same version, is only attested: no keys and values
        are lost.

        Returns:
            The checksum of what the engine then holds. If it is not that of `weights`, nothing is sampled until another
            update or `restart` has brought the engine to weights that hold.

        Raises:
            SyncError: newer weights are held, or came meanwhile.
            Exception: what the engine raised; nothing is sampled until another update or `restart`.
        """
        update = _Update(weights, Reply())
        if self._update is not None:
            self._update.reply.fail(SyncError(f"weights {self._update.weights.version} were overtaken"))
        self._update = update
        self._change.unpark_all()
        try:
            return await update.reply.wait()
        finally:
            if self._update is update:
                self._update = None
            self._change.unpark_all()

    def restart(self, weights: Weights, reason: str) -> None:
        """End the present life with an error; the next one builds its engine from these weights.

        Args:
            weights: instead of those that the engine could not be brought to.
            reason: what the error says.
        """
        self.weights = weights
        self._restart_reason = reason
        self._life.cancel()

    # ------------------------------------------------------------------ the actor

    async def run(
        self, requests: Receiver[Generate], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until every asker has ended and everything asked is answered.

        Raises:
            SamplerError: `restart` was called; whoever supervises this has to start it again.
            Exception: what the engine raised.
        """
        with trio.CancelScope() as self._life:
            await self._live(requests, task_status)
        if self._life.cancelled_caught:
            raise SamplerError(f"{self._restart_reason}; it begins anew with weights {self.weights.version}")

    async def _live(self, requests: Receiver[Generate], task_status: trio.TaskStatus[None]) -> None:
        with self._time.doing("load"):
            engine = await self._accelerator.run(self._make_engine, self.weights)
        with self._time.doing("compile"):
            await self._accelerator.run(engine.warm_up)
        self._attested = True
        self._ask_again()
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_in, requests, engine)
            try:
                await self._serve(engine)
            except Exception as error:
                self._death = f"{type(error).__name__}: {error}"
                raise
            nursery.cancel_scope.cancel()

    def _ask_again(self) -> None:
        """Let wait what was in flight when the last life ended; a death that it may have caused counts against it."""
        self._cancelled.clear()
        self._released.clear()  # a new engine knows no conversations
        again: dict[int, _Job] = {}
        for id, job in self._running.items():
            job.deaths += bool(self._death)
            if job.asked.reply.answered:  # its asker went while nothing ran here
                continue
            if job.deaths < MAX_DELIVERIES:
                again[id] = job
                continue
            job.asked.reply.fail(
                SamplerError(
                    f"request {id} was in flight at {job.deaths} deaths of the sampler and is not tried again; "
                    f"the last one was {self._death}"
                )
            )
        self._running, self._waiting, self._death = {}, again | self._waiting, ""

    async def _take_in(self, requests: Receiver[Generate], engine: GenerationEngine) -> None:
        self._closed = False
        # Also before the first: what was in flight at a death waits again.
        await self._room()
        async for generate in requests:
            if generate.reply.answered:  # its asker has gone
                continue
            try:
                engine.check(generate.request)
            except SamplerError as error:
                generate.reply.fail(error)
                continue
            self._waiting[generate.request.id] = _Job(generate, generate.request)
            self._change.unpark_all()
            await self._room()
        self._closed = True
        self._change.unpark_all()

    async def _room(self) -> None:
        while len(self._waiting) >= self._max_waiting:
            await self._space.park()

    async def _serve(self, engine: GenerationEngine) -> None:
        swap_at: float | None = None
        while True:
            self._forget(engine)
            update = self._update
            if update is None:
                swap_at = None
                if self._attested:
                    self._submit(engine)
            else:
                if swap_at is None:
                    swap_at = trio.current_time() + self._drain_timeout
                if not (self._running and self._attested) or trio.current_time() >= swap_at:
                    await self._swap(engine, update)
                    swap_at = None
                    continue
            if self._running and self._attested:
                await self._compute(engine)
            elif self._closed and not self._waiting and not self._running and update is None:
                self.ended = True
                return
            else:
                with self._time.doing(REQUESTS):
                    await self._change.park()
                    await self._gather()

    async def _gather(self) -> None:
        """Whoever woke at the same moment as the first asker asks within the next few: one call for all of them."""
        asked = -1
        while asked < len(self._waiting):
            asked = len(self._waiting)
            await trio.lowlevel.checkpoint()

    async def _compute(self, engine: GenerationEngine) -> None:
        """One prefill call, if anything needs it, and one chunk: no long context holds the others up for its length."""
        if engine.needs_prefill:
            with self._time.doing("prefill", requests=len(self._running)):
                await self._accelerator.run(engine.prefill)
            if not engine.can_decode:
                return
        with self._time.doing("decode", requests=len(self._running)):
            ended = await self._accelerator.run(engine.decode)
        for finished in ended:
            self._answer(finished)

    def _forget(self, engine: GenerationEngine) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for id in cancelled:
            if self._running.pop(id, None) is not None:
                engine.cancel(id)
        released, self._released = self._released, []
        for conversation in released:
            engine.release(conversation)

    def _submit(self, engine: GenerationEngine) -> None:
        for id, job in self._waiting.items():
            engine.submit(job.left)
            self._running[id] = job
        self._waiting.clear()
        self._space.unpark_all()

    async def _swap(self, engine: GenerationEngine, update: _Update) -> None:
        weights = update.weights
        if weights.version < self.weights.version:
            self._settle(update)
            update.reply.fail(SyncError(f"weights {weights.version} lie before {self.weights.version}, which it holds"))
            return
        if self._mode != "in_flight":
            self._take_back(engine)
        held = self._attested and weights.version == self.weights.version and weights.params is self.weights.params
        self._attested = False
        try:
            checksum = await self._checksum(engine) if held else None
            if checksum is None or checksum != weights.checksum:
                with self._time.doing("swap", step=weights.step):
                    await self._accelerator.run(engine.swap, weights.params, weights.version, self._kv)
                checksum = await self._checksum(engine)
        except RunError:
            raise  # not the swap's failure but the device's: nothing goes on
        except Exception as error:
            # Whatever the engine raised, who brings the weights decides what comes next.
            log.warning("weights %s could not be taken", weights.version, exc_info=error)
            self._settle(update)
            update.reply.fail(error)
            return
        # A device call is waited for even by a life that `restart` has ended: the next one has other weights.
        await trio.lowlevel.checkpoint_if_cancelled()
        self.weights = weights
        self._attested = checksum == weights.checksum
        self._settle(update)
        update.reply.set(checksum)

    async def _checksum(self, engine: GenerationEngine) -> int:
        with self._time.doing("attest"):
            return await self._accelerator.run(engine.checksum)

    def _settle(self, update: _Update) -> None:
        if self._update is update:
            self._update = None

    def _take_back(self, engine: GenerationEngine) -> None:
        """Abort what runs; it waits, before all others, to go on from the tokens that it has."""
        taken: dict[int, _Job] = {}
        for id, job in self._running.items():
            part = engine.abort(id)
            if part is not None:
                self.sampled_tokens += len(part.tokens)
                job.so_far = part if job.so_far is None else joined(job.so_far, part)
                left = rest(job.asked.request, job.so_far)
                if left is None:
                    job.asked.reply.set(job.so_far)
                    continue
                job.left = left
            taken[id] = job
        self._running, self._waiting = {}, taken | self._waiting

    def _answer(self, finished: Finished) -> None:
        job = self._running.pop(finished.id, None)
        if job is not None:  # else it was cancelled while the chunk ran
            self.sampled_tokens += len(finished.turn.tokens)
            job.asked.reply.set(finished.turn if job.so_far is None else joined(job.so_far, finished.turn))

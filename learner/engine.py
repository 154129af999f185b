"""The generation engine: fixed slots, continuous batching, reuse of cached prefixes, weights that change on the way.

Plain synchronous Python, driven call by call from one thread; it is deaf to who asks and why. Sees token ids only.
Whoever drives it prefills while `needs_prefill`, and decodes a chunk after each such call: a long context is
prefilled in calls of bounded size, and what decodes goes on in between.
The maths is in `trouper.learner.decoder` and `trouper.learner.sampling`, the bookkeeping in `trouper.learner.slots`;
here they meet in three compiled calls (decode a chunk, prefill rows, copy prefixes) whose shapes never depend on the
requests. A context is cached up to its last token; the next decode step feeds that one, so prefill needs no logits.
"""

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from jax.sharding import Sharding
from jax.typing import DTypeLike
from numpy.typing import NDArray

from trouper.channels import NumericsError, Turn
from trouper.learner.checksum import checksum
from trouper.learner.control import Column, Copy
from trouper.learner.decoder import Cache, Decoder, make_cache
from trouper.learner.decoding import cache_placement, compile_for
from trouper.learner.request import Finished, Request, Version, check
from trouper.learner.slots import Slots

__all__ = ["Engine", "Finished", "RecompileWarning", "Request", "Statistics"]

KV_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""How many cache positions attention may look at; a call takes the smallest that covers what is cached."""


class Statistics(msgspec.Struct, frozen=True):
    """What an engine has done so far.

    Attributes:
        prefill_tokens: context tokens whose keys and values were computed by prefill.
        reused_tokens: context tokens that were cached already: a conversation's own, or copied from another's.
        decoded_tokens: tokens sampled.
        chunks: decode calls.
        evictions: idle conversations that lost their slot to another.
        compiled_shapes: different calls made; constant after `warm_up`.
        late_shapes: those among them that were first made after `warm_up`, each with a `RecompileWarning`.
    """

    prefill_tokens: int
    reused_tokens: int
    decoded_tokens: int
    chunks: int
    evictions: int
    compiled_shapes: int
    late_shapes: int


class RecompileWarning(UserWarning):
    """A call was compiled while requests waited for it: its shape was not declared when the engine was made."""


class Engine:
    """Answers generation requests with one decoder.

    The decoder's arrays are used as they are, not copied: nobody may donate them while the engine samples from them.

    Args:
        decoder: the model; its parameters are the first weights.
        slots: conversations decoded side by side, `S`.
        length: tokens that a conversation may have, `C`.
        chunk: tokens decoded per slot between two admissions.
        kv_dtype: what keys and values are cached in.
        version: (life, step) of the decoder's parameters.
        prefill_rows: rows of the prefill call; a long context takes several.
        prefill_tokens: tokens in a row; a quarter of them is a second shape, for what conversations append and for
            when little waits.
        kv_buckets: ascending; those below `length` are used, and `length` itself.
        vocab_limit: ids at and above it are never sampled (tables are padded beyond the tokenizer's length).
        restricted: requests may ask for top-p or top-k. Else the decode calls for that are not compiled by `warm_up`,
            but late, when one is first needed.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        length: int,
        chunk: int = 8,
        kv_dtype: DTypeLike = jnp.float32,
        version: Version = (0, 0),
        prefill_rows: int = 8,
        prefill_tokens: int = 64,
        kv_buckets: Iterable[int] = KV_BUCKETS,
        vocab_limit: int | None = None,
        restricted: bool = False,
    ) -> None:
        self.version = version
        self._length, self._chunk = length, chunk
        self._vocabulary = decoder.config.vocab_size
        self._rows = prefill_rows
        widest = min(prefill_tokens, length)
        self._widths = tuple(sorted({max(1, widest // 4), widest}))
        self._buckets = (*(bucket for bucket in kv_buckets if bucket < length), length)
        graph, state = nnx.split(decoder)
        leaves, structure = jax.tree.flatten(state)
        self._params = _placed(leaves, [leaf.sharding for leaf in leaves])
        placement = cache_placement(self._params[0].sharding)
        self._calls = compile_for(graph, structure, placement, chunk, vocab_limit)
        self._cache: Cache = jax.device_put(make_cache(decoder.config, slots, length, jnp.dtype(kv_dtype)), placement)
        self._slots = Slots(slots, length)
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._running: dict[int, int] = {}
        self._restricted = 0
        self._prefilled = self._decoded = self._chunks = 0
        self._variants = (False, True) if restricted else (False,)
        self._shapes: set[tuple[object, ...]] = set()
        self._warm, self._late = False, 0

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def live(self) -> int:
        """Requests that have a slot: prefilled or decoded."""
        return len(self._running)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def needs_prefill(self) -> bool:
        """Whether `prefill` has anything to do: a context that is not cached yet, or a request that can have a slot."""
        return self._slots.needs_prefill(next(iter(self._waiting.values()), None))

    @property
    def can_decode(self) -> bool:
        """Whether `decode` has anything to do: a context is cached."""
        return self._slots.live().size > 0

    @property
    def statistics(self) -> Statistics:
        """What the engine has done so far."""
        return Statistics(
            prefill_tokens=self._prefilled,
            reused_tokens=self._slots.reused,
            decoded_tokens=self._decoded,
            chunks=self._chunks,
            evictions=self._slots.evictions,
            compiled_shapes=len(self._shapes),
            late_shapes=self._late,
        )

    def checksum(self) -> int:
        """`trouper.learner.checksum.checksum` of the parameters in use."""
        return checksum(self._params)

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served, before anything of it reaches the device.

        Looks at the engine's limits alone, never at its state: any thread may call it at any time.

        Raises:
            SamplerError: names the limit.
        """
        check(request, length=self._length, vocabulary=self._vocabulary)

    def submit(self, request: Request) -> None:
        """Let a request wait for a slot; requests get theirs in the order they came.

        A second request of a conversation waits until the first has ended.

        Raises:
            SamplerError: see `check`.
            ValueError: a request of this id runs or waits.
        """
        self.check(request)
        if request.id in self._running or request.id in self._waiting:
            raise ValueError(f"request {request.id} runs or waits already; every request needs an id of its own")
        self._waiting[request.id] = request
        self._slots.want(request.conversation)

    def cancel(self, id: int) -> None:
        """End a request without an answer; its conversation stays. An id that neither runs nor waits is ignored."""
        request = self._waiting.pop(id, None)
        if request is not None:
            self._slots.unwant(request.conversation)
        elif id in self._running:
            self._leave(self._running[id])

    def abort(self, id: int) -> Turn | None:
        """End a request with what was sampled of it so far; its conversation stays.

        Who asks `trouper.learner.request.rest` of it next, before or after a swap, goes on where it was.

        Returns:
            A turn cut short (`finish` is `length`), or None where nothing was sampled yet or nothing of this id runs.
        """
        turn = self._slots.so_far(self._running[id]) if id in self._running else None
        self.cancel(id)
        return turn

    def release(self, conversation: Hashable) -> None:
        """Forget a conversation; if a request of it runs, that is cancelled."""
        slot = self._slots.slot_of(conversation)
        if slot is not None:
            if self._slots.runs(slot):
                self._leave(slot)
            self._slots.release(conversation)

    def prefill(self) -> None:
        """Give slots to what waits and cache what is missing of the contexts, as much as one call takes.

        That is `prefill_rows` rows of `prefill_tokens` tokens at most, so that it delays those that decode by no more.
        Returns when the device has done it.
        """
        copies = self._slots.replan(self.version)
        while self._waiting:
            admitted = self._slots.admit(next(iter(self._waiting.values())), self.version)
            if admitted is None:
                break
            id, request = self._waiting.popitem(last=False)
            self._running[id] = admitted.slot
            self._restricted += _is_restricted(request)
            copies += admitted.copies
        self._copy(copies)
        fill = self._slots.fill(self._rows, self._widths)
        if fill is not None:
            self._prefilled += fill.count
            self._prefill(fill.slots, fill.tokens, fill.positions, self._bucket(fill.reach))
        # Members of a group wait for the first of them; what it has just cached they copy now, and decode at once.
        self._copy(self._slots.follow())
        self._slots.go_live()
        # Else the decode call that needs the cache would wait, and seem to take as long.
        jax.block_until_ready(self._cache)  # type: ignore[no-untyped-call]  # JAX has no types here

    def decode(self) -> list[Finished]:
        """Decode one chunk for every request whose context is cached.

        Returns:
            Those that have ended.

        Raises:
            NumericsError: a log-prob is not finite; the engine is of no further use with these weights.
        """
        live = self._slots.live()
        if not live.size:
            return []
        control = self._slots.control
        reach = control[live, Column.POSITION] + np.minimum(control[live, Column.LEFT], self._chunk)
        tokens, logprobs = self._decode(control, self._bucket(int(reach.max())), self._restricted > 0)
        tokens, logprobs = tokens[:, live], logprobs[:, live]
        self._chunks += 1
        self._decoded += int(np.count_nonzero(tokens >= 0))
        if not np.isfinite(logprobs).all():
            broken = live[~np.isfinite(logprobs).all(axis=0)]
            raise NumericsError(
                f"weights {self.version} give log-probs that are not finite, first in request "
                f"{self._slots.request(int(broken[0])).id}; the model has diverged, or overflows in its dtype"
            )
        finished = []
        for slot, turn in self._slots.record(live, tokens, logprobs, self.version[1]):
            finished.append(Finished(self._slots.request(slot).id, turn))
            self._leave(slot)
        return finished

    def swap(self, params: Any, version: Version, kv: Literal["keep", "recompute"]) -> None:
        """Sample under other weights from now on. Nothing cached under older ones is ever shared by conversations.

        Args:
            params: the `nnx.State` of such a decoder, or its leaves; copied only if they lie on other devices.
            version: (life, step) of the parameters.
            kv: `keep`: running generations and resident conversations go on with what is cached (`Turn.kv_version`
                says how old it is). `recompute`: the contexts of running generations are prefilled again before they
                go on, and resident conversations are dropped. Steps of two lives do not compare, and a version that
                comes twice was wrong the first time: both are always recomputed.

        Raises:
            ValueError: the parameters do not fit, or the version lies before the present one.
        """
        leaves = jax.tree.leaves(params)
        _check_fit(leaves, self._params)
        if version < self.version:
            raise ValueError(
                f"weights {version} lie before {self.version}; (life, step) must grow: begin a new life to go back"
            )
        grown = version > self.version and version[0] == self.version[0]
        self._params, self.version = _placed(leaves, [leaf.sharding for leaf in self._params]), version
        if kv == "keep" and grown:
            self._slots.keep(version)
        else:
            self._slots.recompute(version)

    def warm_up(self) -> None:
        """Compile every declared shape; nothing that is cached changes. A shape that comes later is warned of."""
        for bucket in self._buckets:
            for width in self._widths:
                nowhere = np.full((self._rows, width), self._length, np.int32)
                self._prefill(np.zeros(self._rows, np.int32), np.zeros_like(nowhere), nowhere, bucket)
            self._copy_prefixes(np.zeros((2, self._slots.count), np.int32), 0, bucket)
            for variant in self._variants:
                self._decode(np.full_like(self._slots.control, self._length), bucket, variant)
        self._warm = True

    # ---------------------------------------------------------------- the device's part

    def _declare(self, *shape: object) -> None:
        """Count a call's shape, before the call is made."""
        if shape in self._shapes:
            return
        self._shapes.add(shape)
        if self._warm:
            self._late += 1
            warnings.warn(
                f"the engine compiles {shape} in the middle of a run, while {self.live} requests wait; declare it when "
                "the engine is made: restricted=True is for top-p and top-k",
                RecompileWarning,
                stacklevel=2,
            )

    def _bucket(self, reach: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= reach)

    def _prefill(self, slots: Any, tokens: Any, positions: Any, bucket: int) -> None:
        self._declare("prefill", tokens.shape[1], bucket)
        self._cache = self._calls.prefill(self._params, self._cache, slots, tokens, positions, kv_length=bucket)

    def _copy(self, copies: list[Copy]) -> None:
        if copies:
            pairs = np.zeros((2, self._slots.count), np.int32)
            pairs[:, : len(copies)] = np.array([(copy.source, copy.target) for copy in copies]).T
            self._copy_prefixes(pairs, len(copies), self._bucket(max(copy.length for copy in copies)))

    def _copy_prefixes(self, pairs: NDArray[np.int32], count: int, bucket: int) -> None:
        self._declare("copy", bucket)
        self._cache = self._calls.copy(self._cache, pairs, np.int32(count), kv_length=bucket)

    def _decode(
        self, control: NDArray[np.int32], bucket: int, restricted: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        self._declare("decode", bucket, "restricted" if restricted else "free")
        self._cache, drawn = self._calls.decode(
            self._params, self._cache, control, kv_length=bucket, restricted=restricted
        )
        tokens, bits = np.asarray(drawn)
        return tokens, bits.view(np.float32)

    def _leave(self, slot: int) -> None:
        request = self._slots.request(slot)
        del self._running[request.id]
        self._restricted -= _is_restricted(request)
        self._slots.leave(slot)


def _is_restricted(request: Request) -> bool:
    return request.sampling.top_p < 1 or request.sampling.top_k > 0


def _placed(leaves: list[jax.Array], shardings: list[Sharding]) -> list[jax.Array]:
    """The same buffers where they lie right already, and tied to their devices: calls are compiled for that."""
    return [jax.device_put(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]


def _check_fit(given: list[Any], present: list[jax.Array]) -> None:
    if len(given) != len(present):
        raise ValueError(f"{len(given)} arrays are given, the decoder has {len(present)} parameters")
    for index, (new, old) in enumerate(zip(given, present, strict=True)):
        if not isinstance(new, jax.Array):
            raise ValueError(f"parameter {index} is a {type(new).__name__}; put it on the engine's device first")
        if new.shape != old.shape or new.dtype != old.dtype:
            raise ValueError(
                f"parameter {index} is {new.dtype} {new.shape} where the engine has {old.dtype} {old.shape}; "
                "cast to the engine's dtype before a swap"
            )

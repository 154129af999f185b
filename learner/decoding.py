"""The engine's compiled calls: decode a chunk, prefill rows, copy prefixes.

Pure functions of parameters, cache and small integer arrays, whose shapes never depend on the requests. What the
numbers in them mean for conversations is the business of `trouper.learner.slots`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import PyTreeDef

from trouper.learner.control import Column
from trouper.learner.decoder import Cache, Decoder
from trouper.learner.sampling import sample, uniforms


def cache_placement(sharding: Sharding) -> Sharding:
    """Where the cache lies: with the parameters, whole on every device."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())  # type: ignore[no-untyped-call]  # JAX has no types here
    return sharding


class _Carry(NamedTuple):
    """What a decode step hands to the next: steps done, and per slot its token, position and remaining budget."""

    done: jax.Array
    cache: Cache
    token: jax.Array
    position: jax.Array
    left: jax.Array
    drawn: jax.Array


class DeviceCalls(NamedTuple):
    """The compiled calls of one decoder. All consume the cache they are given and return the new one."""

    decode: Callable[..., tuple[Cache, jax.Array]]
    prefill: Callable[..., Cache]
    copy: Callable[..., Cache]


@functools.lru_cache(maxsize=8)  # engines of one decoder share what is compiled
def compile_for(
    graph: nnx.GraphDef[Decoder], structure: PyTreeDef, placement: Sharding, chunk: int, vocab_limit: int | None
) -> DeviceCalls:
    """The calls of one decoder; each compiles when it is first made with its static arguments.

    Args:
        graph: of `nnx.split`.
        structure: of the state of `nnx.split`, whose leaves are the calls' `params`.
        placement: where the cache lies.
        chunk: steps of a decode call.
        vocab_limit: see `trouper.learner.sampling.sample`.
    """

    def decoder(params: list[jax.Array]) -> Decoder:
        return nnx.merge(graph, jax.tree.unflatten(structure, params))

    @functools.partial(
        jax.jit,
        static_argnames=("kv_length", "restricted"),
        donate_argnames=("cache",),
        out_shardings=(placement, None),
    )
    def decode(
        params: list[jax.Array], cache: Cache, control: jax.Array, *, kv_length: int, restricted: bool
    ) -> tuple[Cache, jax.Array]:
        """`chunk` tokens for every slot that lives, fewer steps if all end sooner.

        Returns:
            The cache, and int32 [2, chunk, S]: ids, -1 where nothing was drawn, and the bits of their log-probs.
        """
        model = decoder(params)
        nowhere = cache[0][1].shape[2]
        seeds = lax.bitcast_convert_type(control[:, Column.SEED], jnp.uint32)
        temperature, top_p = (
            lax.bitcast_convert_type(control[:, column], jnp.float32) for column in (Column.TEMPERATURE, Column.TOP_P)
        )
        top = (top_p, control[:, Column.TOP_K]) if restricted else None
        stops = control[:, Column.STOPS :]

        def some_live(carry: _Carry) -> jax.Array:
            return (carry.done < chunk) & (carry.position < nowhere).any()

        def draw(carry: _Carry) -> _Carry:
            # A slot that does not live stands beyond the cache: it writes nothing there.
            live = carry.position < nowhere
            hidden, cache = model.extend(carry.cache, carry.token[:, None], carry.position[:, None], None, kv_length)
            uniform = uniforms(seeds, carry.position + 1)
            token, logprob = sample(model.logits(hidden[:, 0]), uniform, temperature, top, vocab_limit)
            left = carry.left - live
            goes_on = live & (left > 0) & (token[:, None] != stops).all(axis=1)
            bits = lax.bitcast_convert_type(logprob, jnp.int32)
            row = jnp.stack([jnp.where(live, token, -1), jnp.where(live, bits, 0)])
            return _Carry(
                done=carry.done + 1,
                cache=cache,
                token=token,
                position=jnp.where(goes_on, carry.position + 1, nowhere),
                left=left,
                drawn=lax.dynamic_update_slice_in_dim(carry.drawn, row[:, None], carry.done, axis=1),
            )

        empty = jnp.stack([jnp.full((chunk, len(control)), -1), jnp.zeros((chunk, len(control)), jnp.int32)])
        start = _Carry(
            done=jnp.int32(0),
            cache=cache,
            token=control[:, Column.TOKEN],
            position=control[:, Column.POSITION],
            left=control[:, Column.LEFT],
            drawn=empty,
        )
        end = lax.while_loop(some_live, draw, start)
        return end.cache, end.drawn

    @functools.partial(jax.jit, static_argnames=("kv_length",), donate_argnames=("cache",), out_shardings=placement)
    def prefill(
        params: list[jax.Array],
        cache: Cache,
        slots: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        kv_length: int,
    ) -> Cache:
        """Cache rows of tokens. Rows of one slot see each other: a layer writes all rows before any of them looks."""
        _, cache = decoder(params).extend(cache, tokens, positions, slots, kv_length)
        return cache

    @functools.partial(jax.jit, static_argnames=("kv_length",), donate_argnames=("cache",), out_shardings=placement)
    def copy(cache: Cache, pairs: jax.Array, count: jax.Array, *, kv_length: int) -> Cache:
        """Copy the first `kv_length` positions of slot `pairs[0, i]` to slot `pairs[1, i]`, one after the other.

        In order, so that a slot may be copied from after it was copied to. What lies beyond the shared prefix comes
        along and is never looked at before it is overwritten.
        """

        def one(i: jax.Array, cache: Cache) -> Cache:
            def move(array: jax.Array, prefix: tuple[int, int]) -> jax.Array:
                held = lax.dynamic_slice(array, (pairs[0, i], 0, 0, 0), (1, array.shape[1], *prefix))
                return lax.dynamic_update_slice(array, held, (pairs[1, i], 0, 0, 0))

            return [
                (move(keys, (keys.shape[2], kv_length)), move(values, (kv_length, values.shape[3])))
                for keys, values in cache
            ]

        moved: Cache = lax.fori_loop(0, count, one, cache)
        return moved

    return DeviceCalls(decode, prefill, copy)

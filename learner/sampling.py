"""Drawing tokens: from logits and one uniform number per slot to an id and its log-prob.

Pure functions, used inside the engine's jitted calls. Does not know slots, caches or models. Axes: `S` slots,
`V` vocabulary.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def uniforms(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One uniform number in [0, 1) per slot, a pure function of that slot's seed and position.

    So a token depends neither on its company in the batch nor on how decoding is cut into chunks.

    Args:
        seeds: uint32 [S].
        positions: int32 [S], the absolute position of the token to be drawn.

    Returns:
        float32 [S].
    """

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    return jax.vmap(draw)(seeds, positions)


def kept(scaled: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Which ids survive top-k and then, among those, top-p.

    Of equal logits the lower id comes first, so exactly `top_k` ids are kept. The most likely id is always kept, and
    with it the id whose mass carries the sum over `top_p`. Nothing is sorted: the last id that is kept is found by
    bisection, in some hundred sums over the vocabulary at most: on CPU a thirtieth of the time that a sort takes.
    Source: nucleus sampling (arXiv 1904.09751).

    Args:
        scaled: logits divided by the temperature, float32 [S, V].
        top_p: float32 [S], in (0, 1]; 1 keeps everything.
        top_k: int32 [S]; 0 keeps everything.

    Returns:
        bool [S, V].
    """
    all_ids = jnp.ones(scaled.shape, bool)

    def most_likely() -> jax.Array:
        count = jnp.where(top_k > 0, top_k, scaled.shape[-1])
        return _leading(scaled, jnp.ones_like(scaled), count.astype(jnp.float32))

    within: jax.Array = lax.cond((top_k > 0).any(), most_likely, lambda: all_ids)

    def nucleus() -> jax.Array:
        mass = jnp.where(within, jnp.exp(scaled - scaled.max(axis=-1, keepdims=True)), 0.0)
        # A sum of 0 would be reached without the most likely id.
        needed = jnp.maximum(top_p * mass.sum(axis=-1), np.finfo(np.float32).tiny)
        return _leading(scaled, mass, needed) | (top_p >= 1)[:, None]

    in_nucleus: jax.Array = lax.cond((top_p < 1).any(), nucleus, lambda: all_ids)
    return within & in_nucleus


def _leading(scaled: jax.Array, weight: jax.Array, needed: jax.Array) -> jax.Array:
    """The fewest ids, from the highest down and lower ids first among equals, whose weights reach a sum.

    Args:
        scaled: float32 [S, V].
        weight: float32 [S, V], none negative.
        needed: float32 [S], above 0; where all weights together do not reach it, all ids are taken.

    Returns:
        bool [S, V].
    """
    # Unsigned numbers in the floats' order: negative ones have all their bits turned, the others their sign.
    bits = lax.bitcast_convert_type(jnp.where(scaled == 0, 0.0, scaled), jnp.uint32)
    keys = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))
    # What is no number comes first, whatever its sign (x86 gives it a minus): left out, it would go unnoticed.
    keys = jnp.where(jnp.isnan(scaled), jnp.uint32(0xFFFFFFFF), keys)

    def reached(taken: jax.Array) -> jax.Array:
        return jnp.where(taken, weight, 0.0).sum(axis=-1) >= needed

    lowest = _bisect(32, lambda key: reached(keys >= key), len(scaled))
    above, equal = keys > lowest, keys == lowest
    vocabulary = scaled.shape[-1]
    from_the_end = jnp.arange(vocabulary, dtype=jnp.uint32)[::-1]
    last = _bisect(vocabulary.bit_length(), lambda id: reached(above | (equal & (from_the_end >= id))), len(scaled))
    return above | (equal & (from_the_end >= last))


def _bisect(bits: int, holds: Callable[[jax.Array], jax.Array], slots: int) -> jax.Array:
    """The highest number of so many bits for which a condition holds, uint32 [S, 1]; it holds for 0 and all below."""

    def decide(i: jax.Array, number: jax.Array) -> jax.Array:
        candidate = number | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate)[:, None], candidate, number)

    highest: jax.Array = lax.fori_loop(0, bits, decide, jnp.zeros((slots, 1), jnp.uint32))
    return highest


def sample(
    logits: jax.Array,
    uniform: jax.Array,
    temperature: jax.Array,
    top: tuple[jax.Array, jax.Array] | None = None,
    vocab_limit: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw one id per slot by the exact inverse of the cumulative distribution, in two levels.

    The first level finds the block of about sqrt(V) ids that the uniform number falls into, the second the id in it:
    one uniform per slot and two short cumulative sums, where Gumbel noise needs V uniforms.

    Args:
        logits: float32 [S, V].
        uniform: float32 [S], in [0, 1).
        temperature: float32 [S]; 0 takes the most likely id (the lowest of equals).
        top: None, or (top_p float32 [S], top_k int32 [S]) as for `kept`.
        vocab_limit: static; ids at and above it are never drawn and have no share in any distribution.

    Returns:
        ids int32 [S], and float32 [S] log-probs under the distribution each was drawn from: after temperature,
        `vocab_limit`, top-k and top-p. A greedy id was certain: its log-prob is 0. It is NaN where the highest logit is
        not finite, or a logit is no number.
    """
    slots, vocabulary = logits.shape
    if vocab_limit is not None and vocab_limit < vocabulary:
        logits = jnp.where(jnp.arange(vocabulary) < vocab_limit, logits, -jnp.inf)
    greedy = temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    if top is not None:
        scaled = jnp.where(kept(scaled, *top), scaled, -jnp.inf)
    highest = scaled.max(axis=-1, keepdims=True)
    # For a greedy slot all mass lies on the highest logits, and a uniform of 0 takes the first of them.
    mass = jnp.where(greedy[:, None], (scaled == highest).astype(jnp.float32), jnp.exp(scaled - highest))
    uniform = jnp.where(greedy, 0.0, uniform)

    blocks = _block_count(vocabulary)
    width = -(-vocabulary // blocks)
    table = jnp.pad(mass, ((0, 0), (0, blocks * width - vocabulary))).reshape(slots, blocks, width)
    block_mass = table.sum(axis=-1)
    cumulated = jnp.cumsum(block_mass, axis=-1)
    total = jnp.where(block_mass > 0, cumulated, 0).max(axis=-1)
    block = _first_above(cumulated, block_mass, uniform * total)
    before = jnp.where(block > 0, _pick(cumulated, jnp.maximum(block - 1, 0)), 0.0)
    inner_mass = jnp.take_along_axis(table, block[:, None, None], axis=1)[:, 0]
    inner = jnp.cumsum(inner_mass, axis=-1)
    # The sum over a block and the last of its cumulated sums may differ by rounding: stay below the latter.
    ceiling = jnp.where(inner_mass > 0, inner, 0).max(axis=-1) * (1 - 2**-23)
    ids = block * width + _first_above(inner, inner_mass, jnp.minimum(uniform * total - before, ceiling))

    logprobs = _pick(scaled, ids) - highest[:, 0] - jnp.log(block_mass.sum(axis=-1))
    # What is certain of the highest logit, unless that is no number.
    certain = jnp.where(jnp.isfinite(highest[:, 0]), 0.0, jnp.nan)
    # Rounding can lift a near-certain id a hair above 0.
    return ids, jnp.where(greedy, certain, jnp.minimum(logprobs, 0.0))


def _block_count(vocabulary: int) -> int:
    """A number near sqrt(V), one that divides V where there is one: padding copies the whole table."""
    root = max(1, math.isqrt(vocabulary))
    return next((n for n in range(root, root // 2, -1) if vocabulary % n == 0), root)


def _pick(table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[s, index[s]]` for every row."""
    return jnp.take_along_axis(table, index[:, None], axis=1)[:, 0]


def _first_above(cumulated: jax.Array, mass: jax.Array, level: jax.Array) -> jax.Array:
    """The first index with mass whose cumulated mass exceeds the level: an id without mass is never found."""
    return lax.argmax((cumulated > level[:, None]) & (mass > 0), axis=1, index_dtype=jnp.int32)

"""The decoder: Llama and Qwen2/3 as one NNX module, with and without a key-value cache.

Sees token ids only. NNX stays at the edges: callers split the module once (`nnx.split`) and merge it again inside
their jitted functions, so that a call carries plain arrays. Axes: `B` rows, `T` tokens, `V` vocabulary, `H` query
heads, `K` key-value heads, `D` residual width, `S` cache slots, `C` cache positions.
"""

import math
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike, NDArray

from trouper.channels import ModelError
from trouper.learner.model_config import ModelConfig, RopeScaling

Cache: TypeAlias = list[tuple[jax.Array, jax.Array]]
"""Per layer keys [S, K, head_dim, C] and values [S, K, C, head_dim]: both products of a decode step then run along rows
that lie in memory as they are read. With the keys' axes the other way round the scores take XLA's CPU backend twice as
long."""

# A finite stand-in for minus infinity: a fully masked (padding) query then gives numbers, not NaN.
_MASKED = -1e30

_QUERY_BLOCK = 128
"""Fewest queries that attend at a time in whole rows; see `Attention.attend_rows`."""


def make_cache(config: ModelConfig, slots: int, length: int, dtype: jnp.dtype | type = jnp.float32) -> Cache:
    """Zeroed keys and values for `slots` conversations of at most `length` tokens."""
    keys = (slots, config.num_key_value_heads, config.head_dim, length)
    values = (slots, config.num_key_value_heads, length, config.head_dim)
    return [(jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(config.num_hidden_layers)]


def check_token_ids(ids: ArrayLike, vocab_size: int) -> NDArray[np.int32]:
    """Token ids as int32, proved to be rows of the embedding table.

    For before ids reach a device, where an id outside the table reads another row without an error. The limit is
    the table's rows, not the tokenizer's length: tables are padded, and tokenizers count added tokens apart.

    Args:
        ids: integers of any shape.
        vocab_size: rows of the embedding table, `V`.

    Raises:
        ModelError: an id is outside [0, V), or the dtype is no integer, or too narrow for `V` (ids may have wrapped).
    """
    array = np.asarray(ids)
    if array.size == 0:
        return array.astype(np.int32)
    if not np.issubdtype(array.dtype, np.integer) or np.iinfo(array.dtype).max < vocab_size - 1:
        raise ModelError(f"token ids came as {array.dtype}, which cannot hold every id below {vocab_size}; use int32")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest >= vocab_size:
        raise ModelError(
            f"token id {lowest if lowest < 0 else highest} is outside the embedding table of {vocab_size} rows; "
            "does the tokenizer belong to this model?"
        )
    return array.astype(np.int32)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array:
    """Rotary frequencies in radians per position, float32 [head_dim // 2].

    Source: RoFormer (arXiv 2104.09864); the scaling is that of Llama 3.1's reference code.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high = scaling.original_max_position_embeddings / scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    return jnp.where(
        wavelengths > low, frequencies / scaling.factor, jnp.where(wavelengths < high, frequencies, blended)
    )


def rotate(x: jax.Array, positions: jax.Array, frequencies: jax.Array) -> jax.Array:
    """Apply rotary positions, half-split layout.

    Args:
        x: [..., T, heads, head_dim].
        positions: int32 [..., T].
        frequencies: float32 [head_dim // 2].
    """
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, param_dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        kwargs: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        init = nnx.initializers.normal(config.initializer_range)
        out_init = nnx.initializers.normal(config.initializer_range / math.sqrt(2 * config.num_hidden_layers))
        bias = config.attention_bias
        self.q_proj = nnx.Linear(config.hidden_size, heads * width, use_bias=bias, kernel_init=init, **kwargs)
        self.k_proj = nnx.Linear(config.hidden_size, kv_heads * width, use_bias=bias, kernel_init=init, **kwargs)
        self.v_proj = nnx.Linear(config.hidden_size, kv_heads * width, use_bias=bias, kernel_init=init, **kwargs)
        self.o_proj = nnx.Linear(
            heads * width, config.hidden_size, use_bias=config.output_bias, kernel_init=out_init, **kwargs
        )
        if config.qk_norm:
            self.q_norm = nnx.RMSNorm(width, epsilon=config.rms_norm_eps, **kwargs)
            self.k_norm = nnx.RMSNorm(width, epsilon=config.rms_norm_eps, **kwargs)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [B, T, H, head_dim] and keys, and values [B, T, K, head_dim]."""
        c = self.config
        flat = _flat(x)
        q = self.q_proj(flat).reshape(*x.shape[:-1], c.num_attention_heads, c.head_dim)
        k = self.k_proj(flat).reshape(*x.shape[:-1], c.num_key_value_heads, c.head_dim)
        v = self.v_proj(flat).reshape(*x.shape[:-1], c.num_key_value_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        frequencies = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        return rotate(q, positions, frequencies), rotate(k, positions, frequencies), v

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        """Attention output [B, T, D].

        Args:
            q: [B, T, H, head_dim].
            k: [B, K, head_dim, C].
            v: [B, K, C, head_dim].
            mask: bool [B, T, C], true where a query may look.
        """
        return self._output(_mix(self._grouped(q), k, v, mask))

    def attend_rows(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        """`attend` over whole rows, for training: the scores of every query for every key never exist at once.

        Queries go in at most eight blocks. Each leaves out the keys after its end, nearly half of all; and its scores
        are computed again in the backward pass, which costs no time, as little as they are, and saves their memory.

        Args:
            q: [B, T, H, head_dim].
            k: [B, K, head_dim, T].
            v: [B, K, T, head_dim].
            mask: bool [B, T, T], false wherever the key comes after the query.
        """
        grouped, length = self._grouped(q), q.shape[1]
        size = max(_QUERY_BLOCK, -(-length // 8))
        spans = [(start, min(start + size, length)) for start in range(0, length, size)]
        mix = jax.checkpoint(_mix)
        mixed = [mix(grouped[:, :, a:b], k[..., :b], v[:, :, :b], mask[:, a:b, :b]) for a, b in spans]
        return self._output(jnp.concatenate(mixed, axis=2))

    def _grouped(self, q: jax.Array) -> jax.Array:
        """Scaled queries by the key-value head they look at, [B, K, T, H / K, head_dim]."""
        c = self.config
        scaled: jax.Array = (q * c.head_dim**-0.5).reshape(*q.shape[:2], c.num_key_value_heads, -1, c.head_dim)
        return scaled.swapaxes(1, 2)

    def _output(self, mixed: jax.Array) -> jax.Array:
        """[B, T, D] from mixed values in the shape of `_grouped`."""
        rows = mixed.swapaxes(1, 2)
        batch, length = rows.shape[:2]
        output: jax.Array = self.o_proj(rows.reshape(batch * length, -1))
        return output.reshape(batch, length, -1)


def _mix(grouped: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Mixed values for scaled queries [B, K, T, H / K, head_dim], in their shape; the rest as in `Attention.attend`."""
    # The queries of a key-value head as rows of one matrix: with T = 1 XLA's CPU backend takes half the time for one
    # batched product that it takes for a contraction over five axes.
    rows = grouped.reshape(*grouped.shape[:2], -1, grouped.shape[-1])
    scores = jnp.einsum("bkmd,bkds->bkms", rows, k.astype(rows.dtype)).astype(jnp.float32)
    scores = jnp.where(mask[:, None, :, None], scores.reshape(*grouped.shape[:-1], -1), _MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    unscaled = weights.astype(rows.dtype).reshape(*rows.shape[:-1], -1)
    mixed = jnp.einsum("bkms,bksd->bkmd", unscaled, v.astype(rows.dtype)).reshape(grouped.shape)
    # Divided after the mixing: once for each of `head_dim` numbers, not for each key.
    return (mixed / weights.sum(-1, keepdims=True)).astype(rows.dtype)


def _flat(x: jax.Array) -> jax.Array:
    """Tokens as rows of one matrix, [B T, D]."""
    # XLA's CPU backend transposes what it need not in the backward pass of a product over three axes: 1.2 x the time.
    return x.reshape(-1, x.shape[-1])


class Block(nnx.Module):
    """Attention and a gated MLP, each behind an RMS norm and a residual."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, param_dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        kwargs: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        init = nnx.initializers.normal(config.initializer_range)
        out_init = nnx.initializers.normal(config.initializer_range / math.sqrt(2 * config.num_hidden_layers))
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.input_layernorm = nnx.RMSNorm(width, epsilon=config.rms_norm_eps, **kwargs)
        self.self_attn = Attention(config, **kwargs)
        self.post_attention_layernorm = nnx.RMSNorm(width, epsilon=config.rms_norm_eps, **kwargs)
        self.gate_proj = nnx.Linear(width, inner, use_bias=bias, kernel_init=init, **kwargs)
        self.up_proj = nnx.Linear(width, inner, use_bias=bias, kernel_init=init, **kwargs)
        self.down_proj = nnx.Linear(inner, width, use_bias=bias, kernel_init=out_init, **kwargs)

    def mlp(self, x: jax.Array) -> jax.Array:
        """The gated MLP with its norm and residual."""
        h = _flat(self.post_attention_layernorm(x))
        return x + self.down_proj(jax.nn.silu(self.gate_proj(h)) * self.up_proj(h)).reshape(x.shape)

    def __call__(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        """The block over whole rows; arguments as for `Decoder`."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), positions)
        x = x + self.self_attn.attend_rows(q, k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), mask)
        return self.mlp(x)

    def extend(
        self,
        x: jax.Array,
        cache: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        slots: jax.Array | None,
        kv_length: int,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """`Decoder.extend` for one layer."""
        keys, values = cache
        q, k, v = self.self_attn.project(self.input_layernorm(x), positions)
        where = (jnp.arange(x.shape[0]) if slots is None else slots)[:, None, None]
        heads, at = jnp.arange(k.shape[2]), positions[:, :, None]
        # "drop": positions beyond the cache write nothing, so dead slots and padding need no select. One write a head:
        # with one slot XLA would make a single write a select over the whole cache, which copies it.
        keys = keys.at[where, heads, :, at].set(k.astype(keys.dtype), mode="drop")
        values = values.at[where, heads, at].set(v.astype(values.dtype), mode="drop")
        rows = slice(None) if slots is None else slots
        seen_keys, seen_values = keys[rows, :, :, :kv_length], values[rows, :, :kv_length]
        mask = jnp.arange(kv_length) <= positions[..., None]
        x = x + self.self_attn.attend(q, seen_keys, seen_values, mask)
        return self.mlp(x), (keys, values)


# Layers differ in their arrays only: a block that is a function of them is traced once for all of them. The compiler
# takes the calls apart again, so that nothing else changes.
@partial(jax.jit, static_argnums=(0, 1))
def _block(
    remat: bool, graph: nnx.GraphDef[Block], state: Any, x: jax.Array, positions: jax.Array, mask: jax.Array
) -> jax.Array:
    def run(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x, positions, mask)

    return (jax.checkpoint(run) if remat else run)(state, x)


@partial(jax.jit, static_argnums=(0, 1))
def _extend_block(
    kv_length: int,
    graph: nnx.GraphDef[Block],
    state: Any,
    x: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    slots: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return nnx.merge(graph, state).extend(x, cache, positions, slots, kv_length)


class Decoder(nnx.Module):
    """A decoder-only language model.

    Args:
        config: its shape.
        dtype: what matrices are multiplied in.
        param_dtype: what parameters are stored in.
        remat: recompute each block in the backward pass: less memory, one more forward pass.
        rngs: for the initial parameters: normal, `config.initializer_range` wide, output projections scaled by
            1/sqrt(2 L).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype | type = jnp.float32,
        param_dtype: jnp.dtype | type = jnp.float32,
        remat: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.config = config
        self.remat = remat
        kwargs: dict[str, Any] = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(param_dtype), "rngs": rngs}
        init = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, embedding_init=init, **kwargs)
        self.layers = nnx.List([Block(config, **kwargs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, **kwargs)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, kernel_init=init, **kwargs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        """Final hidden states [B, T, D], normed.

        Args:
            tokens: int32 [B, T].
            positions: int32 [B, T].
            mask: bool [B, T, T], true where query (second axis) may look at key (third axis), which never comes later.
        """
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = _block(self.remat, *nnx.split(layer), x, positions, mask)
        hidden: jax.Array = self.norm(x)
        return hidden

    def extend(
        self, cache: Cache, tokens: jax.Array, positions: jax.Array, slots: jax.Array | None, kv_length: int
    ) -> tuple[jax.Array, Cache]:
        """Append tokens to cached conversations; each sees what its slot holds up to its own position.

        Args:
            cache: as `make_cache` gives it.
            tokens: int32 [B, T].
            positions: int32 [B, T]; a position of `C` or more writes nothing (padding, dead slots).
            slots: int32 [B], the cache slot of each row; None means rows are the slots in order (`B == S`).
            kv_length: static; how many cache positions are looked at. Must exceed every live position.

        Returns:
            Final hidden states [B, T, D], normed, and the new cache.
        """
        x = self.embed_tokens(tokens)
        extended: Cache = []
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, layer_cache = _extend_block(kv_length, *nnx.split(layer), x, layer_cache, positions, slots)
            extended.append(layer_cache)
        return self.norm(x), extended

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Next-token logits, float32 [..., V], from normed hidden states [..., D]."""
        if self.config.tie_word_embeddings:
            weight = self.embed_tokens.embedding[...].astype(hidden.dtype)
            return jnp.einsum("...d,vd->...v", hidden, weight, preferred_element_type=jnp.float32)
        weight = self.lm_head.kernel[...].astype(hidden.dtype)
        return jnp.einsum("...d,dv->...v", hidden, weight, preferred_element_type=jnp.float32)

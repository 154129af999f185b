"""The compiled functions of one learner: log-probs, gradient accumulation, the optimizer step. Sharded and donated.

Arrays in, arrays out; no state, no host synchronisation. Memory is parameters, optimizer state and one gradient
buffer, plus what one micro-batch takes. Knows the decoder by its split graph, so that a call carries plain arrays.

The vocabulary head runs on trained tokens only, a piece at a time, and each piece's gradient is taken at once: logits
take the memory of one piece, none are computed twice, and pieces without a trained token are not computed at all.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from trouper.learner.batch import MicroBatch
from trouper.learner.decoder import Decoder
from trouper.learner.loss import LossConfig, LossMaxima, LossSums, policy_loss, token_logprobs
from trouper.learner.mesh import BATCH, param_sharding

_T = TypeVar("_T")

HEAD_TOKENS = 256
"""Trained tokens of a micro-batch that go through the vocabulary head at a time. Each piece adds a gradient as large as
the head to the total, which fewer tokens would not be worth; more would leave more padding in the last piece."""

HEAD_ROW_TOKENS = 32
"""The same for each packed row, where a micro-batch has many."""


class Totals(NamedTuple):
    """What a step has accumulated so far.

    Attributes:
        gradients: like the parameters, float32, summed and not yet divided.
        sums: of the micro-batches.
        maxima: over the micro-batches.
    """

    gradients: list[jax.Array]
    sums: LossSums
    maxima: LossMaxima


class StepReport(NamedTuple):
    """What an optimizer step says, float32 scalars still on the device.

    Attributes:
        sums: of all micro-batches.
        maxima: over all micro-batches.
        grad_norm: global norm of the divided gradient, before clipping.
        applied: 1 when the step was taken; 0 when a gradient or log-prob was not finite and nothing was changed.
    """

    sums: LossSums
    maxima: LossMaxima
    grad_norm: jax.Array
    applied: jax.Array


def attention_mask(segments: ArrayLike, prefixes: ArrayLike) -> jax.Array:
    """Who may look at whom in packed rows, bool [B, T, T]: the past of one's own segment and of the one it continues.

    Args:
        segments: int32 [B, T], -1 at padding, which sees only padding.
        prefixes: int32 [B, T], -1 for none.
    """
    segments, prefixes = jnp.asarray(segments), jnp.asarray(prefixes)
    index = jnp.arange(segments.shape[1])
    past = index[:, None] >= index[None, :]
    keys = segments[:, None, :]
    own = segments[:, :, None] == keys
    continued = (prefixes[:, :, None] == keys) & (prefixes[:, :, None] >= 0)
    return past & (own | continued)


class _Trained(NamedTuple):
    """What the loss needs of each trained token, all [B, N], or of a piece of them; see `MicroBatch`."""

    targets: ArrayLike
    mask: ArrayLike
    sampler: ArrayLike
    advantages: ArrayLike
    weights: ArrayLike
    temperatures: ArrayLike
    old: ArrayLike | None = None
    reference: ArrayLike | None = None


def _trained_tokens(batch: MicroBatch, old: ArrayLike | None = None, reference: ArrayLike | None = None) -> _Trained:
    return _Trained(
        batch.targets, batch.mask, batch.sampler, batch.advantages, batch.weights, batch.temperatures, old, reference
    )


def _over_pieces(
    body: Callable[[jax.Array, jax.Array, _Trained, _T], _T], hidden: jax.Array, trained: _Trained, carried: _T
) -> _T:
    """Call `body(start, hidden, trained, carried)` for each piece of the trained tokens that has any.

    Args:
        body: `start` is the piece's first token on `N`. Where the last piece overlaps the one before, its mask leaves
            out what that has had.
        hidden: [B, N, D].
        trained: true masks stand first in each row.
        carried: what the first call is given; each gives the next one's.
    """
    mask = jnp.asarray(trained.mask)
    length = mask.shape[1]
    size = min(length, max(HEAD_TOKENS // mask.shape[0], HEAD_ROW_TOKENS))

    def piece(index: jax.Array, carried: _T) -> _T:
        start = jnp.minimum(index * size, length - size)

        def cut(array: ArrayLike) -> jax.Array:
            return lax.dynamic_slice_in_dim(jnp.asarray(array), start, size, axis=1)

        here = jax.tree.map(cut, trained)
        fresh = start + jnp.arange(size) >= index * size
        return body(start, cut(hidden), here._replace(mask=here.mask & fresh), carried)

    pieces = (mask.sum(1, dtype=jnp.int32).max() + size - 1) // size
    found: _T = lax.fori_loop(0, pieces, piece, carried)
    return found


class Step:
    """The compiled functions for one decoder, loss, optimizer and mesh.

    Args:
        decoder: its structure and parameter names; its arrays are not kept.
        loss: the loss.
        optimizer: the optax transformation.
        mesh: the devices.
        vocab_limit: rows of the embedding table from here on belong to no token.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        loss: LossConfig,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        vocab_limit: int | None = None,
    ) -> None:
        self._graph, state = nnx.split(decoder)
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(state)
        self.names = tuple(
            jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value") for path, _ in leaves
        )
        tied = decoder.config.tie_word_embeddings
        self._head = self.names.index("embed_tokens/embedding" if tied else "lm_head/kernel")
        self._loss = loss
        self._optimizer = optimizer
        self._vocab_limit = vocab_limit
        self.batch_sharding = NamedSharding(mesh, BATCH)
        # Any: trees of shardings have the types of the trees of arrays they describe.
        replicated: Any = NamedSharding(mesh, P())  # type: ignore[no-untyped-call]
        self.param_shardings: list[Any] = [
            param_sharding(mesh, n, p.shape) for n, (_, p) in zip(self.names, leaves, strict=True)
        ]
        self._shapes = [p.shape for _, p in leaves]
        moments = jax.eval_shape(self._init_moments)
        self.optimizer_shardings: Any = optax.tree.map_params(
            optimizer,
            lambda _, sharding: sharding,
            moments,
            self.param_shardings,
            transform_non_params=lambda _: replicated,
        )

        sums = LossSums(*(replicated for _ in LossSums._fields))
        maxima = LossMaxima(*(replicated for _ in LossMaxima._fields))
        totals = Totals(self.param_shardings, sums, maxima)
        report = StepReport(sums, maxima, replicated, replicated)
        # What is donated comes back in the same place and layout, so every buffer is reused from step to step.
        self.start = jax.jit(self._start, out_shardings=totals)
        self.init_optimizer = jax.jit(self._init_moments, out_shardings=self.optimizer_shardings)
        self.logprobs = jax.jit(self._logprobs, out_shardings=self.batch_sharding)
        self.accumulate = jax.jit(self._accumulate, donate_argnames="totals", out_shardings=totals)
        self.apply = jax.jit(
            self._apply,
            donate_argnames=("params", "moments", "totals"),
            out_shardings=(self.param_shardings, self.optimizer_shardings, totals, report),
        )

    def place(self, batch: MicroBatch) -> MicroBatch:
        """A micro-batch on the devices, its rows shared out."""
        placed: MicroBatch = jax.device_put(batch, self.batch_sharding)
        return placed

    def _start(self) -> Totals:
        zero = functools.partial(jnp.zeros, (), jnp.float32)
        return Totals(
            gradients=[jnp.zeros(shape, jnp.float32) for shape in self._shapes],
            sums=LossSums(*(zero() for _ in LossSums._fields)),
            maxima=LossMaxima(*(zero() for _ in LossMaxima._fields)),
        )

    def _init_moments(self) -> Any:
        # Moments are float32 whatever the parameters are: bfloat16 loses (1 - b2) * g^2 against b2 * v.
        return self._optimizer.init([jnp.zeros(shape, jnp.float32) for shape in self._shapes])

    def _decoder(self, params: Sequence[jax.Array]) -> Decoder:
        decoder: Decoder = nnx.merge(self._graph, jax.tree.unflatten(self._structure, params))
        return decoder

    def _predictors(self, params: Sequence[jax.Array], batch: MicroBatch) -> jax.Array:
        """The hidden states that predict the trained tokens, [B, N, D]."""
        mask = attention_mask(batch.segments, batch.prefixes)
        hidden = self._decoder(params)(jnp.asarray(batch.tokens), jnp.asarray(batch.positions), mask)
        hidden = lax.with_sharding_constraint(hidden, self.batch_sharding)  # type: ignore[no-untyped-call]
        return jnp.take_along_axis(hidden, jnp.asarray(batch.sources)[..., None], axis=1)

    def _score(self, params: Sequence[jax.Array], hidden: jax.Array, trained: _Trained) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies of trained tokens, float32 [B, N], from the hidden states that predict them."""
        logits = self._decoder(params).logits(hidden)
        return token_logprobs(logits, trained.targets, trained.temperatures, self._vocab_limit)

    def _logprobs(self, params: Sequence[jax.Array], batch: MicroBatch) -> jax.Array:
        """Log-probs of the trained tokens, float32 [B, N]; 0 where a whole piece is padding."""

        def score(start: jax.Array, hidden: jax.Array, trained: _Trained, found: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(found, self._score(params, hidden, trained)[0], start, axis=1)

        nothing = jnp.zeros(batch.mask.shape, jnp.float32)
        return _over_pieces(score, self._predictors(params, batch), _trained_tokens(batch), nothing)

    def _accumulate(
        self,
        params: list[jax.Array],
        totals: Totals,
        batch: MicroBatch,
        old: jax.Array | None,
        reference: jax.Array | None,
    ) -> Totals:
        """Totals with one more micro-batch.

        Args:
            params: the parameters.
            totals: donated.
            batch: the micro-batch.
            old: float32 [B, N], the trainer's log-probs at step start; None when this is the step's only pass.
            reference: float32 [B, N], the reference model's log-probs, or None.
        """

        def loss(
            head: jax.Array, hidden: jax.Array, trained: _Trained
        ) -> tuple[jax.Array, tuple[LossSums, LossMaxima]]:
            with_head = [head if index == self._head else p for index, p in enumerate(params)]
            current, entropy = self._score(with_head, hidden, trained)
            return policy_loss(
                self._loss,
                current=current,
                sampler=trained.sampler,
                advantages=trained.advantages,
                weights=trained.weights,
                mask=trained.mask,
                entropy=entropy,
                old=trained.old,
                reference=trained.reference,
            )

        def add_piece(
            start: jax.Array,
            hidden: jax.Array,
            trained: _Trained,
            carried: tuple[jax.Array, jax.Array, LossSums, LossMaxima],
        ) -> tuple[jax.Array, jax.Array, LossSums, LossMaxima]:
            by_head, by_hidden, sums, maxima = carried
            (head, states), (more, most) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
                params[self._head], hidden, trained
            )
            states += lax.dynamic_slice_in_dim(by_hidden, start, states.shape[1], axis=1)
            return (
                by_head + head.astype(jnp.float32),
                lax.dynamic_update_slice_in_dim(by_hidden, states, start, axis=1),
                LossSums(*(a + b for a, b in zip(sums, more, strict=True))),
                LossMaxima(*(jnp.maximum(a, b) for a, b in zip(maxima, most, strict=True))),
            )

        hidden, pull_back = jax.vjp(lambda params: self._predictors(params, batch), params)
        gradients = list(totals.gradients)
        gradients[self._head], by_hidden, sums, maxima = _over_pieces(
            add_piece,
            hidden,
            _trained_tokens(batch, old, reference),
            (gradients[self._head], jnp.zeros_like(hidden), totals.sums, totals.maxima),
        )
        (more,) = pull_back(by_hidden)
        added = [total + g.astype(jnp.float32) for total, g in zip(gradients, more, strict=True)]
        return Totals(added, sums, maxima)

    def _apply(
        self, params: list[jax.Array], moments: Any, totals: Totals, denominator: jax.Array
    ) -> tuple[list[jax.Array], Any, Totals, StepReport]:
        """One optimizer step.

        Args:
            params: donated.
            moments: the optimizer's state, donated.
            totals: donated.
            denominator: float32, what the gradient is divided by; 0 changes nothing.

        Returns:
            New parameters and optimizer state, zeroed totals, and the report.
        """
        divisor = jnp.maximum(denominator, 1.0)
        norm = optax.tree.norm(totals.gradients) / divisor
        good = (denominator > 0) & jnp.isfinite(norm) & (totals.sums.nonfinite == 0) & jnp.isfinite(totals.sums.loss)

        def take(params: list[jax.Array], moments: Any) -> tuple[list[jax.Array], Any]:
            wide = [p.astype(jnp.float32) for p in params]
            gradients = [g / divisor for g in totals.gradients]
            updates, moments = self._optimizer.update(gradients, moments, wide)
            return [(p + u).astype(old.dtype) for p, u, old in zip(wide, updates, params, strict=True)], moments

        def keep(params: list[jax.Array], moments: Any) -> tuple[list[jax.Array], Any]:
            return params, moments

        # A branch, not a select of every element: 2.5 times as fast on CPU, where memory is what an update costs.
        params, moments = lax.cond(good, take, keep, params, moments)
        report = StepReport(totals.sums, totals.maxima, norm, good.astype(jnp.float32))
        return params, moments, jax.tree.map(jnp.zeros_like, totals), report

"""The compiled functions of one learner: log-probs, gradient accumulation, the optimizer step. Sharded and donated.

Arrays in, arrays out; no state, no host synchronisation. Memory is parameters, optimizer state and one gradient
buffer, plus what one micro-batch takes. Knows the decoder by its split graph, so that a call carries plain arrays.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from trouper.learner.batch import MicroBatch
from trouper.learner.decoder import Decoder
from trouper.learner.loss import LossConfig, LossMaxima, LossSums, policy_loss, token_logprobs
from trouper.learner.mesh import BATCH, param_sharding


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

    def _score(self, params: Sequence[jax.Array], batch: MicroBatch) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies of the trained tokens, float32 [B, N]."""
        decoder = nnx.merge(self._graph, jax.tree.unflatten(self._structure, params))
        mask = attention_mask(batch.segments, batch.prefixes)
        hidden = decoder(jnp.asarray(batch.tokens), jnp.asarray(batch.positions), mask)
        hidden = jax.lax.with_sharding_constraint(hidden, self.batch_sharding)  # type: ignore[no-untyped-call]
        # The head runs on what is trained and on nothing else: at 49,152 tokens it is a fifth of a 135M model.
        predicting = jnp.take_along_axis(hidden, jnp.asarray(batch.sources)[..., None], axis=1)
        return token_logprobs(decoder.logits(predicting), batch.targets, batch.temperatures, self._vocab_limit)

    def _logprobs(self, params: Sequence[jax.Array], batch: MicroBatch) -> jax.Array:
        """Log-probs of the trained tokens, float32 [B, N]."""
        return self._score(params, batch)[0]

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

        def loss(params: list[jax.Array]) -> tuple[jax.Array, tuple[LossSums, LossMaxima]]:
            current, entropy = self._score(params, batch)
            return policy_loss(
                self._loss,
                current=current,
                sampler=batch.sampler,
                advantages=batch.advantages,
                weights=batch.weights,
                mask=batch.mask,
                entropy=entropy,
                old=old,
                reference=reference,
            )

        gradients, (sums, maxima) = jax.grad(loss, has_aux=True)(params)
        return Totals(
            gradients=[total + g.astype(jnp.float32) for total, g in zip(totals.gradients, gradients, strict=True)],
            sums=LossSums(*(a + b for a, b in zip(totals.sums, sums, strict=True))),
            maxima=LossMaxima(*(jnp.maximum(a, b) for a, b in zip(totals.maxima, maxima, strict=True))),
        )

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
        gradients = [g / jnp.maximum(denominator, 1.0) for g in totals.gradients]
        norm = optax.tree.norm(gradients)
        good = (denominator > 0) & jnp.isfinite(norm) & (totals.sums.nonfinite == 0) & jnp.isfinite(totals.sums.loss)
        wide = [p.astype(jnp.float32) for p in params]
        updates, new_moments = self._optimizer.update(gradients, moments, wide)
        new_params = [(p + u).astype(old.dtype) for p, u, old in zip(wide, updates, params, strict=True)]

        def keep_or_take(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(good, new, old)

        params, moments = jax.tree.map(keep_or_take, (new_params, new_moments), (params, moments))
        report = StepReport(totals.sums, totals.maxima, norm, good.astype(jnp.float32))
        return params, moments, jax.tree.map(jnp.zeros_like, totals), report

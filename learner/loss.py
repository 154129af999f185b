"""The policy-gradient loss per token, as sums and counts. Pure JAX functions; no model, no batching.

Three log-probs meet here: the sampler's, `old` (the trainer's at step start) and current. The ratio that is clipped is
current / old; `rollout_is` weighs old / sampler. Nothing here divides by a batch: `denominator` is the one place that
says by what, so any cut of a step into micro-batches gives the same gradient.
"""

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from msgspec import Struct

KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]
"""With d = reference - current log-prob: `k1` is -d, `k2` is d^2 / 2, `k3` is exp(d) - 1 - d
(http://joschu.net/blog/kl-approx.html). Each is differentiated as it stands."""

LossAggMode: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""How token losses become one number: see `token_weight` and `denominator`."""

EXPONENT_LIMIT = 20.0
"""Log-ratios above this are cut before `exp`, so that nothing overflows. A cut token has gradient 0 through that
exponential: the limit is a fuse for broken tokens, not a trust region. Below it nothing is changed."""

_MASKED_LOGIT = -1e30


class LossConfig(Struct, frozen=True, kw_only=True):
    """The loss.

    Attributes:
        epsilon: the ratio is clipped below at `1 - epsilon`.
        epsilon_high: the ratio is clipped above at `1 + epsilon_high`; None means `epsilon`.
        beta: weight of the KL term against the reference model; 0 needs no reference.
        kl_estimator: which estimate of that KL.
        loss_agg_mode: how token losses become one number.
        max_response_tokens: the constant that `seq-mean-token-sum-norm` divides every episode by.
        rollout_is: `token` weighs each token's policy term (not its KL) by min(old / sampler, threshold).
        rollout_is_threshold: where that weight is truncated.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    kl_estimator: KlEstimator = "k3"
    loss_agg_mode: LossAggMode = "token-mean"
    max_response_tokens: int | None = None
    rollout_is: Literal["none", "token"] = "none"
    rollout_is_threshold: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.epsilon <= 1:
            raise ValueError(f"epsilon = {self.epsilon}; it must lie in (0, 1], and 0.2 is usual")
        if self.epsilon_high is not None and self.epsilon_high <= 0:
            raise ValueError(f"epsilon_high = {self.epsilon_high}; it must be above 0, or left out to mean epsilon")
        if self.beta < 0:
            raise ValueError(f"beta = {self.beta}; a negative KL weight drives the policy away; use 0 or more")
        if self.rollout_is_threshold <= 0:
            raise ValueError(f"rollout_is_threshold = {self.rollout_is_threshold}; it must be above 0, and 2 is usual")
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and not self.max_response_tokens:
            raise ValueError(
                'loss_agg_mode = "seq-mean-token-sum-norm" divides by max_response_tokens, which is '
                f"{self.max_response_tokens}; set it to 1 or more"
            )


def token_weight(config: LossConfig, episode_tokens: int) -> float:
    """What each token loss of an episode is multiplied by before the sum.

    Args:
        config: the loss.
        episode_tokens: trained tokens of the episode, over all its rows.
    """
    if config.loss_agg_mode == "seq-mean-token-mean":
        return 1.0 / max(episode_tokens, 1)
    if config.loss_agg_mode == "seq-mean-token-sum-norm":
        assert config.max_response_tokens is not None  # LossConfig refuses to be made without it
        return 1.0 / config.max_response_tokens
    return 1.0


def denominator(config: LossConfig, tokens: int, episodes: int) -> int:
    """What the weighted sum over a whole step is divided by: trained tokens for `token-mean`, else episodes.

    Args:
        config: the loss.
        tokens: trained tokens in the step.
        episodes: episodes in the step with at least one trained token.
    """
    return tokens if config.loss_agg_mode == "token-mean" else episodes


def token_logprobs(
    logits: jax.Array, targets: ArrayLike, temperature: ArrayLike, vocab_limit: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of sampled tokens under the distribution they were sampled from, and its entropy, in nats.

    Computed in float32, and never above 0: the target's logit less the largest is at most 0, and the logarithm that is
    taken off is that of a sum of at least 1.

    Args:
        logits: [..., V].
        targets: int32 [...].
        temperature: float32 [...], divides the logits as it did in the sampler.
        vocab_limit: rows of the table from here on belong to no token and get no probability.

    Returns:
        Two float32 arrays [...]; no gradient flows through the entropy.
    """
    scaled = logits.astype(jnp.float32) / jnp.asarray(temperature, jnp.float32)[..., None]
    if vocab_limit is not None:
        scaled = jnp.where(jnp.arange(scaled.shape[-1]) < vocab_limit, scaled, _MASKED_LOGIT)
    shifted = scaled - lax.stop_gradient(scaled.max(-1, keepdims=True))
    exponentials = jnp.exp(shifted)
    total = exponentials.sum(-1)
    logprobs = jnp.take_along_axis(shifted, jnp.asarray(targets)[..., None], -1)[..., 0] - jnp.log(total)
    # A dot product: a sum of products takes XLA's CPU backend four times as long, a quarter of the whole head's time.
    mean = jnp.einsum("...v,...v->...", exponentials, shifted, precision=lax.Precision.HIGHEST)
    entropy = jnp.log(total) - mean / total
    return logprobs, lax.stop_gradient(entropy)


def kl_estimate(config: LossConfig, current: jax.Array, reference: jax.Array) -> jax.Array:
    """Estimated KL(current || reference) per token, float32; see `KlEstimator`.

    Args:
        config: the loss.
        current: log-probs under the model that is trained.
        reference: log-probs under the reference model, same shape.
    """
    difference = reference.astype(jnp.float32) - current.astype(jnp.float32)
    if config.kl_estimator == "k1":
        return -difference
    if config.kl_estimator == "k2":
        return jnp.square(difference) / 2
    # Above the limit the whole estimate is constant: cutting only the exponential would leave the linear part's
    # gradient, which points the wrong way there.
    difference = jnp.minimum(difference, EXPONENT_LIMIT)
    return jnp.exp(difference) - 1 - difference


class LossSums(NamedTuple):
    """What one micro-batch adds to the step, float32 scalars.

    Attributes:
        loss: weighted sum of token losses; the only one that is differentiated.
        tokens: number of tokens below.
        kl: sum of the KL estimates against the reference.
        entropy: sum of entropies.
        clipped: number of tokens whose gradient the clip holds back.
        mismatch_kl: sum of k3 estimates of KL(sampler || old).
        nonfinite: number of tokens with a log-prob that is not finite.
    """

    loss: jax.Array
    tokens: jax.Array
    kl: jax.Array
    entropy: jax.Array
    clipped: jax.Array
    mismatch_kl: jax.Array
    nonfinite: jax.Array


class LossMaxima(NamedTuple):
    """Largest values over a micro-batch's tokens, float32 scalars.

    Attributes:
        is_ratio: old / sampler, before truncation.
        mismatch: |old - sampler| in nats.
    """

    is_ratio: jax.Array
    mismatch: jax.Array


def policy_loss(
    config: LossConfig,
    *,
    current: ArrayLike,
    sampler: ArrayLike,
    advantages: ArrayLike,
    weights: ArrayLike,
    mask: ArrayLike,
    entropy: ArrayLike,
    old: ArrayLike | None = None,
    reference: ArrayLike | None = None,
) -> tuple[jax.Array, tuple[LossSums, LossMaxima]]:
    """The clipped surrogate of PPO with group advantages (arXiv 1707.06347, 2402.03300), summed, not divided.

    What stands at masked positions (NaN, infinities, placeholders) reaches neither value nor gradient. A log-prob at
    a trained position that is not finite is not hidden: it is counted, and it spoils the loss.

    Args:
        config: the loss.
        current: log-probs under the model that is trained, [...].
        sampler: the sampler's log-probs.
        advantages: one per token.
        weights: what each token loss is multiplied by, from `token_weight`.
        mask: bool, true at trained tokens.
        entropy: of each token's distribution; for the metrics.
        old: the trainer's log-probs at step start; None means the current ones, stopped.
        reference: the reference model's log-probs; needed when `beta > 0`.

    Returns:
        The weighted sum of token losses, and the sums and maxima for the metrics.
    """
    mask = jnp.asarray(mask, jnp.bool_)

    def trained(values: ArrayLike) -> jax.Array:
        # Select before any arithmetic: multiplying by the mask afterwards would make 0 * NaN.
        return jnp.where(mask, jnp.asarray(values, jnp.float32), 0.0)

    current, sampler = trained(current), trained(sampler)
    advantages, weights, entropy = trained(advantages), trained(weights), trained(entropy)
    old = lax.stop_gradient(current if old is None else trained(old))
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high

    ratio = jnp.exp(jnp.minimum(current - old, EXPONENT_LIMIT))
    clipped = jnp.clip(ratio, 1 - config.epsilon, 1 + high)
    token_loss = -jnp.minimum(ratio * advantages, clipped * advantages)
    held_back = ((ratio < 1 - config.epsilon) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))

    drift = old - sampler
    is_ratio = jnp.exp(jnp.minimum(drift, EXPONENT_LIMIT))
    if config.rollout_is == "token":
        token_loss = token_loss * jnp.minimum(is_ratio, config.rollout_is_threshold)

    finite = jnp.isfinite(current) & jnp.isfinite(old)
    kl = jnp.zeros_like(current)
    if config.beta > 0:
        if reference is None:
            raise ValueError(f"beta = {config.beta} needs the reference model's log-probs, and there are none")
        reference = lax.stop_gradient(trained(reference))
        finite &= jnp.isfinite(reference)
        kl = kl_estimate(config, current, reference)
        token_loss = token_loss + config.beta * kl

    loss = (weights * token_loss).sum()
    sums = LossSums(
        loss=loss,
        tokens=mask.sum(dtype=jnp.float32),
        kl=kl.sum(),
        entropy=entropy.sum(),
        clipped=(held_back & mask).sum(dtype=jnp.float32),
        mismatch_kl=(is_ratio - 1 - jnp.minimum(drift, EXPONENT_LIMIT)).sum(),
        nonfinite=(~finite & mask).sum(dtype=jnp.float32),
    )
    maxima = LossMaxima(is_ratio=jnp.where(mask, is_ratio, 0.0).max(), mismatch=jnp.abs(drift).max())
    return loss, lax.stop_gradient((sums, maxima))

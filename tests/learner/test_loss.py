"""Against formulas written out in float64 NumPy, differentiated by central differences."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from trouper.learner.loss import LossConfig, denominator, kl_estimate, policy_loss, token_logprobs, token_weight
from trouper.learner.optimizer import OptimizerConfig, make_optimizer

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def formula(config, logits, case):
    """TRL's GRPO loss over padded completions [episodes, tokens], in float64."""
    scaled = logits / case["temperature"][..., None]
    top = scaled.max(-1, keepdims=True)
    table = scaled - top - np.log(np.exp(scaled - top).sum(-1, keepdims=True))
    current = np.take_along_axis(table, case["targets"][..., None], -1)[..., 0]
    old = case["old"] if case["old"] is not None else case["current_at_start"]
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    ratio = np.exp(current - old)
    advantages = case["advantages"][:, None]
    token = -np.minimum(ratio * advantages, np.clip(ratio, 1 - config.epsilon, 1 + high) * advantages)
    if config.rollout_is == "token":
        token = token * np.minimum(np.exp(old - case["sampler"]), config.rollout_is_threshold)
    if config.beta:
        d = case["reference"] - current
        token = token + config.beta * {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[config.kl_estimator]
    mask = case["mask"]
    if config.loss_agg_mode == "token-mean":
        return (token * mask).sum() / mask.sum()
    sums = (token * mask).sum(1)
    if config.loss_agg_mode == "seq-mean-token-mean":
        return (sums / mask.sum(1)).mean()
    if config.loss_agg_mode == "seq-mean-token-sum":
        return sums.mean()
    return (sums / config.max_response_tokens).mean()


def slope(function, x, h=1e-6):
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += h
        down[index] -= h
        gradient[index] = (function(up) - function(down)) / (2 * h)
    return gradient


def make_case(seed, with_old):
    rng = np.random.default_rng(seed)
    lengths, width, vocab = [5, 2, 4], 5, 7
    logits = rng.normal(size=(3, width, vocab)) * 2
    targets = rng.integers(0, vocab, (3, width))
    temperature = rng.choice([0.6, 1.0, 1.3], (3, 1)) * np.ones((3, width))
    scaled = logits / temperature[..., None]
    table = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    current = np.take_along_axis(table, targets[..., None], -1)[..., 0]
    return logits, {
        "targets": targets,
        "temperature": temperature,
        "mask": np.arange(width) < np.array(lengths)[:, None],
        "advantages": np.array([1.2, -0.7, 0.4]),
        "current_at_start": current,
        "old": current + rng.normal(size=current.shape) * 0.4 if with_old else None,
        "sampler": current + rng.normal(size=current.shape) * 0.8,
        "reference": current + rng.normal(size=current.shape) * 0.5,
    }


@functools.cache
def compiled(config):
    """Our undivided loss and its gradient by the logits."""

    def loss(logits, case, weights):
        current, entropy = token_logprobs(logits, case["targets"], case["temperature"])
        names = ("sampler", "mask", "old", "reference")
        arrays = {name: case[name] for name in names if case.get(name) is not None}
        advantages = case["advantages"][:, None] * jnp.ones_like(current)
        return policy_loss(config, current=current, advantages=advantages, weights=weights, entropy=entropy, **arrays)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rollout_is", ["none", "token"])
def test_loss_and_gradient_are_the_formulas_for_every_cut(mode, rollout_is):
    for (beta, kl), with_old in itertools.product([(0.0, "k3"), (0.1, "k1"), (0.1, "k2"), (0.1, "k3")], [False, True]):
        config = LossConfig(
            loss_agg_mode=mode,
            rollout_is=rollout_is,
            beta=beta,
            kl_estimator=kl,
            epsilon_high=0.28,
            rollout_is_threshold=1.5,
            max_response_tokens=8,
        )
        logits, case = make_case(seed=3, with_old=with_old)
        expected = formula(config, logits, case)
        gradient = slope(lambda x, c=config, k=case: formula(c, x, k), logits)
        divide_by = denominator(config, int(case["mask"].sum()), 3)
        weights = np.array([token_weight(config, int(n)) for n in case["mask"].sum(1)])[:, None] * np.ones((3, 5))
        # Mode and weights meet before the compiled part.
        on_device = compiled(msgspec.structs.replace(config, loss_agg_mode="token-mean"))
        for cut in ([[0, 1, 2]], [[0, 1], [2]], [[0], [1, 2]], [[2], [0], [1]]):
            value, found = 0.0, np.zeros_like(gradient)
            for part in cut:
                chosen = case | {"mask": case["mask"] & np.isin(np.arange(3), part)[:, None]}
                (loss, _), g = on_device(logits, chosen, weights)
                value += float(loss) / divide_by
                found += np.asarray(g) / divide_by
            assert value == pytest.approx(expected, abs=2e-6)
            assert np.linalg.norm(found - gradient) <= 1e-5 * np.linalg.norm(gradient)


@pytest.mark.parametrize("cut", [[[0, 1, 2]], [[0, 1], [2]], [[0], [1, 2]], [[0], [1], [2]]])
def test_one_division_for_the_whole_step(cut):
    episodes = [[2.0, 4.0], [1.0] * 6, [3.0] * 4]
    expected = {
        "token-mean": 2.0,
        "seq-mean-token-mean": 7 / 3,
        "seq-mean-token-sum-norm": 1.0,
        "seq-mean-token-sum": 8,
    }
    for mode, value in expected.items():
        config = LossConfig(loss_agg_mode=mode, max_response_tokens=8)
        total = 0.0
        for part in cut:
            losses = np.concatenate([np.array(episodes[e]) for e in part])
            weights = np.concatenate([np.full(len(episodes[e]), token_weight(config, len(episodes[e]))) for e in part])
            zeros = np.zeros(len(losses))
            # Ratio 1 and advantage -x: the token's loss is x.
            loss, _ = policy_loss(
                config,
                current=zeros,
                sampler=zeros,
                advantages=-losses,
                weights=weights,
                mask=zeros == 0,
                entropy=zeros,
            )
            total += float(loss)
        assert total / denominator(config, 12, 3) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("d", "value", "derivative"),
    [(0.0, 0.0, 0.0), (0.5, 0.1487213, -0.6487213), (-0.5, 0.1065307, 0.3934693), (-100.0, 99.0, 1.0)],
)
def test_k3_and_its_derivative(dtype, d, value, derivative):
    config = LossConfig(beta=1.0)
    current, reference = jnp.asarray(0.0, dtype), jnp.asarray(d, dtype)
    got, slope_ = jax.value_and_grad(lambda c: kl_estimate(config, c, reference))(current)
    assert got == pytest.approx(value, abs=1e-6)
    assert float(slope_) == pytest.approx(derivative, abs=2e-7 if dtype == jnp.float32 else 4e-3)


def test_k3_is_exact_up_to_its_limit_and_finite_beyond():
    config = LossConfig(beta=1.0)
    for d in (-20.0, -10.0, 10.0, 19.99):
        assert kl_estimate(config, jnp.float32(0), jnp.float32(d)) == pytest.approx(math.exp(d) - 1 - d, rel=2e-6)
    for d in (88.0, 89.0, 100.0):
        got, slope_ = jax.value_and_grad(lambda c, d=d: kl_estimate(config, c, jnp.float32(d)))(jnp.float32(0))
        assert math.isfinite(got)
        assert slope_ == 0.0  # A token beyond the limit has no gradient, as documented.


def one_step(config, logprobs, **case):
    """Loss, gradient, sums, and the parameters after one optimizer step."""
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in case.items() if name != "mask"}
    mask = jnp.asarray(case["mask"], bool)
    zeros = jnp.zeros(mask.shape)
    arrays.setdefault("sampler", jnp.where(mask, arrays.get("old", zeros), 0))

    def loss(current):
        return policy_loss(config, current=current, weights=jnp.ones(mask.shape), mask=mask, entropy=zeros, **arrays)

    current = jnp.asarray(logprobs, jnp.float32)
    (value, (sums, _)), gradient = jax.value_and_grad(loss, has_aux=True)(current)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1))
    start = jnp.zeros_like(current)
    updates, _ = optimizer.update(gradient, optimizer.init(start), start)
    return float(value), np.asarray(gradient), sums, np.asarray(start + updates)


def test_masked_positions_reach_neither_value_nor_gradient():
    value, gradient, sums, after = one_step(
        LossConfig(), [-1, math.nan, -1], old=[-1, 5, -201], advantages=[1, 1, 0], mask=[1, 0, 0]
    )
    assert value == -1.0
    assert gradient[0] == -1.0
    assert gradient[1:].tolist() == [0.0, 0.0]
    assert np.isfinite(after).all()
    assert sums.tokens == 1


@pytest.mark.parametrize("placeholder", [1.0, 0.0, math.nan, -math.inf])
def test_what_stands_at_a_masked_position_does_not_matter(placeholder):
    case = {"advantages": [1, -2, 1], "mask": [1, 1, 0], "old": [-1.1, -2.0, placeholder]}
    case |= {"sampler": [-1.0, -2.2, placeholder], "reference": [-1, -1, placeholder]}
    value, gradient, sums, after = one_step(LossConfig(beta=0.1, rollout_is="token"), [-1, -2, -3], **case)
    case |= {"old": [-1.1, -2.0, -3.0], "sampler": [-1.0, -2.2, -3.0], "reference": [-1, -1, -3]}
    plain = one_step(LossConfig(beta=0.1, rollout_is="token"), [-1, -2, -3], **case)
    assert value == plain[0]
    np.testing.assert_array_equal(gradient, plain[1])
    assert sums == plain[2]
    np.testing.assert_array_equal(after, plain[3])


def test_an_absurd_ratio_without_advantage_adds_nothing():
    value, gradient, _, after = one_step(LossConfig(), [-1.0], old=[-201.0], advantages=[0.0], mask=[1])
    assert value == 0.0
    assert gradient.tolist() == [0.0]
    assert np.isfinite(after).all()


def test_a_batch_without_trained_tokens_gives_zero():
    value, gradient, sums, _ = one_step(
        LossConfig(),
        np.full((4, 3), math.nan),
        old=np.full((4, 3), -1),
        advantages=np.ones((4, 3)),
        mask=np.zeros((4, 3)),
    )
    assert value == 0.0
    assert not gradient.any()
    assert sums.tokens == 0


def test_nan_at_a_trained_position_is_counted():
    config = LossConfig(beta=0.1)
    value, _, sums, _ = one_step(
        config, [-1, math.nan], old=[-1, -1], reference=[-1, -1], advantages=[1, 1], mask=[1, 1]
    )
    assert math.isnan(value)
    assert sums.nonfinite == 1


def test_temperature_divides_the_logits():
    logits = jnp.array([[2.0, 1.0, 0.0]] * 3)
    for temperature, expected in [
        (0.6, [-0.2025731, -1.8692398, -3.5359064]),
        (1.0, [-0.4076060, -1.4076060, -2.4076060]),
    ]:
        logprobs, entropy = token_logprobs(logits, jnp.arange(3), jnp.full(3, temperature))
        np.testing.assert_allclose(logprobs, expected, atol=1e-6)
        np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(), atol=1e-6)


def test_logprobs_are_never_positive_and_bfloat16_logits_are_widened():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(400, 50)) * 20 + rng.normal(size=(400, 1)) * 100)
    for dtype in (jnp.float32, jnp.bfloat16):
        cast = logits.astype(dtype)
        logprobs, _ = token_logprobs(cast, cast.argmax(-1), jnp.ones(400))
        assert logprobs.dtype == jnp.float32
        assert (logprobs <= 0).all()
        np.testing.assert_allclose(logprobs, jax.nn.log_softmax(cast.astype(jnp.float32)).max(-1), atol=1e-5)


def test_rows_of_the_table_beyond_the_tokenizer_have_no_probability():
    logits = jnp.array([[1.0, 2.0, 9.0, 9.0]])
    logprobs, entropy = token_logprobs(logits, jnp.array([1]), jnp.ones(1), vocab_limit=2)
    alone, entropy_alone = token_logprobs(logits[:, :2], jnp.array([1]), jnp.ones(1))
    np.testing.assert_allclose(logprobs, alone)
    np.testing.assert_allclose(entropy, entropy_alone)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": 0.0},
        {"epsilon_high": -0.1},
        {"beta": -1.0},
        {"rollout_is_threshold": 0.0},
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        {"loss_agg_mode": "mean"},
        {"kl_estimator": "k4"},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, LossConfig)

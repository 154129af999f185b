"""Token drawing: the exact distribution, its log-probs, and what it depends on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trouper.learner import sampling

sample = jax.jit(sampling.sample, static_argnames="vocab_limit")
uniforms = jax.jit(sampling.uniforms)
kept = jax.jit(sampling.kept)


def log_softmax(logits: NDArray[Any], temperature: float = 1.0) -> NDArray[np.float64]:
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(-1, keepdims=True)
    return scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))


def draw(
    logits: NDArray[np.float32], count: int, temperature: float = 1.0, **kwargs: Any
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The same logits with `count` uniforms."""
    many = jnp.asarray(np.broadcast_to(logits, (count, len(logits))))
    u = uniforms(jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 7))
    ids, logprobs = sample(many, u, jnp.full(count, temperature), **kwargs)
    return np.asarray(ids), np.asarray(logprobs)


def chi_square(counts: NDArray[Any], probabilities: NDArray[np.float64]) -> float:
    """The statistic in standard deviations above its mean, for the ids that are expected at least 5 times."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    return float((((observed - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("vocabulary", [2, 13, 16, 97])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    logits = np.random.default_rng(vocabulary).normal(size=vocabulary).astype(np.float32) * 1.5
    ids, _ = draw(logits, 20_000)
    assert chi_square(np.bincount(ids, minlength=vocabulary), np.exp(log_softmax(logits))) < 4


def test_draws_are_the_inverse_of_the_cumulative_distribution() -> None:
    logits = np.random.default_rng(1).normal(size=(400, 101)).astype(np.float32)
    u = np.random.default_rng(2).uniform(size=400).astype(np.float32)
    ids, _ = sample(jnp.asarray(logits), jnp.asarray(u), jnp.ones(400))
    cumulated = np.exp(log_softmax(logits)).cumsum(-1)
    at = np.asarray(ids)
    upper = np.take_along_axis(cumulated, at[:, None], 1)[:, 0]
    lower = np.where(at > 0, np.take_along_axis(cumulated, np.maximum(at - 1, 0)[:, None], 1)[:, 0], 0.0)
    assert (lower - 1e-6 <= u).all()
    assert (u <= upper + 1e-6).all()


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.6, [-0.2025731, -1.8692398, -3.5359064]), (1.0, [-0.4076060, -1.4076060, -2.4076060])],
)
def test_logprobs_are_after_temperature(temperature: float, expected: list[float]) -> None:
    ids, logprobs = draw(np.array([2, 1, 0], np.float32), 500, temperature)
    assert set(ids) == {0, 1, 2}
    np.testing.assert_allclose(logprobs, np.array(expected)[ids], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.3, 5.0])
def test_logprobs_equal_float64(temperature: float) -> None:
    logits = np.random.default_rng(3).normal(size=1000).astype(np.float32) * 4
    ids, logprobs = draw(logits, 300, temperature)
    np.testing.assert_allclose(logprobs, log_softmax(logits, temperature)[ids], atol=2e-6)


def test_each_slot_has_its_own_temperature() -> None:
    logits = np.random.default_rng(4).normal(size=(3, 50)).astype(np.float32)
    temperatures = [0.6, 1.0, 1.3]
    ids, logprobs = sample(jnp.asarray(logits), jnp.full(3, 0.4), jnp.array(temperatures))
    for slot, temperature in enumerate(temperatures):
        expected = log_softmax(logits[slot], temperature)[ids[slot]]
        assert float(logprobs[slot]) == pytest.approx(expected, abs=1e-6)


def test_greedy_takes_the_first_of_the_highest_and_is_certain() -> None:
    logits = np.array([[0, 3, 1, 3, 2], [5, 1, 1, 1, 1], [0, 0, 0, 0, 9]], np.float32)
    ids, logprobs = sample(jnp.asarray(logits), jnp.array([0.99, 0.5, 0.0]), jnp.zeros(3))
    assert ids.tolist() == [1, 0, 4]
    assert logprobs.tolist() == [0, 0, 0]


@pytest.mark.parametrize("vocabulary", [2, 7, 16, 60, 256])
@pytest.mark.parametrize("uniform", [0.0, 2**-24, 0.5, 1 - 2**-23, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_give_ids_that_exist(vocabulary: int, uniform: float) -> None:
    logits = np.random.default_rng(vocabulary).normal(size=(64, vocabulary)).astype(np.float32) * 10
    ids, logprobs = map(np.asarray, sample(logits, np.full(64, uniform, np.float32), np.ones(64, np.float32)))
    assert ((ids >= 0) & (ids < vocabulary)).all()
    assert np.isfinite(logprobs).all()
    assert (logprobs <= 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_beyond_the_tokenizer_are_never_drawn_and_have_no_share(temperature: float) -> None:
    logits = np.zeros(16, np.float32)
    logits[12:] = 9.0  # the padded rows are the most likely ones
    ids, logprobs = draw(logits, 5000, temperature, vocab_limit=12)
    assert ids.max() < 12
    np.testing.assert_allclose(logprobs, 0.0 if temperature == 0 else -np.log(12), atol=1e-6)


@pytest.mark.parametrize(
    ("top_p", "top_k", "survivors"),
    [
        (1.0, 0, [0, 1, 2, 3, 4]),
        (1.0, 2, [1, 3]),
        (1.0, 1, [3]),
        (1.0, 99, [0, 1, 2, 3, 4]),
        (0.39, 0, [3]),
        (0.41, 0, [1, 3]),
        (0.71, 0, [1, 2, 3]),
        (0.6, 2, [1, 3]),
        (0.5, 2, [3]),  # top-p counts within what top-k kept: 0.4 / 0.7 > 0.5
        (1e-6, 0, [3]),
    ],
)
def test_top_p_and_top_k_keep_and_renormalise(top_p: float, top_k: int, survivors: list[int]) -> None:
    probabilities = np.array([0.1, 0.3, 0.15, 0.4, 0.05])
    logits = np.log(probabilities).astype(np.float32)
    top = (jnp.full(4000, top_p), jnp.full(4000, top_k))
    ids, logprobs = draw(logits, 4000, top=top)
    assert sorted(set(ids.tolist())) == survivors
    expected = np.log(probabilities / probabilities[survivors].sum())[ids]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_equal_logits_are_kept_lowest_id_first() -> None:
    keep = kept(jnp.zeros((1, 6)), jnp.ones(1), jnp.array([4]))
    assert keep.tolist() == [[True, True, True, True, False, False]]


def kept_by_sorting(logits: NDArray[np.float32], top_p: float, top_k: int) -> NDArray[np.bool_]:
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    mass = np.exp(logits[order].astype(np.float64) - logits.max())
    before = (mass.cumsum() - mass) / mass.sum()
    assume(top_p == 1 or np.abs(before - top_p).min() > 1e-6)  # else rounding decides
    mask = np.zeros(len(logits), np.bool_)
    mask[order[(before < top_p) | (top_p == 1)]] = True
    return mask


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32 - 1), ties=st.sampled_from([0, 1, 3]), hidden=st.booleans())
def test_what_is_kept_is_what_sorting_finds(seed: int, ties: int, hidden: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(8, 37)) * rng.choice([0.1, 3, 40], size=(8, 1))).astype(np.float32)
    if ties:  # among them zeros of both signs
        logits = np.round(logits / ties) * ties
    if hidden:
        logits[:, 30:] = -np.inf
    top_p = rng.choice(np.array([0.0123457, 0.5012347, 0.9501237, 1], np.float32), 8)
    top_k = rng.choice(np.array([0, 1, 5, 36, 37, 99], np.int32), 8)
    keep = np.asarray(kept(logits, top_p, top_k))
    for row, p, k, mask in zip(logits, top_p.tolist(), top_k.tolist(), keep, strict=True):
        likely = np.exp(row - row.max()) > 0  # what has no mass is never drawn, kept or not
        np.testing.assert_array_equal(mask & likely, kept_by_sorting(row, p, k) & likely)


@pytest.mark.parametrize("top", [(1.0, 0), (0.9, 0), (1.0, 2), (0.9, 2)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_logit_that_is_no_number_is_not_hidden_by_a_limit(top: tuple[float, int], sign: int) -> None:
    logits = np.array([[1, 2, np.copysign(np.nan, sign), 3]], np.float32)
    limits = (jnp.array([top[0]]), jnp.array([top[1]]))
    _, logprobs = sample(jnp.asarray(logits), jnp.array([0.5]), jnp.ones(1), limits)
    assert np.isnan(logprobs).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_a_greedy_slot_is_not_certain_of_logits_that_are_not_finite(bad: float) -> None:
    logits = np.array([[1, 2, bad, 3], [bad] * 4, [1, 2, -np.inf, 3]], np.float32)
    _, logprobs = sample(jnp.asarray(logits), jnp.full(3, 0.5), jnp.zeros(3))
    assert np.isnan(logprobs).tolist() == [True, True, False]


def test_a_slot_without_limits_draws_the_same_next_to_one_with_limits() -> None:
    logits = np.random.default_rng(5).normal(size=(64, 100)).astype(np.float32)
    u = uniforms(jnp.arange(64, dtype=jnp.uint32), jnp.arange(64))
    alone = sample(jnp.asarray(logits), u, jnp.ones(64))
    top_p = jnp.where(jnp.arange(64) % 2 == 0, 1.0, 0.5)
    together = sample(jnp.asarray(logits), u, jnp.ones(64), (top_p, jnp.zeros(64, jnp.int32)))
    np.testing.assert_array_equal(alone[0][::2], together[0][::2])
    np.testing.assert_allclose(alone[1][::2], together[1][::2], atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), position=st.integers(0, 2**20), place=st.integers(0, 5))
def test_a_uniform_depends_on_seed_and_position_alone(seed: int, position: int, place: int) -> None:
    alone = uniforms(np.array([seed], np.uint32), np.array([position], np.int32))
    seeds, positions = np.arange(6, dtype=np.uint32), np.arange(6, dtype=np.int32)
    seeds[place], positions[place] = seed, position
    assert float(alone[0]) == float(uniforms(seeds, positions)[place])
    assert 0 <= float(alone[0]) < 1


def test_uniforms_of_neighbouring_seeds_and_positions_are_unrelated() -> None:
    seeds, positions = np.meshgrid(np.arange(100), np.arange(100))
    u = np.asarray(uniforms(jnp.asarray(seeds.ravel(), jnp.uint32), jnp.asarray(positions.ravel()))).reshape(100, 100)
    assert abs(u.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.04
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.04
    assert len(np.unique(u)) > 9900

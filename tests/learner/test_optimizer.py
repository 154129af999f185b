import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest

from trouper.learner.optimizer import OptimizerConfig, learning_rate, make_optimizer


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_rises_stays_or_falls_and_then_stays(schedule):
    rate = learning_rate(
        OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=4, decay_steps=12, end_fraction=0.1)
    )
    assert [float(rate(step)) for step in (0, 1, 2, 4)] == pytest.approx([0, 0.25, 0.5, 1])
    middle, end = {"constant": (1, 1), "linear": (0.55, 0.1), "cosine": (0.55, 0.1)}[schedule]
    assert float(rate(8)) == pytest.approx(middle)
    assert float(rate(12)) == pytest.approx(end)
    assert float(rate(1000)) == pytest.approx(end)


def test_without_warmup_the_first_step_has_the_full_rate():
    assert float(learning_rate(OptimizerConfig(learning_rate=0.5))(0)) == 0.5


def test_adamw_is_the_published_rule_and_decays_matrices_only():
    config = OptimizerConfig(learning_rate=0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.5, max_grad_norm=1.0)
    params = [jnp.full((2, 2), 2.0), jnp.full(2, 2.0)]
    gradients = [jnp.full((2, 2), 3.0), jnp.full(2, -4.0)]
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    norm = np.sqrt(4 * 9 + 2 * 16)
    moment = square = np.zeros(2)
    expected = np.array([2.0, 2.0])
    for step in (1, 2):
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        g = np.array([3.0, -4.0]) / norm
        moment = 0.8 * moment + 0.2 * g
        square = 0.9 * square + 0.1 * g**2
        rule = moment / (1 - 0.8**step) / (np.sqrt(square / (1 - 0.9**step)) + 1e-3)
        expected = expected - 0.1 * (rule + 0.5 * expected * np.array([1, 0]))
    np.testing.assert_allclose([params[0][0, 0], params[1][0]], expected, rtol=1e-5)


def test_sgd_without_clipping_takes_the_gradient_as_it_is():
    optimizer = make_optimizer(OptimizerConfig(name="sgd", learning_rate=2.0, max_grad_norm=0))
    params = [jnp.zeros(3)]
    updates, _ = optimizer.update([jnp.full(3, 100.0)], optimizer.init(params), params)
    np.testing.assert_array_equal(updates[0], np.full(3, -200.0))


def test_the_state_of_a_run_that_drops_clipping_still_fits():
    params = [jnp.zeros(3)]
    with_limit, without = (make_optimizer(OptimizerConfig(max_grad_norm=limit)).init(params) for limit in (1.0, 0.0))
    assert jax.tree.structure(with_limit) == jax.tree.structure(without)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "adagrad"},
        {"learning_rate": 0.0},
        {"warmup_steps": -1},
        {"schedule": "linear"},
        {"schedule": "cosine", "warmup_steps": 5, "decay_steps": 5},
        {"end_fraction": 2.0},
        {"name": "adam", "weight_decay": 0.1},
        {"max_grad_norm": -1.0},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, OptimizerConfig)

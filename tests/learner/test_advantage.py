import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from trouper.channels import ConfigError, RewardError
from trouper.learner.advantage import group_advantages, scored, step_scale


@pytest.mark.parametrize("nothing", [None, math.nan, np.float32("nan")])
def test_a_member_without_a_reward_shifts_nobody(nothing):
    rewards = [1, nothing, 0, 1]
    np.testing.assert_allclose(group_advantages(rewards), [0.5773493, 0, -1.1546985, 0.5773493], rtol=0, atol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, estimator="dr_grpo"), [1 / 3, 0, -2 / 3, 1 / 3], atol=1e-7)
    assert scored(rewards).tolist() == [True, False, True, True]


def test_rewards_may_be_numpy_floats_and_booleans():
    np.testing.assert_array_equal(
        group_advantages([np.float32(1), True, np.bool_(False), 0]), group_advantages([1.0, 1.0, 0.0, 0.0])
    )


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, np.float64("inf"), "1", [1.0]])
def test_what_is_no_reward_is_refused_with_the_functions_name(wrong):
    with pytest.raises(RewardError, match="exact_match gave member 1"):
        group_advantages([0.0, wrong], name="exact_match")


def test_two_reward_functions_are_normalised_apart_and_added():
    both = group_advantages([1, 0, 1, 0]) + group_advantages([None, 2, 4, 6])
    np.testing.assert_allclose(both, [0.8660254, -1.8660254, 0.8660254, 0.1339746], atol=5e-6)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize(
    "rewards", [[0.7], list(np.full(7, 0.3, np.float32)), [0.1, 0.1, 0.1], [None, 1.0, None, None], [], [None] * 3]
)
def test_no_contrast_gives_exactly_zero(estimator, rewards):
    advantages = group_advantages(rewards, estimator=estimator)
    assert advantages.dtype == np.float32
    assert advantages.tolist() == [0.0] * len(rewards)


def test_the_standard_deviation_is_the_sample_one():
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0]), [1.499997, -0.499999, -0.499999, -0.499999], atol=1e-6)
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], scale_rewards="none"), [0.75, -0.25, -0.25, -0.25])


def test_leave_one_out_takes_off_the_mean_of_the_others():
    rewards = [1.0, 0.5, None, 3.0]
    expected = [1 - 1.75, 0.5 - 2.0, 0, 3 - 0.75]
    np.testing.assert_allclose(group_advantages(rewards, estimator="rloo"), expected, atol=1e-6)


def test_the_step_is_scaled_by_all_centred_rewards_that_exist():
    rewards = [[1, 0, None], [5, 5], [2, 4, 6]]
    centred = [group_advantages(r, scale_rewards="batch") for r in rewards]
    scale = step_scale(centred, [scored(r) for r in rewards])
    assert scale == pytest.approx(np.std([0.5, -0.5, 0, 0, -2, 0, 2], ddof=1), rel=1e-5)
    assert step_scale([], []) == 1.0
    assert step_scale([np.zeros(4, np.float32)], [np.ones(4, bool)]) == 1.0


def test_dr_grpo_scaled_by_group_is_refused():
    with pytest.raises(ConfigError, match="dr_grpo"):
        group_advantages([1, 0], estimator="dr_grpo", scale_rewards="group")


@settings(deadline=None)
@given(
    st.lists(st.none() | st.floats(-1e6, 1e6, width=32), max_size=9),
    st.sampled_from(["grpo", "dr_grpo", "rloo"]),
)
def test_advantages_are_finite_centred_and_follow_their_members(rewards, estimator):
    advantages = group_advantages(rewards, estimator=estimator)
    assert np.isfinite(advantages).all()
    assert not advantages[~scored(rewards)].any()
    assert abs(advantages.sum(dtype=np.float64)) <= 1e-5 * max(np.abs(advantages).sum(dtype=np.float64), 1e-30)
    order = np.argsort([hash((i, len(rewards))) % 97 for i in range(len(rewards))], kind="stable")
    shuffled = group_advantages([rewards[i] for i in order], estimator=estimator)
    np.testing.assert_allclose(shuffled, advantages[order], rtol=1e-4, atol=1e-6)

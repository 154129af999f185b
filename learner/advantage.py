"""Advantages of one group of episodes, from their rewards. Pure NumPy; knows neither tokens nor models.

Conventions, the same in the whole library: statistics are taken per episode (never per row or token) over the members
that have a reward; standard deviations are sample ones (`ddof=1`); `EPSILON` is added to them before the division;
equal rewards give exactly 0, decided by `max == min` and not by a standard deviation that rounding can lift.
"""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trouper.channels import ConfigError, RewardError

AdvantageEstimator: TypeAlias = Literal["grpo", "dr_grpo", "rloo"]
"""`grpo`: minus the group's mean (arXiv 2402.03300). `dr_grpo`: the same and never divided by the group's standard
deviation (arXiv 2503.20783). `rloo`: minus the mean of the other members (arXiv 2402.14740)."""

ScaleRewards: TypeAlias = Literal["group", "batch", "none"]
"""What centred rewards are divided by: their group's standard deviation, that of the whole step, or nothing."""

EPSILON = 1e-6


def scaling(estimator: AdvantageEstimator, scale_rewards: ScaleRewards | None) -> ScaleRewards:
    """What an estimator divides by; None asks for its own: `group` for `grpo`, `none` for the others.

    Raises:
        ConfigError: `dr_grpo` is asked to scale by group, which would make it `grpo`.
    """
    if scale_rewards is None:
        return "group" if estimator == "grpo" else "none"
    if estimator == "dr_grpo" and scale_rewards == "group":
        raise ConfigError(
            'advantage_estimator = "dr_grpo" with scale_rewards = "group" contradict each other: dr_grpo is grpo '
            'without that division; ask for "grpo", or for scale_rewards = "none" or "batch"'
        )
    return scale_rewards


def reward_values(rewards: Sequence[float | None], *, name: str = "reward") -> NDArray[np.float64]:
    """Rewards as numbers, NaN where a member has none.

    Args:
        rewards: one per member; None and NaN both mean "no reward could be given".
        name: of the reward function, for the error.

    Raises:
        RewardError: a reward is infinite or not a number.
    """
    values = np.full(len(rewards), np.nan)
    for member, reward in enumerate(rewards):
        if reward is None:
            continue
        if not isinstance(reward, Real | np.bool_):
            raise RewardError(
                f"{name} gave member {member} {reward!r} ({type(reward).__name__}); "
                "a reward is a number, or None where none can be given"
            )
        if math.isinf(reward):
            raise RewardError(
                f"{name} gave member {member} {reward}; a reward is finite, or None where none can be given"
            )
        values[member] = float(reward)
    return values


def scored(rewards: Sequence[float | None]) -> NDArray[np.bool_]:
    """Which members have a reward, bool [G]; the others are left out of every statistic and of the loss."""
    return ~np.isnan(reward_values(rewards))


def group_advantages(
    rewards: Sequence[float | None],
    *,
    estimator: AdvantageEstimator = "grpo",
    scale_rewards: ScaleRewards | None = None,
    name: str = "reward",
) -> NDArray[np.float32]:
    """Advantages of one group's members.

    A member without a reward, a lone member and members with equal rewards get exactly 0. With `beta > 0` the latter
    two still feel the KL term of the loss; a member without a reward feels nothing.

    Args:
        rewards: one per member, None or NaN where no reward could be given.
        estimator: the baseline that is taken off.
        scale_rewards: None for the estimator's own scaling. `batch` needs the whole step: the result is then only
            centred, and whoever holds the step divides by `step_scale`.
        name: of the reward function, for errors.

    Returns:
        float32 [G].

    Raises:
        RewardError: a reward is infinite or not a number.
        ConfigError: estimator and scaling contradict each other.
    """
    divide_by = scaling(estimator, scale_rewards)
    values = reward_values(rewards, name=name)
    has_reward = ~np.isnan(values)
    advantages = np.zeros(len(values))
    known = values[has_reward]
    if known.size < 2 or known.max() == known.min():
        return advantages.astype(np.float32)
    centred = known - known.mean()
    if estimator == "rloo":
        # r_i - mean of the others == (r_i - mean of all) * n / (n - 1).
        centred *= known.size / (known.size - 1)
    if divide_by == "group":
        centred /= known.std(ddof=1) + EPSILON
    advantages[has_reward] = centred
    return advantages.astype(np.float32)


def step_scale(advantages: Sequence[NDArray[np.float32]], has_reward: Sequence[NDArray[np.bool_]]) -> float:
    """What `scale_rewards = "batch"` divides a step's centred advantages by.

    Args:
        advantages: per group, float32 [G], centred.
        has_reward: per group, bool [G]; members without a reward are left out.

    Returns:
        The sample standard deviation over all members that have a reward, plus `EPSILON`; 1 when it is undefined.
    """
    known = [a[h].astype(np.float64) for a, h in zip(advantages, has_reward, strict=True)]
    flat = np.concatenate(known) if known else np.zeros(0)
    if flat.size < 2 or flat.max() == flat.min():
        return 1.0
    return float(flat.std(ddof=1)) + EPSILON

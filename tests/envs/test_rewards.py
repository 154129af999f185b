import sys

import numpy as np
import pytest

from trouper.channels import ConfigError, Message, RewardError, Task
from trouper.envs import Rewards, load_rewards
from trouper.envs.rewards import checked_reward

TASK = Task("t", {"answer": "5"})
TALK = (
    Message("user", "2 + 3?"),
    Message("assistant", "4"),
    Message("user", "Sure?"),
    Message("assistant", "<think>\nno\n</think>\n\n5"),
    Message("tool", "6"),
)


def exact(task, messages, text):
    return text == task.payload["answer"]


async def short(task, messages, text):
    return np.float32(len(messages))


def abstain(task, messages, text):
    return None


def broken(task, messages, text):
    return 1 / 0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), (np.float64(0.5), 0.5), (np.bool_(True), 1.0), (None, None), (float("nan"), None)],
)
def test_what_a_reward_may_be(value, expected):
    checked = checked_reward("judge", value)
    assert checked == expected
    assert type(checked) in (float, type(None))


@pytest.mark.parametrize("value", [float("inf"), -np.inf, "1", [1.0], 1j, np.ones(2)])
def test_what_a_reward_may_not_be(value):
    with pytest.raises(RewardError, match="'judge' returned"):
        checked_reward("judge", value)


async def test_a_weighted_sum_of_those_that_could_judge():
    score = await Rewards({"exact": exact, "short": short, "abstain": abstain}, (1.0, 0.5, 9.0)).score(TASK, TALK)
    assert score.parts == {"exact": 1.0, "short": 5.0, "abstain": None}
    assert score.total == 3.5


async def test_no_judgement_is_no_reward():
    assert (await Rewards({"abstain": abstain}, (1.0,)).score(TASK, TALK)).total is None
    assert (await Rewards({}, ()).score(TASK, TALK)).total is None
    assert (await Rewards({"exact": exact}, (1.0,)).score(TASK, ())).total == 0.0


async def test_a_function_that_raises_is_named():
    with pytest.raises(RewardError, match=r"'broken' raised ZeroDivisionError for task 't'"):
        await Rewards({"broken": broken}, (1.0,)).score(TASK, TALK)


@pytest.mark.parametrize("values", [(1.7e308, 1.7e308), (1.7e308, 1.7e308, -1.7e308)])
async def test_a_sum_too_large_for_a_number_is_no_reward(values):
    functions = {str(index): lambda *_, value=value: value for index, value in enumerate(values)}
    with pytest.raises(RewardError, match=r"weighted sum .* give smaller rewards or weights"):
        await Rewards(functions, (10.0,) * len(values)).score(TASK, TALK)


async def test_functions_may_be_given_as_they_are():
    def near(task, messages, text):
        return 0.5

    assert (await load_rewards([near]).score(TASK, TALK)).parts == {"near": 0.5}
    with pytest.raises(ConfigError, match="two reward functions are called '<lambda>'"):
        load_rewards([lambda *_: 1.0, lambda *_: 2.0])
    with pytest.raises(ConfigError, match="reward function 3 is a int"):
        load_rewards([3])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A user's file in the current directory."""
    (tmp_path / "my_rewards.py").write_text("def exact(task, messages, text):\n    return 1\n\nlevel = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("my_rewards", None)


@pytest.mark.usefixtures("here")
async def test_functions_by_name():
    rewards = load_rewards(["my_rewards:exact"], [2.0])
    assert rewards.names == ("exact",)
    assert (await rewards.score(TASK, TALK)).total == 2.0
    assert (await load_rewards(["my_rewards:exact"]).score(TASK, TALK)).total == 1.0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (["my_rewards:exact"], [1.0, 2.0], "1 reward functions were given 2 weights"),
        (["my_rewards:level"], None, "is a int and cannot be called"),
        (["my_rewards:exact", "my_rewards:exact"], None, "two reward functions are called 'exact'"),
        (["my_rewards:exakt"], None, "did you mean 'exact'"),
    ],
)
def test_functions_that_cannot_be(names, weights, message):
    with pytest.raises(ConfigError, match=message):
        load_rewards(names, weights)

import numpy as np
import pytest

from trouper.channels import ConfigError, EnvironmentFailure, Task
from trouper.envs import StepResult, checked_observation, checked_score, checked_step, inline
from trouper.envs.single_turn import SingleTurn


class Maze:
    pass


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array([0.25], np.float32), 0.25), (np.bool_(False), 0.0)],
)
def test_rewards_become_python_floats(reward, expected):
    checked = checked_step(Maze(), StepResult("o", reward, metrics={"m": np.int64(3)}), 1)
    assert checked == StepResult("o", expected, metrics={"m": 3.0})
    assert type(checked.reward) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("o", 1.0, True), "return value at step 3 is .*tuple.*, not a StepResult"),
        (("o", 1.0, True, False, {}, 6), "not a StepResult"),
        (None, "NoneType"),
        (StepResult({"o": 1}), r"observation at step 3 is \{'o': 1\} \(dict\)"),
        (StepResult(b"o"), "observation at step 3 .*bytes"),
        (StepResult(np.zeros(3)), "observation at step 3 .*ndarray"),
        (StepResult("o", float("nan")), "reward at step 3 is nan"),
        (StepResult("o", float("inf")), "reward at step 3 is inf"),
        (StepResult("o", None), "reward at step 3 is None"),
        (StepResult("o", "1"), "reward at step 3 is '1'"),
        (StepResult("o", np.ones(2)), "reward at step 3"),
        (StepResult("o", 0, "yes"), "done at step 3 is 'yes'"),
        (StepResult("o", truncated=1), "truncated at step 3"),
        (StepResult("o", metrics={"m": "high"}), r"metrics\['m'\] at step 3"),
        (StepResult("o", metrics=[1]), "metrics at step 3"),
        (StepResult("o", metrics={1: 1}), "metrics at step 3"),
    ],
)
def test_what_a_step_may_not_return_is_named(value, message):
    with pytest.raises(EnvironmentFailure, match=f"Maze: .*{message}") as caught:
        checked_step(Maze(), value, 3)
    assert caught.value.kind == "env_error"
    assert len(str(caught.value)) < 300


def test_reset_gives_text():
    assert checked_observation(Maze(), "text", 0) == "text"
    for value in (("text", {}), ("a", "b"), None, 3):
        with pytest.raises(EnvironmentFailure, match="Maze: observation at reset"):
            checked_observation(Maze(), value, 0)


def test_a_score_is_a_number_or_none():
    assert checked_score(Maze(), None, 4) is None
    assert checked_score(Maze(), np.float64(0.5), 4) == 0.5
    with pytest.raises(EnvironmentFailure, match=r"reward\(\) at step 4 is nan"):
        checked_score(Maze(), float("nan"), 4)


async def test_inline_runs_plain_and_async_functions():
    async def later():
        return 2

    assert await inline(lambda: 1) == 1
    assert await inline(later) == 2


async def test_single_turn():
    world = SingleTurn("question")
    assert await world.reset(Task("t", {"question": "Why?"})) == "Why?"
    assert (await world.step("So.")).done
    with pytest.raises(ConfigError, match=r"task 't' has no field 'question' .* it has: prompt"):
        await world.reset(Task("t", {"prompt": "Why?"}))

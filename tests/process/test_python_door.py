"""`trouper.actors.launch.train`: what is named in a file, given as objects."""

import json
from pathlib import Path

import pytest
from msgspec import Struct

from trouper.actors.launch import train
from trouper.actors.metrics import read_metrics
from trouper.channels import ConfigError
from trouper.envs import StepResult

TINY = {
    "model": {
        "scratch": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 32,
        }
    },
    "chat": {"format": "plain", "alphabet": "0123456789;<>=?", "stop": ";"},
    "sampling": {"max_prompt_tokens": 1, "max_response_tokens": 2, "max_context_tokens": 16},
    "engine": {"slots": 4, "chunk": 2, "prefill_rows": 4, "prefill_tokens": 2},
    "rollout": {"num_generations": 2, "max_concurrency": 4},
    "train": {"max_steps": 2, "groups_per_step": 2},
}
TASKS = [{"prompt": str(digit), "answer": str(digit)} for digit in range(5)]


class Echo:
    """Wants its digit back."""

    def __init__(self, worth: float = 1.0) -> None:
        self.worth = worth

    def reset(self, task):
        self.wanted = task.payload["prompt"]
        return self.wanted

    def step(self, action):
        return StepResult("", self.worth * (self.wanted in action), done=True)


class Length(Struct):
    """A reward function that is an object."""

    factor: float

    def __call__(self, task, messages, text):
        return self.factor * len(text)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.slow
def test_objects_stand_in_for_names_and_sections_may_hold_them():
    environment = {"name": Echo, "arguments": {"worth": 3.0}, "step_timeout": 5.0}
    reward = {"functions": [Length(0.5), "my_rewards:long"], "weights": [2.0, 1.0]}
    Path("my_rewards.py").write_text("def long(task, messages, text):\n    return len(text) > 1\n")
    tasks = {"source": TASKS, "epochs": 1, "shuffle": False}
    assert train(**TINY, tasks=tasks, environment=environment, reward=reward, run_dir="out") == 0
    metrics = read_metrics("out/metrics.jsonl")
    assert {"rewards/Length/mean", "rewards/long/mean"} <= metrics[1].keys()
    episodes = [json.loads(line) for line in Path("out/episodes.jsonl").read_text().splitlines()]
    assert {episode["slot"] for episode in episodes} <= {0, 1, 2, 3}
    assert "step_timeout = 5.0" in Path("out/config.toml").read_text()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tasks": {"prompt": "1"}}, "tasks.prompt"),
        ({"tasks": []}, "a list of tasks is empty"),
        ({"tasks": ["1", "2"]}, r"tasks\[0\] is '1'; a task is a dict"),
        ({"tasks": 3}, "tasks = 3; give a list"),
        ({"reward": [3]}, "reward function 3 is a int"),
        ({"reward": "nowhere:exact"}, "there is no module 'nowhere'"),
        ({"environment": {"name": Echo, "arguments": {"wort": 1}}}, "cannot be made with wort"),
        ({"environment": 3}, "3 is a int"),
        ({"agent": 3}, "agent = 3"),
        ({"agent": {"arguments": {"x": 1}}}, "takes no arguments"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(given, said):
    with pytest.raises(ConfigError, match=said):
        train(**{**TINY, "tasks": TASKS, **given}, run_dir="out")
    assert not Path("out").exists()

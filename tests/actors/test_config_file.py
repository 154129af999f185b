import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.config import RunConfig, Train
from trouper.actors.config_file import _ELSEWHERE, dump_config, flatten, key_paths, load_config, parse_config
from trouper.channels import ConfigError
from trouper.learner.optimizer import OptimizerConfig

MINIMAL = {"model": {"source": "some/model"}, "tasks": {"source": "tasks.jsonl"}}
SCRATCH = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
}


def with_keys(table):
    """The minimal tables and some more, one level deep."""
    merged = {name: dict(section) for name, section in MINIMAL.items()}
    for name, value in table.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def refusal(table):
    with pytest.raises(ConfigError) as caught:
        parse_config(with_keys(table))
    return str(caught.value)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "run.toml", '[model]\nsource = "some/model"\n[tasks]\nsource = "tasks.jsonl"\n')


def test_what_is_left_out_has_its_default():
    config = parse_config(MINIMAL)
    assert config.model.source == "some/model"
    assert config.rollout.num_generations == 8
    assert config.optimizer == OptimizerConfig()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"train": {"learning_rte": 0.1}}, "train.learning_rte = 0.1: .*did you mean optimizer.learning_rate"),
        ({"rollout": {"group-size": 4}}, "rollout.group-size = 4: .*did you mean rollout.num_generations"),
        ({"rollout": {"num-generations": 4}}, "rollout.num-generations = 4: .*did you mean rollout.num_generations"),
        ({"temperature": 1.0}, r"temperature = 1.0: .*temperature belongs to \[sampling\]"),
        ({"train": {"temperature": 1.0}}, r"train.temperature = 1.0: .*temperature belongs to \[sampling\]"),
        ({"smapling": {"temperature": 1.0}}, "smapling = .*did you mean sampling"),
        (
            {"evaluation": {"tasks": {"source": "x", "epoch": 3}}},
            "evaluation.tasks.epoch = 3: .*evaluation.tasks.epochs",
        ),
        ({"model": {"scratch": {**SCRATCH, "hiden_size": 8}}}, "model.scratch.hiden_size = 8: .*model.scratch.hidden"),
        (
            {"model": {"scratch": {**SCRATCH, "vocab_size": 8}}},
            "model.scratch.vocab_size = 8: it follows from the chat",
        ),
        ({"optimizer": {"lr": 0.1}}, "optimizer.lr = 0.1: .*optimizer.learning_rate"),
        ({"log": {"zzzzz": 1}}, r"log.zzzzz = 1: there is no such key; \[log\] has episodes_per_step"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_its_value_and_the_right_place(table, said):
    assert re.search(said, refusal(table))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"train": {"max_steps": "8"}}, 'train.max_steps = "8": it must be a whole number'),
        ({"train": {"max_steps": 8.0}}, "train.max_steps = 8.0: it must be a whole number"),
        ({"train": {"groups_per_step": True}}, "train.groups_per_step = true: it must be a whole number"),
        ({"sampling": {"temperature": True}}, "sampling.temperature = true: it must be a number"),
        ({"sampling": {"temperature": "1e-5"}}, 'sampling.temperature = "1e-5": it must be a number'),
        ({"sampling": {"temperature": None}}, "sampling.temperature = null: it must be a number"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature = nan: it must be a number"),
        ({"tasks": {"source": None}}, "tasks.source = null: it must be text"),
        ({"tasks": {"shuffle": 1}}, "tasks.shuffle = 1: it must be true or false"),
        ({"train": {"scale_rewards": "grup"}}, 'train.scale_rewards = "grup": .*; did you mean "group"'),
        ({"reward": {"functions": "a:b"}}, 'reward.functions = "a:b": it must be a list of texts'),
        ({"reward": {"weights": [1, "2"]}}, "reward.weights = .*it must be a list of numbers"),
        ({"sampling": 3}, r"sampling = 3: it must be a table, \[sampling\]"),
        ({"agent": {"arguments": {"inner": [None]}}}, r"agent.arguments.inner\[0\] = null: TOML has no null"),
        ({"model": {"scratch": {**SCRATCH, "hidden_size": "8"}}}, 'model.scratch.hidden_size = "8": .*whole number'),
        ({"optimizer": {"learning_rate": -1.0}}, r"\[optimizer\] learning_rate = -1.0; it must be above 0"),
        ({"mesh": {"data": 0}}, r"\[mesh\] data = 0"),
    ],
)
def test_a_wrong_type_is_refused_and_never_converted(table, said):
    assert re.search(said, refusal(table))


def test_what_is_missing_is_named():
    with pytest.raises(ConfigError) as caught:
        parse_config({"evaluation": {"tasks": {}}, "model": {"scratch": {}}})
    message = str(caught.value)
    assert "  tasks is missing" in message
    assert "evaluation.tasks.source is missing" in message
    assert "model.scratch.head_dim is missing" in message
    assert "vocab_size" not in message


def test_all_that_is_wrong_is_said_at_once():
    message = refusal(
        {
            "temperature": 1.0,
            "train": {"max_steps": "8", "learning_rte": 1},
            "rollout": {"group-size": 2, "episode_timeout": True},
            "optimizer": {"learning_rate": 0.0},
        }
    )
    assert "6 things are wrong" in message
    assert len(message.splitlines()) == 7


def test_every_suggestion_is_a_key():
    known = set(key_paths())
    assert set(_ELSEWHERE.values()) <= known
    assert not set(_ELSEWHERE) & {path.rpartition(".")[2] for path in known}


def test_a_whole_number_is_a_number():
    assert parse_config(with_keys({"sampling": {"temperature": 1}})).sampling.temperature == 1.0


class TestFiles:
    def test_a_missing_file_is_said(self, tmp_path):
        with pytest.raises(ConfigError, match=r"there is no configuration file .*nowhere.toml"):
            load_config(tmp_path / "nowhere.toml")

    def test_a_folder_is_no_file(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(tmp_path)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[train]\nmax_steps = = 3\n", "line 2.*max_steps = = 3"),
            ("[train]\nmax_steps = 3\nmax_steps = 4\n", "line 3.*max_steps = 4"),
            ("[train]\nmax_steps = null\n", "line 2.*max_steps = null"),
            ("[train]\n[train]\n", "line 2"),
        ],
    )
    def test_text_that_is_no_toml_is_refused_with_its_line(self, tmp_path, text, said):
        with pytest.raises(ConfigError, match=said):
            load_config(write(tmp_path / "run.toml", text))

    def test_bytes_that_are_no_text_are_refused(self, tmp_path):
        path = tmp_path / "run.toml"
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path)

    def test_an_exponent_is_a_number(self, tmp_path, file):
        file.write_text(file.read_text() + "[optimizer]\nlearning_rate = 1e-5\n")
        assert load_config(file).optimizer.learning_rate == 1e-05


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "path", "value"),
        [
            ("train.max_steps=3", "train.max_steps", 3),
            ("train.max_steps = 3", "train.max_steps", 3),
            ("optimizer.learning_rate=1e-5", "optimizer.learning_rate", 1e-5),
            ("rollout.dynamic_sampling=true", "rollout.dynamic_sampling", True),
            ("loss.loss_agg_mode=seq-mean-token-mean", "loss.loss_agg_mode", "seq-mean-token-mean"),
            ('loss.loss_agg_mode="seq-mean-token-mean"', "loss.loss_agg_mode", "seq-mean-token-mean"),
            ("model.source=a/b=c", "model.source", "a/b=c"),
            ("run.name=7", "run.name", "7"),
            ("run.name=2026-01-01", "run.name", "2026-01-01"),
            ('run.name="7"', "run.name", "7"),
            ("chat.alphabet=0123", "chat.alphabet", "0123"),
            ('reward.functions=["a:b", "c:d"]', "reward.functions", ("a:b", "c:d")),
            ("tasks.arguments.low=3", "tasks.arguments", {"low": 3}),
            ("tasks.arguments.kind=easy", "tasks.arguments", {"kind": "easy"}),
        ],
    )
    def test_an_override_needs_no_quotes(self, file, override, path, value):
        assert flatten(load_config(file, [override]))[path] == value

    def test_overrides_add_to_tables_and_the_last_one_wins(self, file):
        file.write_text(file.read_text() + "[tasks.arguments]\nlow = 1\nhigh = 2\n")
        config = load_config(file, ["tasks.arguments.low=3", "tasks.arguments.low=4", "run.seed=5"])
        assert config.tasks.arguments == {"low": 4, "high": 2}
        assert config.run.seed == 5

    @pytest.mark.parametrize(
        ("override", "said"),
        [
            ("train.max_step=3", "train.max_step = 3: .*train.max_steps"),
            ("max_steps=3", r"max_steps = 3: .*max_steps belongs to \[train\]"),
            ("train.max_steps=many", 'train.max_steps = "many": it must be a whole number'),
            ("train.max_steps=1\n[run]\nseed=2", "train.max_steps = .*it must be a whole number"),
            ("train.max_steps", "it must be section.key=value"),
            ("=3", "it must be section.key=value"),
            ("a b=3", "it must be section.key=value"),
            ("tasks.source.x=1", "tasks.source = .*it must be text"),
        ],
    )
    def test_a_wrong_override_is_refused_like_a_wrong_key(self, file, override, said):
        with pytest.raises(ConfigError, match=said):
            load_config(file, [override])

    def test_file_and_overrides_are_judged_together(self, file):
        file.write_text(file.read_text() + "[log]\nnothing = 1\n")
        with pytest.raises(ConfigError, match=r"(?s)3 things.*override.*log.nothing.*train.max_step"):
            load_config(file, ["train.max_step=3", "oops"])


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.floats(allow_nan=False, min_value=0, exclude_min=True)
plain_values = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.datetimes() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(text, plain_values, max_size=3)
task_tables = st.fixed_dictionaries(
    {"source": text}, optional={"arguments": arguments, "epochs": st.integers(), "shuffle": st.booleans()}
)
tables = st.fixed_dictionaries(
    {
        "tasks": task_tables,
        "model": st.fixed_dictionaries(
            {}, optional={"source": text, "scratch": st.just(SCRATCH), "param_dtype": st.just("bfloat16")}
        ),
    },
    optional={
        "run": st.fixed_dictionaries({}, optional={"name": text, "seed": st.integers()}),
        "environment": st.fixed_dictionaries({}, optional={"arguments": arguments, "step_timeout": numbers}),
        "reward": st.fixed_dictionaries({}, optional={"functions": st.lists(text), "weights": st.lists(numbers)}),
        "evaluation": st.fixed_dictionaries({}, optional={"tasks": task_tables}),
        "optimizer": st.fixed_dictionaries({}, optional={"learning_rate": numbers, "max_grad_norm": numbers}),
    },
)


class TestWriting:
    @given(tables)
    @settings(deadline=None)
    def test_what_is_written_loads_back_equal(self, tmp_path_factory, table):
        config = parse_config(table)
        path = write(tmp_path_factory.mktemp("written") / "config.toml", dump_config(config))
        assert load_config(path) == config

    def test_keys_without_a_value_are_left_out(self):
        written = dump_config(parse_config(MINIMAL))
        assert "max_steps" not in written
        assert "scratch" not in written

    def test_a_none_that_would_come_back_as_something_else_is_refused(self):
        config = RunConfig(
            tasks=parse_config(MINIMAL).tasks,
            model=parse_config(MINIMAL).model,
            train=Train(groups_per_step=None),
        )
        with pytest.raises(ConfigError, match=r"train\.groups_per_step = None cannot be written"):
            dump_config(config)

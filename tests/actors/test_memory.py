import gc
import random
import sys
import weakref

import msgspec
import numpy as np
import pytest
import trio

from trouper.actors.config_file import parse_config
from trouper.actors.memory import count_parameters, episode_size, limits, memory, row_tokens, size_text
from trouper.actors.simulation import SimulatedAccelerator, SimulatedLearner, checksum_of, default_seconds
from trouper.channels import Attempt, Episode, Message, Row, Task
from trouper.envs import model_agent
from trouper.learner.mesh import MeshConfig
from trouper.learner.model_config import ModelConfig

SHAPE = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=16,
)


def configured(**sections):
    return parse_config({"tasks": {"source": "a:b"}, "model": {"source": "some/model"}, **sections})


def parts(config, model=SHAPE):
    return {part.name: part for part in memory(config, model)}


# One episode


def deep_size(held, seen):
    """Bytes of an object and of everything it refers to, each once."""
    if id(held) in seen:
        return 0
    seen.add(id(held))
    below = []
    if isinstance(held, msgspec.Struct):
        below = [getattr(held, name) for name in held.__struct_fields__]
    elif isinstance(held, dict):
        below = [*held.keys(), *held.values()]
    elif isinstance(held, list | tuple):
        below = held
    return sys.getsizeof(held) + sum(deep_size(each, seen) for each in below)


def largest_episode(config):
    """As large as the configuration allows, but for text that the model never saw."""
    sampling, size = config.sampling, episode_size(config)
    rows = tuple(
        Row(
            np.zeros(size.tokens, np.int32),
            np.zeros(size.tokens, np.bool_),
            np.zeros(size.tokens, np.float32),
            np.zeros(size.tokens, np.int32),
        )
        for _ in range(size.rows)
    )
    widest = max(config.chat.alphabet, default="\N{GRINNING FACE}")
    characters = size.text // len(widest.encode("utf-32-le" if ord(widest) > 255 else "latin-1"))
    share = characters // size.messages
    return Episode(
        attempt=Attempt(10**6, 10**6, 3, 1, 7, Task("a task of its own", {"text": "x" * 700})),
        rows=rows,
        reward=0.125,
        status="done",
        turns=sampling.max_turns,
        messages=tuple(
            Message("assistant", widest * share if number else widest * (characters - share * (size.messages - 1)))
            for number in range(size.messages)
        ),
        sampled_digest="0" * 32,
        metrics={f"rewards/number {number}": number + 0.5 for number in range(16)},
        timings={"total": 1.5, "generate": 2.5, "environment": 3.5},
    )


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"sampling": {"max_turns": 30, "max_context_tokens": 4096}},
        {"sampling": {"max_turns": 30, "max_context_tokens": 4096}, "chat": {"on_rewrite": "append"}},
        {"sampling": {"max_context_tokens": 640}, "chat": {"format": "plain", "alphabet": "ab;", "stop": ";"}},
        {"sampling": {"max_context_tokens": 640}, "chat": {"format": "plain", "alphabet": "ab\u20ac", "stop": "a"}},
    ],
)
def test_an_episode_is_bounded_by_its_measured_parts(sections):
    config = configured(**sections)
    bound, measured = episode_size(config).bytes, deep_size(largest_episode(config), set())
    assert measured <= bound
    if "alphabet" not in sections.get("chat", {}):
        assert bound < 1.2 * measured


def test_rows_are_forked_by_templates_and_by_agents():
    turns = {"sampling": {"max_turns": 7}}
    assert episode_size(configured(**turns)).rows == 7
    assert episode_size(configured(**turns, chat={"on_rewrite": "append"})).rows == 1
    assert episode_size(configured(**turns, chat={"on_rewrite": "append"}, agent={"name": "my:agent"})).rows == 7
    plain = {"format": "plain", "alphabet": "ab;", "stop": ";"}
    assert episode_size(configured(**turns, chat=plain)).rows == 1


# How many: whole runs in virtual time


class Params:
    """Stands for a copy of the parameters."""

    def __init__(self, step):
        self.step = step

    def __repr__(self):
        return f"parameters of step {self.step}"


class Peaks(trio.abc.Instrument):
    """The most there ever was of each thing, looked at after every step of every task."""

    def __init__(self):
        self.game = None
        self.most = dict.fromkeys(("slots", "held", "played", "open_groups", "weights"), 0)
        self.episodes = weakref.WeakValueDictionary()  # the first row's ids stand for an episode
        self.copies = weakref.WeakSet()
        self.limits = None

    async def agent(self, talk, world):
        try:
            await model_agent(talk, world)
        finally:
            for row in talk.rows()[:1]:
                self.episodes[id(row.tokens)] = row.tokens

    def after_task_step(self, task):
        life = getattr(self.game.run, "life", None)
        if life is None:
            return
        self.game.groups.clear()  # what the test's recorder keeps is no run's
        now = {
            "slots": life.pacer.admitted - life.trainer.step * life.pacer.groups_per_step,
            "held": len(self.episodes),
            "played": self.game.run.episodes.busy,
            "open_groups": life.grouper.open_groups,
            "weights": len(self.copies),
        }
        if any(now[name] > getattr(self.limits, name) >= self.most[name] for name in ("held", "weights")):
            gc.collect()  # what an attempt's error refers to may lie in a circle
            now |= {"held": len(self.episodes), "weights": len(self.copies)}
        self.most = {name: max(most, now[name]) for name, most in self.most.items()}

    async def watch(self, game):
        self.game, self.limits = game, limits(game.config)
        trio.lowlevel.add_instrument(self)
        try:
            await game()
        finally:
            trio.lowlevel.remove_instrument(self)


class Forgetful(SimulatedLearner):
    """Keeps no group beyond its step, as the real one."""

    def __init__(self, copies):
        super().__init__()
        self._copies = copies

    def update(self):
        metrics = super().update()
        self.trained.clear()
        return metrics

    def publish(self):
        params = Params(self.step)
        self._copies.add(params)
        return params, checksum_of(params)


def game_of(play, letters, choose, peaks, **sections):
    """A run with speeds of its own, in which environments fail now and then."""
    speed = {
        name: choose.choice([0.0, 0.1, 1.0, 10.0]) for name in ("decode", "add", "update", "swap", "publish", "sync")
    }
    pace, fails = choose.choice([0.0, 0.5, 5.0]), choose.choice([0.0, 0.0, 0.2])

    class Uneven(letters):
        async def step(self, action):
            await trio.sleep(choose.random() * pace)
            if choose.random() < fails:
                raise ValueError("this one fails")
            return await super().step(action)

    def accelerator(name):
        return SimulatedAccelerator(name, seconds=lambda call: speed.get(call, default_seconds(call)))

    return play(
        make_environment=Uneven,
        agent=peaks.agent,
        learner=Forgetful(peaks.copies),
        make_accelerator=accelerator,
        **sections,
    )


def sections_of(choose):
    staleness = choose.choice([0, 1, 1, 2, 4])
    return {
        "rollout": {
            "num_generations": choose.choice([2, 3]),
            "max_concurrency": choose.choice([1, 3, 8, 40]),
            "max_staleness": staleness,
            "lost_members": choose.choice(["shrink", "drop"]),
            "dynamic_sampling": choose.random() < 0.3,
            "max_consecutive_lost": 1000,
            "max_lost_fraction": 1.0,
            "quarantine_after": 0,
        },
        "engine": {"slots": choose.choice([1, 4, 16])},
        "train": {
            "max_steps": choose.choice([3, 6]),
            "groups_per_step": choose.choice([1, 2, 4]),
            "max_empty_steps": 99,
        },
        "sync": {"weight_sync_steps": choose.randint(1, staleness + 1)},
        "checkpoint": {"save_interval_steps": choose.choice([1, 3])},
    }


@pytest.mark.parametrize("seed", range(24))
def test_nothing_is_ever_held_beyond_the_limits(seed, play, letters, run_seeded):
    choose, peaks = random.Random(seed), Peaks()
    game = game_of(play, letters, choose, peaks, **sections_of(choose))
    run_seeded(seed, peaks.watch, game)
    limit = limits(game.config)
    for name, most in peaks.most.items():
        assert most <= getattr(limit, name), name
    assert peaks.most["held"] > 0 < peaks.most["weights"]
    channels = {channel.name: channel for channel in game.run.graph.statistics()}
    for name, capacity in (
        ("tasks", limit.tasks),
        ("episodes", limit.outcomes),
        ("groups", limit.groups),
        ("requests", limit.requests),
        ("weights", 1),
    ):
        assert channels[name].peak <= channels[name].capacity == capacity


def test_a_slow_trainer_fills_what_is_allowed_and_no_more(play, letters, run_seeded):
    peaks = Peaks()
    game = play(
        make_environment=letters,
        agent=peaks.agent,
        learner=Forgetful(peaks.copies),
        make_accelerator=lambda name: SimulatedAccelerator(name, seconds=lambda call: 1000.0 * (call == "update")),
        rollout={"max_staleness": 2},
        train={"max_steps": 8},
    )
    run_seeded(0, peaks.watch, game)
    limit = limits(game.config)
    assert peaks.most["slots"] == limit.slots == 3 * 2
    assert limit.episodes == 12 <= peaks.most["held"] <= limit.held == 16 + 1


# The sums


def test_limits_follow_from_the_configuration():
    limit = limits(configured(rollout={"max_staleness": 3}, sync={"weight_sync_steps": 2}))
    assert (limit.slots, limit.episodes, limit.held) == (32, 256, 320 + 1)
    assert limit.played == 64
    assert limit.weights == 1 + 2
    assert limit.evaluated == limit.evaluating == 0


@pytest.mark.parametrize(
    ("interval", "steps", "read_back"),
    [(50, None, (100 + 2) * 8), (50, 30, (30 + 2) * 8), (0, 30, (30 + 2) * 8), (0, None, None)],
)
def test_a_restart_reads_back_what_no_checkpoint_holds(interval, steps, read_back):
    config = configured(
        checkpoint={"save_interval_steps": interval}, train={} if steps is None else {"max_steps": steps}
    )
    assert limits(config).read_back == read_back
    assert ("groups read back from the ledger" in parts(config)) == (read_back is not None)


def test_evaluation_holds_its_episodes_to_the_end():
    config = configured(
        evaluation={"every_steps": 5, "count": 10, "samples": 3, "temperature": 1.0, "tasks": {"source": "a:b"}}
    )
    assert parts(config)["an evaluation's episodes"].bytes == 30 * episode_size(config).bytes
    assert limits(config).evaluating == 30


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"attention_bias": True, "output_bias": True, "mlp_bias": True},
        {"qk_norm": True},
    ],
)
def test_parameters_are_counted_as_the_model_has_them(flags):
    weights = pytest.importorskip("trouper.learner.weights")
    model = msgspec.structs.replace(SHAPE, **flags)
    shapes = weights.array_shapes(model).values()
    assert count_parameters(model) == sum(rows * (rest[0] if rest else 1) for rows, *rest in shapes)


def test_what_lies_on_the_devices_follows_from_the_shape():
    held = parts(configured(engine={"slots": 3}))
    assert held["keys and values"].bytes == 2 * 2 * 2 * 6 * 4 * 3 * 1024
    assert held["optimizer moments"].bytes == 2 * held["parameters"].bytes == 2 * 4 * count_parameters(SHAPE)
    assert held["weights for sampling"].bytes == 3 * held["parameters"].bytes
    assert held["copy while a checkpoint is saved"].where == "host"


def test_half_the_width_is_half_the_memory():
    narrow = parts(configured(model={"source": "x", "param_dtype": "bfloat16"}))["parameters"]
    assert parts(configured())["parameters"].bytes == 2 * narrow.bytes


def test_every_copy_of_the_parameters_counts():
    config = configured(train={"micro_batch_size": 4})
    spread = msgspec.structs.replace(config, mesh=MeshConfig(data=2, tensor=2))
    assert parts(spread)["parameters"].bytes == 2 * parts(config)["parameters"].bytes
    assert parts(spread)["keys and values"].bytes == 4 * parts(config)["keys and values"].bytes


def test_a_kl_term_keeps_a_reference_model():
    assert "reference model" in parts(configured(loss={"beta": 0.1}))
    assert "reference model" not in parts(configured())


def test_without_a_shape_only_the_host_is_known():
    assert {part.where for part in memory(configured())} == {"host"}


def test_a_packed_row_holds_a_group_or_what_is_asked_for():
    sampling = {"max_prompt_tokens": 100, "max_response_tokens": 50, "max_context_tokens": 200}
    assert row_tokens(configured(sampling=sampling, rollout={"num_generations": 2})) == 300
    assert row_tokens(configured(sampling=sampling, rollout={"num_generations": 64})) == 2048
    assert row_tokens(configured(sampling=sampling, train={"row_tokens": 333})) == 333
    assert row_tokens(configured(sampling={**sampling, "max_context_tokens": 4000})) == 4000


def test_bytes_are_written_as_a_reader_wants_them():
    assert [size_text(n) for n in (7, 1536, 3 << 20, 5 << 30)] == ["7 B", "1.5 KiB", "3.0 MiB", "5.00 GiB"]

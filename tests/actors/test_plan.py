import re

import pytest
from msgspec.structs import replace

from trouper.actors.config import Chat, Evaluation, Model, Reward, RunConfig, Tasks
from trouper.actors.config_file import flatten
from trouper.actors.memory import count_parameters, size_text
from trouper.actors.plan import _ABOVE_ZERO, _AT_LEAST, _AT_MOST_ONE, plan, scratch_model
from trouper.channels import ConfigError
from trouper.learner.mesh import MeshConfig
from trouper.learner.model_config import ModelConfig

SHAPE = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 16,
}
BASE = RunConfig(tasks=Tasks(source="tasks.jsonl"), model=Model(source="some/model"))


def changed(config=BASE, **sections):
    """The configuration with keys of sections replaced; a struct replaces a whole section."""
    return replace(
        config,
        **{
            name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
            for name, value in sections.items()
        },
    )


def refusal(shape=None, devices=None, **sections):
    with pytest.raises(ConfigError) as caught:
        plan(changed(**sections), shape, devices=devices)
    return str(caught.value)


def test_the_defaults_can_run():
    plan(BASE)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"sync": {"weight_sync_steps": 4}},
            "weight_sync_steps = 4 .* 4 - 1 = 3 steps old, more than rollout.max_staleness = 1: set max_staleness to 3",
        ),
        ({"evaluation": {"every_steps": 5}}, r"evaluation.every_steps = 5 needs \[evaluation.tasks\]"),
        ({"evaluation": {"samples": 4}}, "evaluation.samples = 4 with evaluation.temperature = 0"),
        ({"model": {"scratch": SHAPE}}, "both is given"),
        ({"model": {"source": None}}, "neither is given"),
        ({"model": Model(scratch=SHAPE)}, r'chat.format = "auto" needs a tokenizer.*\[model.scratch\] has none'),
        ({"chat": {"format": "plain"}}, "needs chat.alphabet"),
        ({"chat": {"format": "plain", "alphabet": "01"}}, "needs chat.stop"),
        ({"train": {"advantage_estimator": "dr_grpo"}}, 'scale_rewards to "none" or "batch"'),
        (
            {"sync": {"mode": "drain", "drain_timeout": 300.0}},
            "drain_timeout = 300 s must be less than sync.timeout = 300 s",
        ),
        ({"chat": {"alphabet": "01"}}, 'chat.alphabet belongs to chat.format = "plain"'),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p = 0.9 would change nothing: .* evaluation is off"),
        ({"sampling": {"top_k": 20}}, "sampling.top_k = 20 would change nothing"),
        ({"sampling": {"temperature": 0.0}}, "sampling.temperature = 0.0, but it must be more than 0"),
        (
            {"sampling": {"max_prompt_tokens": 1000}},
            r"1000 \+ 128 = 1128, more than sampling.max_context_tokens = 1024",
        ),
        ({"train": {"row_tokens": 512}}, "train.row_tokens = 512 is less than sampling.max_context_tokens = 1024"),
        ({"rollout": {"num_generations": 1}}, "num_generations = 1, but it must be at least 2: an advantage compares"),
        ({"rollout": {"lost_members": "shrink", "min_members": 9}}, "min_members = 9 is more than .* = 8"),
        ({"rollout": {"dynamic_sampling": True, "max_redraws": 0}}, "needs rollout.max_redraws of at least 1"),
        ({"rollout": {"max_concurrency": 0}}, "rollout.max_concurrency = 0, but it must be at least 1"),
        ({"rollout": {"max_lost_fraction": 1.5}}, "rollout.max_lost_fraction = 1.5, but it must be at most 1"),
        ({"reward": Reward(functions=("a:b",), weights=(1.0, 2.0))}, "2 entries and reward.functions 1"),
        ({"reward": Reward(functions=("a:b",), weights=(float("inf"),))}, r"reward.weights\[0\] = inf"),
        ({"environment": {"restart_backoff": 20.0}}, "restart_backoff = 20.0 is more than .*max = 10.0"),
        ({"mesh": MeshConfig(data=3)}, "micro_batch_size = 4 is not a multiple of mesh.data x mesh.fsdp = 3 x 1 = 3"),
        ({"train": {"max_steps": -1}}, "train.max_steps = -1, but it must be at least 0"),
        ({"checkpoint": {"max_to_keep": 0}}, "checkpoint.max_to_keep = 0"),
    ],
)
def test_what_cannot_work_is_refused_with_the_arithmetic(sections, said):
    assert re.search(said, refusal(**sections))


def test_everything_that_cannot_work_is_said_at_once():
    message = refusal(
        sync={"weight_sync_steps": 4}, rollout={"num_generations": 1, "max_concurrency": 0}, train={"row_tokens": 8}
    )
    assert len(message.splitlines()) == 5


def test_every_bound_is_about_a_number_there_is():
    config = changed(evaluation=Evaluation(tasks=Tasks(source="x")))
    assert {*_AT_LEAST, *_ABOVE_ZERO, *_AT_MOST_ONE} <= set(flatten(config))


def test_more_devices_than_there_are_is_refused():
    assert "2 x 1 x 2 = 4 devices, and there are 2" in refusal(devices=2, mesh=MeshConfig(data=2, tensor=2))
    plan(changed(mesh=MeshConfig(data=2)), devices=2)


def test_what_does_not_fit_the_model_is_refused():
    model = ModelConfig(vocab_size=3, max_position_embeddings=512, **SHAPE)
    message = refusal(
        model, mesh=MeshConfig(tensor=3), chat=Chat(format="plain", alphabet="0123", stop="0"), train={"max_steps": 3}
    )
    assert "max_context_tokens = 1024 is more than the 512 positions" in message
    assert "chat.alphabet has 4 characters and the model 3 ids" in message
    assert "mesh.tensor = 3 does not divide the model's num_attention_heads = 4" in message


def test_top_p_is_fine_where_evaluation_samples():
    plan(
        changed(
            sampling={"top_p": 0.9},
            evaluation=Evaluation(every_steps=5, tasks=Tasks(source="x"), temperature=0.7, samples=4),
        )
    )


class TestNumbers:
    def test_the_pacer_limits_episodes_where_slots_are_plenty(self):
        planned = plan(changed(rollout={"max_concurrency": 1000}))
        assert planned.episodes_per_step == 64
        assert planned.max_in_flight == 128
        assert planned.concurrency == 128
        assert planned.limited_by.startswith("rollout.max_staleness")
        assert any("872 of rollout.max_concurrency = 1000" in remark for remark in planned.remarks)

    def test_slots_limit_episodes_where_they_are_few(self):
        planned = plan(changed(rollout={"max_concurrency": 10}))
        assert planned.concurrency == 10
        assert planned.limited_by == "rollout.max_concurrency"
        assert any("22 of engine.slots = 32 stay empty" in remark for remark in planned.remarks)

    def test_dropping_late_groups_where_none_can_be_late_is_remarked(self):
        def remarks(**rollout):
            return " ".join(plan(changed(rollout=rollout)).remarks)

        assert "no group can be overtaken" in remarks(on_late="drop", max_staleness=0)
        assert "overtaken" not in remarks(on_late="drop", max_staleness=1) + remarks(max_staleness=0)

    def test_on_policy_admits_one_step(self):
        planned = plan(changed(rollout={"max_staleness": 0}))
        assert planned.max_in_flight == planned.episodes_per_step
        assert planned.staleness_bound == 0

    @pytest.mark.parametrize(
        ("keys", "reason"),
        [
            ({}, ""),
            ({"scale_rewards": "batch"}, 'train.scale_rewards = "batch" must see the whole step'),
            ({"num_iterations": 2}, "train.num_iterations = 2 must see the whole step"),
            ({"scale_rewards": "batch", "num_iterations": 2}, '"batch" and train.num_iterations = 2 must see'),
        ],
    )
    def test_streaming_says_why_it_is_off(self, keys, reason):
        planned = plan(changed(train=keys))
        assert planned.streaming == (not reason)
        assert reason in planned.streaming_reason
        assert reason in planned.render()

    def test_evaluations_are_counted(self):
        evaluation = Evaluation(every_steps=5, tasks=Tasks(source="x"))
        assert plan(changed(evaluation=evaluation, train={"max_steps": 12})).evaluations == 2


class TestMemory:
    def test_every_part_is_in_one_total_and_in_the_text(self):
        planned = plan(BASE, ModelConfig(vocab_size=11, **SHAPE))
        totals = {
            (where, restart): planned.total_bytes(where, restart=restart)
            for where in ("host", "device")
            for restart in (False, True)
        }
        assert sum(totals.values()) == sum(part.bytes for part in planned.memory)
        text = planned.render()
        for part in planned.memory:
            assert part.name in text
            assert part.how in text
        for total in totals.values():
            assert size_text(total) in text

    def test_the_text_says_what_comes_on_top(self):
        text = plan(BASE, ModelConfig(vocab_size=11, **SHAPE)).render()
        assert re.search("memory on the host  at most .* besides the process as it starts, JAX and compiled", text)
        assert re.search("memory on devices   at most .* besides activations; .* more after a restart", text)
        assert re.search(r"episodes wait       never more than 128: 8 in tasks, 64 in slots, 64 in episodes", text)

    def test_without_a_shape_the_host_is_known(self):
        text = plan(BASE).render()
        assert "memory on devices   known when the model's config.json is here" in text
        assert "untrained episodes" in text

    def test_without_checkpoints_nothing_bounds_what_a_restart_reads_back(self):
        def remarks(**train):
            return " ".join(plan(changed(checkpoint={"save_interval_steps": 0}, train=train)).remarks)

        assert "what a restart reads back grows with the run" in remarks()
        assert "what a restart reads back grows with the run" not in remarks(max_steps=9)


def test_a_model_from_scratch_gets_its_vocabulary_from_the_chat_format():
    config = changed(model=Model(scratch={**SHAPE, "rope_theta": 500}))
    model = scratch_model(config, 12)
    assert (model.vocab_size, model.rope_theta, model.head_dim) == (12, 500.0, 6)
    with pytest.raises(ConfigError, match="head_dim is 5"):
        scratch_model(changed(model=Model(scratch={**SHAPE, "head_dim": 5})), 12)


def test_the_text_holds_every_number():
    model = ModelConfig(vocab_size=11, **SHAPE)
    text = plan(changed(train={"max_steps": 100}), model).render()
    for expected in ("100", "64", "128", f"{count_parameters(model):,}", "keys and values", "at most 1 step"):
        assert expected in text

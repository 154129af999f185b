import importlib.util
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.channels import ModelError
from trouper.learner.model_config import ModelConfig, RopeScaling
from trouper.learner.weights import array_shapes

_spec = importlib.util.spec_from_file_location("golden_weights", Path(__file__).with_name("golden_weights.py"))
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

# Written as the files on the hub are, with everything that says nothing about the maths.
LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2 = {
    "_name_or_path": "somewhere/else",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "vocab_size": 49152,
}
QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_llama_with_scaled_rotary_frequencies():
    config = ModelConfig.from_hf(LLAMA_3_2_1B)
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert (config.rope_theta, config.tie_word_embeddings, config.head_dim) == (500_000.0, True, 64)
    assert {config.attention_bias, config.output_bias, config.mlp_bias, config.qk_norm} == {False}


def test_smollm2_has_heads_of_hidden_size_over_heads():
    config = ModelConfig.from_hf(SMOLLM2)
    assert (config.head_dim, config.rope_theta, config.rope_scaling) == (64, 100_000.0, None)
    assert config.initializer_range == SMOLLM2["initializer_range"]


def test_qwen2_always_has_biases_on_queries_keys_and_values():
    config = ModelConfig.from_hf(QWEN_2_5)
    assert (config.attention_bias, config.output_bias, config.qk_norm, config.head_dim) == (True, False, False, 64)


def test_qwen3_norms_queries_and_keys_and_its_heads_are_wider_than_its_stream():
    config = ModelConfig.from_hf(QWEN_3_4B)
    assert (config.qk_norm, config.attention_bias, config.rope_theta) == (True, False, 1_000_000.0)
    shapes = array_shapes(ModelConfig.from_hf({**QWEN_3_4B, "num_hidden_layers": 1, "layer_types": None}))
    attention = "model.layers.0.self_attn."
    assert shapes[attention + "q_proj.weight"] == (4096, 2560)
    assert shapes[attention + "k_proj.weight"] == shapes[attention + "v_proj.weight"] == (1024, 2560)
    assert shapes[attention + "o_proj.weight"] == (2560, 4096)
    assert shapes[attention + "q_norm.weight"] == shapes[attention + "k_norm.weight"] == (128,)
    assert shapes[attention + "q_proj.weight"][0] * shapes[attention + "q_proj.weight"][1] == 10_485_760


def test_every_array_has_the_name_it_has_on_the_hub():
    names = array_shapes(ModelConfig.from_hf({**golden.CONFIGS["qwen3-biased"], "num_hidden_layers": 1}))
    layer = "model.layers.0."
    assert set(names) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight",
        *(f"{layer}self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")),
        *(f"{layer}self_attn.{part}_norm.weight" for part in "qk"),
        *(f"{layer}mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }


def test_absent_fields_mean_the_familys_defaults():
    llama = ModelConfig.from_hf({"model_type": "llama"})
    assert (llama.vocab_size, llama.num_key_value_heads, llama.head_dim) == (32_000, 32, 128)
    assert (llama.intermediate_size, llama.max_position_embeddings, llama.rope_theta) == (11_008, 2048, 10_000.0)
    assert not llama.tie_word_embeddings
    assert ModelConfig.from_hf({"model_type": "llama", "num_attention_heads": 16}).num_key_value_heads == 16
    qwen2 = ModelConfig.from_hf({"model_type": "qwen2"})
    assert (qwen2.vocab_size, qwen2.num_key_value_heads, qwen2.head_dim) == (151_936, 32, 128)
    assert not qwen2.tie_word_embeddings
    qwen3 = ModelConfig.from_hf({"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 32})
    assert (qwen3.head_dim, qwen3.num_key_value_heads, qwen3.tie_word_embeddings) == (128, 32, False)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_null_head_dim_is_hidden_size_over_heads(family):
    fields = {"model_type": family, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    assert ModelConfig.from_hf({**fields, "head_dim": None}).head_dim == 16


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3", "original_max_position_embeddings": 8192}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": LLAMA3, "max_position_embeddings": 8192},
    ],
)
def test_every_spelling_of_the_rotary_scaling_reads_the_same(rope):
    config = ModelConfig.from_hf({"model_type": "llama", **rope})
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": None}, "None"),
        ({"model_type": "qwen3_moe"}, "qwen3_moe"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"rope_scaling": {"factor": 2.0}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "attention_factor": 1.2}}, "attention_factor = 1.2"),
        ({"rope_scaling": {**LLAMA3, "factor": 0.0}}, "factor > 0"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": "yarn"}, "yarn"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"logit_scale": 0.1}, "logit_scale = 0.1"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"vocab_size": "32000"}, "vocab_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_size": 100, "head_dim": None}, "hidden_size 100"),
    ],
)
def test_what_changes_the_maths_is_refused_by_name(change, named):
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf({**LLAMA_3_2_1B, **change})


def test_all_refused_keys_are_named_at_once():
    with pytest.raises(ModelError, match=r"hidden_act = 'relu'.*mystery = 3"):
        ModelConfig.from_hf({**SMOLLM2, "hidden_act": "relu", "mystery": 3})


def test_an_unknown_key_that_is_null_is_idle():
    assert ModelConfig.from_hf({**SMOLLM2, "mystery": None}) == ModelConfig.from_hf(SMOLLM2)


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True},
        {"layer_types": ["full_attention"] * 23 + ["sliding_attention"]},
        {"use_sliding_window": True, "max_window_layers": 0},
    ],
)
def test_a_sliding_window_in_use_is_refused(change):
    with pytest.raises(ModelError, match="sliding"):
        ModelConfig.from_hf({**QWEN_2_5, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "max_window_layers": 24},
        {"use_sliding_window": True, "sliding_window": None},
        {"layer_types": ["full_attention"] * 24},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_read(change):
    assert ModelConfig.from_hf({**QWEN_2_5, **change}) == ModelConfig.from_hf(QWEN_2_5)


@pytest.mark.parametrize("config", [LLAMA_3_2_1B, SMOLLM2, QWEN_2_5, QWEN_3_4B, *golden.CONFIGS.values()])
def test_what_is_written_reads_back_equal(config):
    read = ModelConfig.from_hf(config)
    assert ModelConfig.from_hf(json.loads(json.dumps(read.to_hf()))) == read


@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    bias=st.booleans(),
    tied=st.booleans(),
    groups=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    half_width=st.integers(1, 64),
    theta=st.floats(1.0, 1e7),
    scaling=st.none() | st.builds(RopeScaling, st.floats(1.0, 64.0), st.just(1.0), st.just(4.0), st.just(8192)),
)
@settings(deadline=None)
def test_every_model_a_family_can_express_survives_writing(
    family, bias, tied, groups, kv_heads, half_width, theta, scaling
):
    config = ModelConfig(
        model_type=family,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=groups * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=2 * half_width,
        intermediate_size=48,
        tie_word_embeddings=tied,
        attention_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        mlp_bias=bias and family == "llama",
        qk_norm=family == "qwen3",
        rope_theta=theta,
        rope_scaling=scaling,
    )
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("family", "flag"), [("llama", "qk_norm"), ("llama", "output_bias"), ("qwen2", "mlp_bias"), ("qwen3", "mlp_bias")]
)
def test_what_a_family_cannot_express_is_not_written(family, flag):
    config = ModelConfig.from_hf({"model_type": family})
    changed = ModelConfig(**{name: getattr(config, name) for name in config.__struct_fields__} | {flag: True})
    with pytest.raises(ModelError, match=flag):
        changed.to_hf()
    with pytest.raises(ModelError, match="mystery"):
        ModelConfig(
            **{name: getattr(config, name) for name in config.__struct_fields__} | {"model_type": "mystery"}
        ).to_hf()


def test_a_config_is_a_static_argument():
    assert hash(ModelConfig.from_hf(LLAMA_3_2_1B)) == hash(ModelConfig.from_hf(dict(LLAMA_3_2_1B)))

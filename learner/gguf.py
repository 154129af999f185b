"""A `.gguf` file as a Hugging Face folder: weights, configuration, and the tokenizer rebuilt from the metadata.

Knows the architectures llama, qwen2 and qwen3 and byte-level BPE tokenizers. Metadata that would change the maths or
the tokens, and is not known here, is refused by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from trouper.channels import ModelError
from trouper.learner.model_config import ModelConfig, RopeScaling
from trouper.learner.weights import array_shapes, new_folder, write_arrays, write_json

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_KNOWN_KEYS = frozenset(
    (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
    )
)

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3.1 and later: 1 / frequency scaling, one number per frequency.
_ROPE_FACTORS = "rope_freqs.weight"

# Values of `tokenizer.ggml.token_type`.
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
# The patterns that Llama 3 and Qwen2 split text by before byte-pair merges; they differ in how digits group.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert(source: Path, folder: Path, *, dtype: DTypeLike = "bfloat16") -> None:
    """Write a `.gguf` file as a Hugging Face folder, which appears whole or not at all.

    Args:
        source: the `.gguf` file; quantized arrays are dequantized.
        folder: must not exist, or be empty.
        dtype: what arrays are stored in: bfloat16, float16 or float32.

    Raises:
        ModelError: the package `gguf` is missing; the file is broken; its architecture, tokenizer or another part
            is not known here; or an array is missing, unknown or misshapen.
    """
    metadata, tensors = _read(source)
    config = _config(source, metadata, tensors)
    arrays = {_hf_name(source, name): name for name in tensors if name != _ROPE_FACTORS}
    shapes = array_shapes(config)
    if missing := sorted(shapes.keys() - arrays.keys()):
        raise ModelError(f"{source} lacks {len(missing)} arrays that its metadata asks for, first {missing[0]}")
    if unknown := sorted(arrays.keys() - shapes.keys()):
        raise ModelError(f"{source} holds {arrays[unknown[0]]}, which a {config.model_type} model does not have")

    def read(name: str) -> NDArray[np.float32]:
        array = _dequantized(source, tensors[arrays[name]])
        if config.model_type == "llama" and ".q_proj." in name:
            return _half_split(array, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            return _half_split(array, config.num_key_value_heads)
        return array

    tokenizer = _tokenizer(source, metadata)
    ids = _token_ids(metadata)
    with new_folder(folder) as new:
        write_json(new / "config.json", {**config.to_hf(), **ids, "torch_dtype": np.dtype(dtype).name})
        write_json(new / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
        tokenizer.save(str(new / "tokenizer.json"))
        write_json(new / "tokenizer_config.json", _tokenizer_config(metadata, ids, config.max_position_embeddings))
        write_arrays(new / "model.safetensors", shapes, dtype, read)


def read_shape(source: Path) -> ModelConfig:
    """The shape of the model in a `.gguf` file, from its metadata alone.

    Raises:
        ModelError: as for `convert`.
    """
    return _config(source, *_read(source))


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata by key and memory-mapped tensors by name."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError(f"reading {source} needs the package gguf; pip install 'trouper[gguf]'") from error
    try:
        reader = GGUFReader(source)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except FileNotFoundError:
        raise ModelError(f"{source} is not there") from None
    except (ValueError, IndexError, KeyError) as error:  # what a short or foreign file makes of the reader
        raise ModelError(f"{source} is not a whole .gguf file ({error}); download it again") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _config(source: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """The model's shape, from the metadata and the presence of arrays."""
    family = metadata.get("general.architecture")
    if family not in _ARCHITECTURES:
        raise ModelError(f"{source} has architecture {family!r}; trouper converts {', '.join(_ARCHITECTURES)}")
    prefix = f"{family}."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, value in given.items():
        if key not in _KNOWN_KEYS or isinstance(value, list):
            raise ModelError(f"{source} has {prefix}{key} = {value!r}, which trouper does not compute")
    if given.get("rope.scaling.type", "none") != "none":
        raise ModelError(f"{source} has {prefix}rope.scaling.type = {given['rope.scaling.type']!r}; only none is read")
    try:
        heads = given["attention.head_count"]
        head_dim = given.get("attention.key_length", given["embedding_length"] // heads)
        config = ModelConfig(
            vocab_size=int(tensors["token_embd.weight"].shape[-1]),
            hidden_size=given["embedding_length"],
            num_hidden_layers=given["block_count"],
            num_attention_heads=heads,
            num_key_value_heads=given.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=given["feed_forward_length"],
            rope_theta=_shortest(given.get("rope.freq_base", 10_000.0)),
            rms_norm_eps=_shortest(given["attention.layer_norm_rms_epsilon"]),
            tie_word_embeddings="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            rope_scaling=_rope_scaling(source, tensors, head_dim, _shortest(given.get("rope.freq_base", 10_000.0))),
            max_position_embeddings=given["context_length"],
            model_type=family,
        )
    except KeyError as error:
        raise ModelError(f"{source} lacks {error.args[0]!r} for architecture {family!r}; convert it again") from None
    for key in ("attention.value_length", "rope.dimension_count"):
        if given.get(key, head_dim) != head_dim:
            raise ModelError(f"{source} has {prefix}{key} = {given[key]} but heads of width {head_dim}")
    return config


def _rope_scaling(source: Path, tensors: Mapping[str, Any], head_dim: int, theta: float) -> RopeScaling | None:
    """The scaling behind the stored factors.

    The file keeps only the factors. Those of Llama 3.1 to 3.3 differ in `factor` alone, which is the largest of
    them; factors that this does not explain are refused.
    """
    if _ROPE_FACTORS not in tensors:
        return None
    stored = _dequantized(source, tensors[_ROPE_FACTORS])
    scaling = RopeScaling(
        factor=_shortest(stored.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    turns = 8192 * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # of the original context
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / scaling.factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(f"{source} has {_ROPE_FACTORS} that are not Llama 3's; other rotary scalings are not computed")
    return scaling


def _hf_name(source: Path, name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _BLOCK_NAMES:
        raise ModelError(f"{source} holds {name}, which is no part of the models that trouper computes")
    return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"


def _dequantized(source: Path, tensor: Any) -> NDArray[np.float32]:
    """The array in float32, rows first."""
    from gguf.quants import dequantize

    try:
        return np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    except NotImplementedError as error:
        raise ModelError(
            f"{source} stores {tensor.name} as {tensor.tensor_type.name}, which gguf cannot read"
        ) from error


def _half_split(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of rotary pairs within a head: interleaved there, first and second half here."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _shortest(value: float) -> float:
    """A float32 from the metadata as the number its author wrote: 9.99999974e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids as `config.json` has them; several end tokens are a list."""
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom", "padding")}
    ends = [ids[key] for key in ("eos", "eot", "eom") if ids[key] is not None]
    ends = list(dict.fromkeys(ends))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
    }


def _tokenizer(source: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE with the text splitting that `tokenizer.ggml.pre` names."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelError(f"{source} has tokenizer.ggml.model = {kind!r}; trouper rebuilds 'gpt2' (byte-level BPE)")
    splits = {
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=True)]),
        "gpt-2": _bytes(use_regex=True),
        "qwen2": _split_by(r"\p{N}"),
        "llama-bpe": _split_by(r"\p{N}{1,3}"),
    }
    if pre not in splits:
        raise ModelError(
            f"{source} has tokenizer.ggml.pre = {pre!r}; trouper rebuilds {', '.join(sorted(splits))}. "
            "Use the model's original folder, or a file converted by a current llama.cpp"
        )
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    used = max(number for number, kind in enumerate(types) if kind != _UNUSED) + 1  # the table's padding goes
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens[:used])}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the bindings raise Exception itself
        raise ModelError(f"{source} has a vocabulary and merges that do not fit: {error}") from error
    tokenizer.pre_tokenizer = splits[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for number, token in enumerate(tokens[:used]):
        if types[number] in (_CONTROL, _USER_DEFINED):
            special = types[number] == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=special, normalized=False)])
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    if begin is not None and metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos = tokens[begin]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, begin)]
        )
    return tokenizer


def _bytes(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_by(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex(_SPLIT.format(digits=digits))
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, behavior="isolated"), _bytes(use_regex=False)],
    )


def _tokenizer_config(metadata: Mapping[str, Any], ids: Mapping[str, Any], context: int) -> dict[str, Any]:
    """`tokenizer_config.json`, with the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    named = {
        "bos_token": ids["bos_token_id"],
        "eos_token": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token": ids["pad_token_id"],
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
    }
    config |= {name: tokens[number] for name, number in named.items() if number is not None}
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config

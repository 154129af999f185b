"""What a decoder is made of, read from a Hugging Face `config.json`.

Knows the families Llama and Qwen2/2.5/3. Anything in the file that would change the maths and is not known here is
refused by name: a model that loads is computed right.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from trouper.channels import ModelError

_Json: TypeAlias = dict[str, Any]

# What a key that is absent from the file means: the defaults of transformers' config classes.
# None for num_key_value_heads is "as many as query heads", for head_dim "hidden_size / heads".
_QWEN: _Json = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.02,
}
_DEFAULTS: dict[str, _Json] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DEFAULT_ROPE_THETA = 10_000.0

# Keys that can change the maths, and the values that leave it as the decoder does it.
_ONLY: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
}

# Keys that say nothing about the maths: token ids, training history, serving hints, and what old versions of
# transformers wrote into every file (generation settings live in generation_config.json now).
# fmt: off
_HARMLESS = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures",
    "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "is_llama_config",
    "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "min_length", "model_type",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "suppress_tokens",
    "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
))
# fmt: on
_READ = frozenset(("rope_theta", "rope_scaling", "rope_parameters"))
_READ_BY_FAMILY = {
    "llama": frozenset(("attention_bias", "mlp_bias")),
    "qwen2": frozenset(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")),
    "qwen3": frozenset(
        ("attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    ),
}


class RopeScaling(Struct, frozen=True):
    """Llama 3.1's frequency scaling (`rope_type = "llama3"`).

    Attributes:
        factor: how much longer the context became.
        low_freq_factor: wavelengths above `original / low_freq_factor` are divided by `factor`.
        high_freq_factor: wavelengths below `original / high_freq_factor` stay.
        original_max_position_embeddings: context length before scaling, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelConfig(Struct, frozen=True, kw_only=True):
    """A decoder's shape, with the field names of `config.json`. Hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        vocab_size: rows of the embedding table, `V`.
        hidden_size: width of the residual stream, `D`.
        num_hidden_layers: `L`.
        num_attention_heads: query heads, `H`.
        num_key_value_heads: key and value heads; divides `H`.
        head_dim: width of one head; not always `D / H`.
        intermediate_size: width of the gated MLP.
        rope_theta: base of the rotary frequencies.
        rms_norm_eps: epsilon of every RMS norm.
        tie_word_embeddings: whether the head is the embedding table.
        attention_bias: whether q, k and v have a bias (Qwen2), and for Llama o as well.
        output_bias: whether the attention's output projection has a bias.
        mlp_bias: whether the MLP's projections have biases.
        qk_norm: whether queries and keys are RMS-normed per head (Qwen3).
        rope_scaling: None, or Llama 3's.
        max_position_embeddings: the longest context the model was made for, in tokens.
        model_type: the family, as `config.json` names it.
        initializer_range: standard deviation of a new model's weights.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 2048
    model_type: str = "llama"
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads is {self.num_attention_heads} and num_key_value_heads "
                f"{self.num_key_value_heads}; each key-value head must serve the same number of query heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary positions need an even width")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read a `config.json`; an absent key means its family's default.

        Args:
            config: the parsed file.

        Raises:
            ModelError: the file asks for maths that the decoder does not do, or holds a key that is not known
                (which may mean the same); each such key and its value is named.
        """
        family = config.get("model_type")
        if family not in _DEFAULTS:
            raise ModelError(f"model_type is {family!r}; trouper computes {', '.join(sorted(_DEFAULTS))}")
        problems = [*_refused(config, family), *_sliding(config, family)]
        if problems:
            raise ModelError("config.json asks for what trouper does not compute: " + "; ".join(problems))
        fields = {name: config.get(name, default) for name, default in _DEFAULTS[family].items()}
        if fields["num_key_value_heads"] is None:
            fields["num_key_value_heads"] = fields["num_attention_heads"]
        if fields["head_dim"] is None:
            fields["head_dim"] = _even_share(fields["hidden_size"], fields["num_attention_heads"])
        biased = bool(config.get("attention_bias", False))
        fields |= {
            "model_type": family,
            "attention_bias": biased or family == "qwen2",
            "output_bias": biased and family != "qwen2",
            "mlp_bias": bool(config.get("mlp_bias", False)),
            "qk_norm": family == "qwen3",
        }
        fields["rope_theta"], fields["rope_scaling"] = _rope(config, fields["max_position_embeddings"])
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ModelError(f"config.json has a value of the wrong type: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers reads back as the same model.

        Raises:
            ModelError: the family named by `model_type` cannot express this model.
        """
        if self.model_type not in _DEFAULTS:
            raise ModelError(f"model_type is {self.model_type!r}; trouper writes {', '.join(sorted(_DEFAULTS))}")
        for name, value in self._fixed_by_family().items():
            if getattr(self, name) != value:
                raise ModelError(
                    f"{name} is {getattr(self, name)} but every {self.model_type} model of this kind has {value}; "
                    "choose the model_type that can express it (qwen2: q, k, v biases; qwen3: q and k norms; "
                    "llama: MLP biases)"
                )
        rope: _Json = {"rope_type": "default"}
        if self.rope_scaling is not None:
            rope = {"rope_type": "llama3", **msgspec.structs.asdict(self.rope_scaling)}
        config: _Json = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            **{name: getattr(self, name) for name in _DEFAULTS[self.model_type]},
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            # Both spellings: transformers 5 reads the second, 4 and most other engines the first two.
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else rope,
            "rope_parameters": {"rope_theta": self.rope_theta, **rope},
        }
        if self.model_type != "qwen2":
            config["attention_bias"] = self.attention_bias
        if self.model_type == "llama":
            config["mlp_bias"] = self.mlp_bias
        else:
            config["use_sliding_window"] = False
        return config

    def _fixed_by_family(self) -> dict[str, bool]:
        """The flags that `model_type` leaves no choice about."""
        if self.model_type == "llama":
            return {"output_bias": self.attention_bias, "qk_norm": False}
        if self.model_type == "qwen2":
            return {"attention_bias": True, "output_bias": False, "mlp_bias": False, "qk_norm": False}
        return {"output_bias": self.attention_bias, "mlp_bias": False, "qk_norm": True}


def _refused(config: Mapping[str, Any], family: str) -> list[str]:
    """What keeps this file from being computed, one phrase per key."""
    known = _HARMLESS | _READ | _READ_BY_FAMILY[family] | _DEFAULTS[family].keys()
    problems = []
    for key, value in config.items():
        if key in _ONLY:
            if value not in _ONLY[key]:
                problems.append(f"{key} = {value!r} (only {_ONLY[key][0]!r} is computed)")
        elif key not in known and value is not None:
            problems.append(f"{key} = {value!r} (not a key of {family} that is known here)")
    architectures = config.get("architectures") or [_ARCHITECTURES[family]]
    if architectures != [_ARCHITECTURES[family]]:
        problems.append(f"architectures = {architectures!r} (only {_ARCHITECTURES[family]!r} is computed)")
    return problems


def _sliding(config: Mapping[str, Any], family: str) -> list[str]:
    """Sliding windows that are in use; files of Qwen name a window that is switched off."""
    if family == "llama":
        return []
    layers = config.get("num_hidden_layers", _DEFAULTS[family]["num_hidden_layers"])
    kinds = config.get("layer_types")
    if kinds is not None:
        other = sorted({str(kind) for kind in kinds} - {"full_attention"})
        return [f"layer_types holds {', '.join(other)} (only full_attention is computed)"] if other else []
    window, first = config.get("sliding_window", 4096), config.get("max_window_layers", 28)
    if config.get("use_sliding_window", False) and window is not None and first < layers:
        return [f"use_sliding_window = True with sliding_window = {window} from layer {first} on (full attention only)"]
    return []


def _even_share(width: int, heads: int) -> int:
    if width % heads:
        raise ModelError(
            f"head_dim is not given and hidden_size {width} is not a multiple of num_attention_heads {heads}; "
            "write head_dim into config.json"
        )
    return width // heads


def _rope(config: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies, from either spelling; `rope_scaling` wins as in transformers."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{key} = {given!r} is not a table; write null or the keys of one rope_type")
    rope = dict(given)
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or _DEFAULT_ROPE_THETA
    old_kind = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_kind)
    if rope.pop("partial_rotary_factor", 1) not in (1, None):
        raise ModelError(f"{key}.partial_rotary_factor = {given['partial_rotary_factor']}; only 1 is computed")
    if kind not in ("default", "llama3"):
        raise ModelError(f"{key} asks for rope_type {kind!r}; trouper computes default and llama3")
    if kind == "default":
        if rope:
            raise ModelError(f"{key} holds {rope!r}, which rope_type 'default' does not use; remove it if it is idle")
        return theta, None
    rope.setdefault("original_max_position_embeddings", max_position_embeddings)
    try:
        scaling = msgspec.convert(rope, RopeScaling)
    except msgspec.ValidationError as error:
        raise ModelError(f"{key} of rope_type 'llama3' is not complete: {error}; given: {rope!r}") from error
    if unknown := sorted(rope.keys() - set(RopeScaling.__struct_fields__)):
        raise ModelError(f"{key} holds {unknown[0]} = {rope[unknown[0]]!r}, which is not known for rope_type 'llama3'")
    numbers = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
    if not all(math.isfinite(n) and n > 0 for n in numbers) or scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ModelError(f"{key} needs factor > 0 and 0 < low_freq_factor < high_freq_factor; given: {rope!r}")
    return theta, scaling

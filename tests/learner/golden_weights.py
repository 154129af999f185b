"""Tiny models whose weights follow from their names, for golden results that need no weights in the repository.

`scripts/make_golden.py` fills transformers models by this rule and commits their logits; the tests fill trouper's.
"""

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "rms_norm_eps": 1e-5,
}
_LLAMA = {**_TINY, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_QWEN2 = {**_TINY, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
_QWEN3 = {**_TINY, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 6}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
_WITHOUT_THETA = {key: value for key, value in _LLAMA.items() if key != "rope_theta"}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA},
    "llama-tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama-biased": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {**_LLAMA, "head_dim": 10, "hidden_size": 12},
    "llama-scaled": {**_LLAMA, "head_dim": 12, "rope_scaling": _LLAMA3_ROPE},
    "llama-scaled-new-spelling": {
        **_WITHOUT_THETA,
        "head_dim": 12,
        "rope_parameters": {**_LLAMA3_ROPE, "rope_theta": 50.0},
    },
    "llama-one-kv-head": {**_LLAMA, "num_key_value_heads": 1, "head_dim": None},
    "qwen2": {**_QWEN2, "use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
    "qwen2-tied": {**_QWEN2, "tie_word_embeddings": True},
    "qwen3": {**_QWEN3},
    "qwen3-tied": {**_QWEN3, "tie_word_embeddings": True, "head_dim": 10},
    "qwen3-biased": {**_QWEN3, "attention_bias": True},
}
"""The `config.json` of each tiny model."""

TOKENS = np.random.RandomState(7).randint(0, 32, (2, 14)).astype(np.int32)
"""int32 [2, 14], what the golden logits are for."""


def weight(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The array of a name: norms near 1, biases near 0, matrices that keep the scale of their input.

    `RandomState` draws the same numbers in every NumPy release; `Generator` does not promise that.
    """
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("norm.weight"):
        return (1 + 0.2 * noise).astype(np.float32)
    if len(shape) == 1:
        return (0.2 * noise).astype(np.float32)
    return (noise / np.sqrt(shape[-1])).astype(np.float32)

"""What a decoder is made of, read from a Hugging Face `config.json`.

Knows the families Llama and Qwen2/2.5/3. Anything in the file that would change the maths and is not known here is
refused by name: a model that loads is computed right.
"""

from typing import Any

from msgspec import Struct


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

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "ModelConfig":
        """Read a `config.json`.

        Raises:
            ModelError: the file asks for maths that the decoder does not do; the key and its value are named.
        """
        raise NotImplementedError

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that transformers reads back as the same model."""
        raise NotImplementedError

"""A GRPO step of SmolLM2-135M's shape: padded, packed and shared-prefix rows, beside transformers on torch and a floor.

    pip install -e '.[reference]'
    python benchmarks/train_step.py [--layers 30] [--rounds 3] [--quick]

One step is one group of 8 members: a prompt of 192 tokens, completions of 32, forward and backward pass and AdamW in
float32, the vocabulary head on completion tokens only, on every side. Weights are random: the time does not depend on
them. The floor is the products' arithmetic at the rate at which JAX multiplies large matrices here, in the same run.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from reporting import in_turns, median_ratio, record, seconds_of, show, spread

from trouper.channels import Attempt, Episode, Group, Row, Sampling, Task
from trouper.learner.batch import BatchConfig
from trouper.learner.decoder import Decoder
from trouper.learner.learner import Learner
from trouper.learner.loss import LossConfig
from trouper.learner.model_config import ModelConfig
from trouper.learner.optimizer import OptimizerConfig

MEMBERS, PROMPT, COMPLETION = 8, 192, 32
PADDED = PROMPT + COMPLETION - 1  # the last token predicts nothing
SHARED = PROMPT + MEMBERS * (COMPLETION - 1)
LEARNING_RATE, B2 = 1e-6, 0.95


def shape(layers: int) -> ModelConfig:
    """SmolLM2-135M, or fewer of its layers."""
    return ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rope_theta=1e5,
        tie_word_embeddings=True,
    )


def make_group(vocabulary: int) -> Group:
    """One group of random tokens with advantages of both signs."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, PROMPT)
    mask = np.arange(PROMPT + COMPLETION) >= PROMPT
    episodes = []
    for member in range(MEMBERS):
        tokens = np.concatenate([prompt, rng.integers(0, vocabulary, COMPLETION)]).astype(np.int32)
        logprobs, versions = np.where(mask, -11, 0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
        row = Row(tokens, mask, logprobs, versions, Sampling(temperature=1.0))
        attempt = Attempt(0, 0, member, 0, 0, Task("benchmark"))
        episodes.append(Episode(attempt, (row,), float(member % 2), "done", 1))
    return Group(0, 0, tuple(episodes), np.array([-1, 1] * (MEMBERS // 2), np.float32))


def our_step(config: ModelConfig, batch: BatchConfig) -> Callable[[], Any]:
    """A whole step of the learner."""
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, b2=B2)
    learner = Learner(Decoder(config, rngs=nnx.Rngs(0)), loss=LossConfig(), optimizer=optimizer, batch=batch)
    learner.warm_up()
    group = make_group(config.vocab_size)

    def step() -> None:
        learner.add([group])
        learner.update()

    return step


def torch_step(config: ModelConfig) -> Callable[[], Any]:
    """The same on transformers: padded rows, scaled-dot-product attention, logits of the completion only."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            intermediate_size=config.intermediate_size,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, B2), weight_decay=0.0)
    group = make_group(config.vocab_size)
    tokens = torch.tensor(np.stack([episode.rows[0].tokens for episode in group.episodes]), dtype=torch.long)
    advantages = torch.tensor(group.advantages)[:, None]

    def step() -> float:
        logits = model(input_ids=tokens[:, :-1], logits_to_keep=COMPLETION).logits
        targets = tokens[:, PROMPT:]
        current = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
        ratio = torch.exp(current - current.detach())
        loss = -torch.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def products(config: ModelConfig, tokens: int, pairs: int) -> float:
    """Floating-point operations of a forward and backward pass's products.

    Args:
        config: the model.
        tokens: that run through the layers.
        pairs: of a query and a key that it may see.
    """
    width, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    matrices = width * (2 * width + 2 * kv + 3 * config.intermediate_size)
    layers = config.num_hidden_layers * (matrices * tokens + 2 * width * pairs)
    return 6.0 * (layers + MEMBERS * COMPLETION * width * config.vocab_size)


def multiply_rate() -> Callable[[], float]:
    """Floating-point operations a second of a large product in float32."""
    size = 2048
    matrix = jnp.ones((size, size))
    multiply = jax.jit(jnp.matmul)
    multiply(matrix, matrix).block_until_ready()
    return lambda: 2.0 * size**3 / seconds_of(lambda: multiply(matrix, matrix).block_until_ready())


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="30 is SmolLM2-135M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one layer, one round, no torch")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.rounds = 1, 1
    config = shape(options.layers)
    steps = {
        "padded": our_step(config, BatchConfig(row_tokens=PADDED, micro_batch_size=MEMBERS, share_prefix=False)),
        "packed": our_step(config, BatchConfig(row_tokens=2 * PADDED, micro_batch_size=1, share_prefix=False)),
        "shared-prefix": our_step(config, BatchConfig(row_tokens=SHARED)),
    }
    if not options.quick:
        steps["HF torch, padded"] = torch_step(config)
    for step in steps.values():
        step()
    rate = multiply_rate()
    sides: dict[str, Callable[[], float]] = {name: lambda s=step: seconds_of(s) for name, step in steps.items()}  # type: ignore[misc]
    figures = in_turns({**sides, "products": rate}, options.rounds)
    best = statistics.median(figures["products"])
    within = PADDED * (PADDED + 1) // 2
    own = (COMPLETION - 1) * COMPLETION // 2 + (COMPLETION - 1) * PROMPT
    laid_out = {
        "shared-prefix": (SHARED, PROMPT * (PROMPT + 1) // 2 + MEMBERS * own),
    }
    rows, ratios = [], {}
    for name, seconds in figures.items():
        if name == "products":
            continue
        tokens, pairs = laid_out.get(name, (MEMBERS * PADDED, MEMBERS * within))
        floor = products(config, tokens, pairs) / best
        ratios[name] = median_ratio(figures["padded"], seconds)
        middle = statistics.median(seconds)
        rows.append(
            [name, spread(seconds), tokens / middle, MEMBERS * COMPLETION / middle, floor, middle / floor, ratios[name]]
        )
    show(
        f"A step of {MEMBERS} members, {PROMPT} + {COMPLETION} tokens, {options.layers} layers, float32; "
        f"products run at {best / 1e9:.0f} GFLOP/s",
        ["rows", "seconds", "tok/s", "completion tok/s", "floor (s)", "x floor", "x padded"],
        rows,
    )
    if not options.quick:
        record("train_step", {"layers": options.layers, "seconds": figures, "times_padded": ratios})


if __name__ == "__main__":
    main()

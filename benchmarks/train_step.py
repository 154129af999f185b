"""A GRPO step of SmolLM2-135M's shape: padded, packed and shared-prefix rows, beside transformers on torch and a floor.

    pip install -e '.[reference]'
    python benchmarks/train_step.py [--layers 30] [--rounds 3] [--prompt 192 --completion 32] [--quick]

One step is one group of 8 members: forward and backward pass and AdamW in float32, the vocabulary head on completion
tokens only, on every side. Weights are random: the time does not depend on them. The floor is the products' arithmetic
at the rate at which JAX multiplies large matrices here, in the same run. What sharing a prompt can give depends on its
length: two are measured, and beside each ratio to padded rows stands the ratio of the floors, what arithmetic allows.
"""

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

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

MEMBERS = 8
LEARNING_RATE, B2 = 1e-6, 0.95


class Lengths(NamedTuple):
    """Tokens of each member."""

    prompt: int
    completion: int

    @property
    def padded(self) -> int:
        """Tokens of a member that run through the layers: the last one predicts nothing."""
        return self.prompt + self.completion - 1

    @property
    def shared(self) -> int:
        """The same of the whole group when the prompt runs once."""
        return self.prompt + MEMBERS * (self.completion - 1)


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


def make_group(vocabulary: int, lengths: Lengths) -> Group:
    """One group of random tokens with advantages of both signs."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, lengths.prompt)
    mask = np.arange(sum(lengths)) >= lengths.prompt
    episodes = []
    for member in range(MEMBERS):
        tokens = np.concatenate([prompt, rng.integers(0, vocabulary, lengths.completion)]).astype(np.int32)
        logprobs, versions = np.where(mask, -11, 0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32)
        row = Row(tokens, mask, logprobs, versions, Sampling(temperature=1.0))
        attempt = Attempt(0, 0, member, 0, 0, Task("benchmark"))
        episodes.append(Episode(attempt, (row,), float(member % 2), "done", 1))
    return Group(0, 0, tuple(episodes), np.array([-1, 1] * (MEMBERS // 2), np.float32))


def our_step(config: ModelConfig, lengths: Lengths, batch: BatchConfig) -> Callable[[], Any]:
    """A whole step of the learner."""
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, b2=B2)
    learner = Learner(Decoder(config, rngs=nnx.Rngs(0)), loss=LossConfig(), optimizer=optimizer, batch=batch)
    learner.warm_up()
    group = make_group(config.vocab_size, lengths)

    def step() -> None:
        learner.add([group])
        learner.update()

    return step


def torch_step(config: ModelConfig, lengths: Lengths) -> Callable[[], Any]:
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
    # Fused: as a loop over parameters, the default, it takes four times the time.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, B2), weight_decay=0.0, fused=True)
    group = make_group(config.vocab_size, lengths)
    tokens = torch.tensor(np.stack([episode.rows[0].tokens for episode in group.episodes]), dtype=torch.long)
    advantages = torch.tensor(group.advantages)[:, None]

    def step() -> float:
        logits = model(input_ids=tokens[:, :-1], logits_to_keep=lengths.completion).logits
        targets = tokens[:, lengths.prompt :]
        current = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
        ratio = torch.exp(current - current.detach())
        loss = -torch.minimum(ratio * advantages, ratio.clip(0.8, 1.2) * advantages).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def products(config: ModelConfig, lengths: Lengths, tokens: int, pairs: int) -> float:
    """Floating-point operations of a forward and backward pass's products.

    Args:
        config: the model.
        lengths: of a member.
        tokens: that run through the layers.
        pairs: of a query and a key that it may see.
    """
    width, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    matrices = width * (2 * width + 2 * kv + 3 * config.intermediate_size)
    layers = config.num_hidden_layers * (matrices * tokens + 2 * width * pairs)
    return 6.0 * (layers + MEMBERS * lengths.completion * width * config.vocab_size)


def multiply_rate() -> Callable[[], float]:
    """Floating-point operations a second of a large product in float32."""
    size = 2048
    matrix = jnp.ones((size, size))
    multiply = jax.jit(jnp.matmul)
    multiply(matrix, matrix).block_until_ready()
    return lambda: 2.0 * size**3 / seconds_of(lambda: multiply(matrix, matrix).block_until_ready())


def measure(config: ModelConfig, lengths: Lengths, rounds: int, others: bool) -> dict[str, Any]:
    """Measure and print one shape.

    Args:
        config: the model.
        lengths: of a member.
        rounds: how often.
        others: with packed rows, and with transformers.

    Returns:
        What the record keeps.
    """

    def ours(row_tokens: int, rows: int = 1, share_prefix: bool = False) -> Callable[[], Any]:
        batch = BatchConfig(row_tokens=row_tokens, micro_batch_size=rows, buckets=(), share_prefix=share_prefix)
        return our_step(config, lengths, batch)

    steps = {"padded": ours(lengths.padded, MEMBERS), "shared-prefix": ours(lengths.shared, share_prefix=True)}
    if others:
        steps |= {"packed": ours(2 * lengths.padded), "HF torch, padded": torch_step(config, lengths)}
    for step in steps.values():
        step()
    sides: dict[str, Callable[[], float]] = {name: lambda s=step: seconds_of(s) for name, step in steps.items()}  # type: ignore[misc]
    figures = in_turns({**sides, "products": multiply_rate()}, rounds)
    best = max(figures["products"])
    alone = lengths.padded * (lengths.padded + 1) // 2
    prompt, own = lengths.prompt, lengths.completion - 1
    all_padded = (MEMBERS * lengths.padded, MEMBERS * alone)
    shared = (lengths.shared, prompt * (prompt + 1) // 2 + MEMBERS * (own * prompt + own * (own + 1) // 2))
    table, kept = [], {}
    for name in steps:
        seconds, middle = figures[name], statistics.median(figures[name])
        tokens, pairs = shared if name == "shared-prefix" else all_padded
        work = products(config, lengths, tokens, pairs)
        allowed = products(config, lengths, *all_padded) / work
        ratio = median_ratio(figures["padded"], seconds)
        trained = MEMBERS * lengths.completion / middle
        table.append([name, spread(seconds), trained, work / best, middle * best / work, ratio, allowed])
        kept[name] = {"times_padded": ratio, "arithmetic_allows": allowed, "times_floor": middle * best / work}
    show(
        f"A step of {MEMBERS} members, {lengths.prompt} + {lengths.completion} tokens, "
        f"{config.num_hidden_layers} layers, float32; products run at {best / 1e9:.0f} GFLOP/s",
        ["rows", "seconds", "completion tok/s", "floor (s)", "x floor", "x padded", "arithmetic allows"],
        table,
    )
    return {**lengths._asdict(), "seconds": figures, "rows": kept}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="30 is SmolLM2-135M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, help="one shape with this prompt; left out: 192 and 512")
    parser.add_argument("--completion", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="one layer, one round, one shape, two kinds of rows")
    options = parser.parse_args()
    prompts = [options.prompt] if options.prompt else [192, 512]
    if options.quick:
        options.layers, options.rounds, prompts = 1, 1, prompts[:1]
    shapes = []
    for number, prompt in enumerate(prompts):
        others = number == 0 and not options.quick
        shapes.append(measure(shape(options.layers), Lengths(prompt, options.completion), options.rounds, others))
        gc.collect()  # a learner and its jitted methods are a cycle, and the next shape needs the memory
    if not options.quick:
        record("train_step", {"layers": options.layers, "shapes": shapes})


if __name__ == "__main__":
    main()

"""A model of a few thousand parameters, and groups made by hand."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trouper.channels import Attempt, Episode, Group, Row, Sampling, Task
from trouper.learner.decoder import Decoder
from trouper.learner.model_config import ModelConfig


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Equal programs of different tests are compiled once a session: most of these tests' time is the compiler's."""
    wanted: dict[str, Any] = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    """`make_decoder(seed=0, dtype=float32, **changes)`: one layer, 32 ids; livelier than a fresh model."""

    def make(seed: int = 0, dtype: Any = jnp.float32, param_dtype: Any = jnp.float32, **changes: Any) -> Decoder:
        shape = {
            "vocab_size": 32,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 32,
        }
        config = ModelConfig(**(shape | changes))
        decoder = Decoder(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(seed))
        graph, state = nnx.split(decoder)
        # Fresh weights of 0.02 make all logits nearly equal, which would hide mistakes.
        return nnx.merge(graph, jax.tree.map(lambda p: p * 8 if p.ndim > 1 else p, state))

    return make


@functools.partial(jax.jit, static_argnums=0)
def _row_logprobs(graph: Any, state: Any, tokens: jax.Array, temperature: jax.Array) -> jax.Array:
    decoder = nnx.merge(graph, state)
    length = len(tokens)
    hidden = decoder(tokens[None], jnp.arange(length)[None], jnp.tril(jnp.ones((1, length, length), bool)))
    table = jax.nn.log_softmax(decoder.logits(hidden)[0].astype(jnp.float32) / temperature)
    return jnp.concatenate([jnp.zeros(1), table[jnp.arange(length - 1), tokens[1:]]])


@pytest.fixture
def row_logprobs() -> Callable[[Any, Any, Row], jax.Array]:
    """Log-prob of each token of a row, float32 [40], the plain way: one row at a time under a causal mask.

    Rows are filled up on the right, where a causal mask hides it, so that one compiled function serves all.
    """

    def logprobs(graph: Any, state: Any, row: Row) -> jax.Array:
        tokens = np.zeros(40, np.int32)
        tokens[: len(row.tokens)] = row.tokens
        return _row_logprobs(graph, state, tokens, row.sampling.temperature)

    return logprobs


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """`make_row(prompt, sampled, observed, sampled, ...)`: ids by turns; log-probs default to -1."""

    def make(
        prompt: Sequence[int], *parts: Sequence[int], temperature: float = 1.0, logprobs: Sequence[float] | None = None
    ) -> Row:
        tokens, mask = list(prompt), [False] * len(prompt)
        for index, part in enumerate(parts):
            tokens += part
            mask += [index % 2 == 0] * len(part)
        values = np.zeros(len(tokens), np.float32)
        values[mask] = -1.0 if logprobs is None else logprobs
        return Row(
            np.array(tokens, np.int32),
            np.array(mask),
            values,
            np.where(mask, 0, -1).astype(np.int32),
            Sampling(temperature=temperature),
        )

    return make


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """`make_group(slot, [rows of member 0, ...], advantages, rewards=None)`."""

    def make(
        slot: int,
        members: Sequence[Sequence[Row]],
        advantages: Sequence[float],
        rewards: Sequence[float | None] | None = None,
    ) -> Group:
        rewards = advantages if rewards is None else rewards
        episodes = tuple(
            Episode(Attempt(slot, slot, member, 0, 0, Task(f"task {slot}")), tuple(rows), reward, "done", 1)
            for member, (rows, reward) in enumerate(zip(members, rewards, strict=True))
        )
        return Group(slot, slot, episodes, np.array(advantages, np.float32))

    return make


@pytest.fixture
def random_groups(make_row: Callable[..., Row], make_group: Callable[..., Group]) -> Callable[..., list[Group]]:
    """`random_groups(seed, groups=3)`: unequal groups, several turns and rows, forks, shared and lone prompts."""

    def make(seed: int, groups: int = 3) -> list[Group]:
        rng = np.random.default_rng(seed)

        def ids(low: int, high: int) -> list[int]:
            return [int(i) for i in rng.integers(0, 32, rng.integers(low, high))]

        def logprobs(parts: list[list[int]]) -> list[float]:
            return [-float(x) for x in rng.uniform(0.5, 4.0, sum(len(p) for p in parts[::2]))]

        made = []
        for slot in range(groups):
            prompt, members = ids(2, 7), []
            for _ in range(int(rng.integers(2, 5))):
                rows = []
                for _ in range(1 + int(rng.random() < 0.3)):
                    parts = [ids(1, 5) for _ in range(int(rng.integers(1, 5)))]
                    start = prompt if rng.random() < 0.8 else prompt[:2] + ids(1, 3)
                    rows.append(make_row(start, *parts, logprobs=logprobs(parts), temperature=rng.choice([0.7, 1.0])))
                members.append(rows)
            advantages = rng.normal(size=len(members))
            made.append(make_group(slot, members, advantages.tolist()))
        return made

    return make

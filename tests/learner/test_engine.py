"""The engine through its public door, against the same decoder without a cache."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trouper.channels import NumericsError, SamplerError, Sampling, Turn
from trouper.learner.decoder import Decoder
from trouper.learner.engine import Engine, Finished, RecompileWarning, Request
from trouper.learner.model_config import ModelConfig
from trouper.learner.request import joined, rest

VOCABULARY = 32
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    tie_word_embeddings=True,
)
GREEDY = Sampling(temperature=0.0)


def scaled(seed: int) -> Any:
    """Weights of the decoder's shape whose logits are far from uniform, and from those of another seed."""
    state = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(seed)))[1]
    return jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 1 else leaf, state)


DECODER = Decoder(CONFIG, rngs=nnx.Rngs(0))
W0, W1 = scaled(0), scaled(1)
nnx.update(DECODER, W0)


def engine(*, weights: Any = None, version: tuple[int, int] = (0, 0), **kwargs: Any) -> Engine:
    """A small engine; those of equal `chunk` share what is compiled."""
    options = {"slots": 4, "length": 48, "chunk": 4, "prefill_rows": 4, "prefill_tokens": 8, "kv_buckets": (16,)}
    built = Engine(DECODER, version=(-1, 0), **(options | kwargs))
    built.swap(W0 if weights is None else weights, version, "recompute")
    return built


def request(id: int, tokens: Sequence[int], max_tokens: int = 8, **kwargs: Any) -> Request:
    return Request(id, kwargs.pop("conversation", id), np.array(tokens, np.int32), max_tokens, **kwargs)


def step(built: Engine) -> list[Finished]:
    """One prefill call and one chunk, as the sampler makes them."""
    if built.needs_prefill:
        built.prefill()
    return built.decode()


def finish(built: Engine) -> dict[int, Turn]:
    turns = {}
    while built.busy:
        turns.update({finished.id: finished.turn for finished in step(built)})
    return turns


def alone(asked: Request, **kwargs: Any) -> Turn:
    built = engine(**kwargs)
    built.submit(asked)
    return finish(built)[asked.id]


@jax.jit
def _logits(weights: Any, tokens: jax.Array) -> jax.Array:
    decoder = nnx.merge(nnx.split(DECODER)[0], weights)
    length = tokens.shape[-1]
    positions, mask = jnp.arange(length)[None], jnp.tril(jnp.ones((length, length), bool))[None]
    return decoder.logits(decoder(tokens[None], positions, mask))[0]


def uncached_logits(tokens: Sequence[int], weights: Any = None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[n, V] from one full forward pass, padded on the right to one shape."""
    padded = np.zeros(48, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(W0 if weights is None else weights, padded), np.float64)[: len(tokens)]


def uncached_logprobs(context: Sequence[int], turn: Turn, temperature: float = 1.0, weights: Any = None) -> Any:
    row = [*context, *turn.tokens.tolist()]
    logits = uncached_logits(row, weights)[len(context) - 1 : -1] / temperature
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[np.arange(len(turn.tokens)), turn.tokens]


def same(turn: Turn, other: Turn) -> None:
    np.testing.assert_array_equal(turn.tokens, other.tokens)
    np.testing.assert_allclose(turn.logprobs, other.logprobs, atol=1e-5)
    assert turn.finish == other.finish


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one with everything that XLA compiles."""
    seen: list[str] = []

    def listen(event: str, duration: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


# -------------------------------------------------------------------- what is sampled


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_equal_a_full_forward_pass(temperature: float) -> None:
    built = engine()
    contexts = {id: list(range(1, 3 + 5 * id)) for id in range(4)}
    for id, context in contexts.items():
        built.submit(request(id, context, 12, sampling=Sampling(temperature), seed=id))
    for id, turn in finish(built).items():
        assert turn.logprobs.dtype == np.float32
        np.testing.assert_allclose(turn.logprobs, uncached_logprobs(contexts[id], turn, temperature), atol=1e-5)


def test_logprobs_of_later_turns_equal_a_full_forward_pass() -> None:
    built, context = engine(), [3, 1, 4]
    for number in range(4):
        built.submit(request(number, context, 5, conversation="talk", seed=9))
        turn = finish(built)[number]
        np.testing.assert_allclose(turn.logprobs, uncached_logprobs(context, turn), atol=1e-5)
        context = [*context, *turn.tokens.tolist(), 7, 8]
    assert built.statistics.reused_tokens > 0


def test_keys_and_values_may_be_cached_in_bfloat16() -> None:
    turn = alone(request(0, range(12), 12, seed=1), kv_dtype=jnp.bfloat16)
    gap = np.abs(turn.logprobs - uncached_logprobs(range(12), turn))
    assert 1e-5 < gap.max() < 0.3
    assert (turn.logprobs <= 0).all()


def test_greedy_equals_a_loop_of_argmax() -> None:
    context = [5, 6, 7]
    turn = alone(request(0, context, 10, sampling=GREEDY))
    for token in turn.tokens.tolist():
        assert token == int(uncached_logits(context)[-1].argmax())
        context.append(token)


@pytest.mark.slow
def test_a_request_gives_the_same_tokens_in_any_company_chunk_and_slot() -> None:
    asked = request(99, range(11), 14, seed=5)
    reference = alone(asked)
    assert len(set(reference.tokens.tolist())) > 3
    for slots, chunk, rows, width, company in [(1, 1, 1, 48, 0), (4, 4, 4, 8, 3), (6, 3, 8, 2, 9)]:
        built = engine(slots=slots, chunk=chunk, prefill_rows=rows, prefill_tokens=width, kv_buckets=())
        for id in range(company):
            built.submit(request(id, range(id, id + 3 + id), 5 + id, seed=id))
        built.submit(asked)
        same(finish(built)[99], reference)


def test_seeds_and_turns_differ() -> None:
    built = engine()
    for id in range(4):
        built.submit(request(id, [1, 2, 3], 12, seed=id))
    turns = finish(built)
    assert len({tuple(turn.tokens.tolist()) for turn in turns.values()}) == 4


def test_top_p_and_top_k_narrow_the_distribution_and_leave_neighbours_alone() -> None:
    narrow = request(0, [1, 2, 3], 8, sampling=Sampling(1.0, top_k=1))
    nucleus = request(1, [1, 2, 3], 8, sampling=Sampling(1.5, top_p=0.5), seed=3)
    free = request(2, [1, 2, 3], 8, seed=4)
    built = engine()
    for asked in (narrow, nucleus, free):
        built.submit(asked)
    turns = finish(built)
    np.testing.assert_array_equal(turns[0].tokens, alone(request(0, [1, 2, 3], 8, sampling=GREEDY)).tokens)
    np.testing.assert_allclose(turns[0].logprobs, 0, atol=1e-6)
    same(turns[2], alone(free))
    context = [1, 2, 3]
    for token, logprob in zip(turns[1].tokens.tolist(), turns[1].logprobs, strict=True):
        probabilities = np.exp((logits := uncached_logits(context)[-1] / 1.5) - logits.max())
        probabilities /= probabilities.sum()
        order = np.argsort(-probabilities)
        kept = order[: int((probabilities[order].cumsum() < 0.5).sum()) + 1]
        assert token in kept
        assert logprob == pytest.approx(np.log(probabilities[token] / probabilities[kept].sum()), abs=1e-4)
        context.append(token)


# -------------------------------------------------------------------- where a turn ends


def test_any_of_several_stop_ids_ends_the_turn_and_is_part_of_it() -> None:
    free = alone(request(0, [1, 2, 3], 20, seed=1)).tokens.tolist()
    last = next(i for i in range(2, 20) if free[i] not in free[:i])
    unused = next(id for id in range(VOCABULARY) if id not in free)
    turn = alone(request(0, [1, 2, 3], 20, seed=1, stop=(unused, free[last])))
    assert turn.tokens.tolist() == free[: last + 1]
    assert len(turn.logprobs) == len(turn.versions) == last + 1
    assert turn.finish == "stop"


def test_the_limit_ends_the_turn() -> None:
    for limit in (1, 3, 4, 5):
        turn = alone(request(0, [1, 2, 3], limit, seed=1))
        assert len(turn.tokens) == limit
        assert turn.finish == "length"


def test_a_stop_id_at_the_limit_is_a_stop() -> None:
    free = alone(request(0, [1, 2, 3], 3, seed=1)).tokens.tolist()
    assert free[2] not in free[:2]
    assert alone(request(0, [1, 2, 3], 3, seed=1, stop=(free[2],))).finish == "stop"


def test_a_context_of_one_token_and_one_that_fills_the_length() -> None:
    assert len(alone(request(0, [1], 4)).tokens) == 4
    turn = alone(request(0, [7] * 40, 8))
    np.testing.assert_allclose(turn.logprobs, uncached_logprobs([7] * 40, turn), atol=1e-5)


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": [1, VOCABULARY]}, f"token id {VOCABULARY} is outside the embedding table of {VOCABULARY} rows"),
        ({"tokens": [-1, 1]}, "token id -1 is outside"),
        ({"tokens": []}, "n >= 1"),
        (
            {"tokens": [1] * 41},
            "41 context tokens and max_tokens 8 make 49, beyond the engine's length of 48; ask for 7",
        ),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": tuple(range(9))}, "9 stop ids"),
        ({"stop": (VOCABULARY,)}, "not all in the embedding table"),
        ({"sampling": Sampling(-1.0)}, "temperature is -1.0"),
        ({"sampling": Sampling(1e-4)}, "give 0 for greedy"),
        ({"sampling": Sampling(float("nan"))}, "temperature is nan"),
        ({"sampling": Sampling(float("inf"))}, "temperature is inf"),
        ({"sampling": Sampling(1e39)}, "temperature is 1e.39"),  # beyond float32, which the device gets
        ({"sampling": Sampling(top_p=0.0)}, "top_p is 0.0"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p is 1.5"),
        ({"sampling": Sampling(top_k=-1)}, "top_k is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
    ],
)
def test_a_request_beyond_a_limit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    built = engine()
    asked = request(0, **({"tokens": [1, 2, 3]} | change))
    with pytest.raises(SamplerError, match=words.replace("(", r"\(").replace("*", r"\*")):
        built.check(asked)
    with pytest.raises(SamplerError):
        built.submit(asked)
    assert not built.busy


@pytest.mark.parametrize("tokens", [[1, 2], np.array([1, 2]), np.array([1.0]), np.array([[1]], np.int32)])
def test_a_context_of_another_type_is_refused(tokens: Any) -> None:
    with pytest.raises(SamplerError, match="int32"):
        engine().check(Request(0, 0, tokens, 1))


def test_the_last_row_of_the_table_is_a_valid_id() -> None:
    engine(vocab_limit=12).check(request(0, [VOCABULARY - 1]))


def test_an_id_that_runs_is_refused() -> None:
    built = engine()
    built.submit(request(0, [1, 2], 20))
    for _ in range(2):
        with pytest.raises(ValueError, match="request 0 runs or waits"):
            built.submit(request(0, [1, 2]))
        step(built)


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    built = engine(vocab_limit=12)
    for id in range(4):
        built.submit(request(id, [14, 30, id], 40, seed=id, sampling=GREEDY if id == 3 else Sampling(1.3)))
    for id, turn in finish(built).items():
        assert turn.tokens.max() < 12
        row = [14, 30, id, *turn.tokens.tolist()]
        logits = uncached_logits(row)[2:-1, :12] / 1.3
        expected = logits[np.arange(40), turn.tokens] - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(turn.logprobs, 0 if id == 3 else expected, atol=1e-5)


# -------------------------------------------------------------------- reuse


def test_a_group_that_arrives_at_once_is_prefilled_once_and_decodes_at_once() -> None:
    built, prompt = engine(), list(range(20))
    for member in range(4):
        built.submit(request(member, prompt, 6, seed=member))
    step(built)
    assert built.statistics.prefill_tokens == 19
    assert built.statistics.reused_tokens == 3 * 19
    assert built.statistics.decoded_tokens == 4 * 4
    for member, turn in finish(built).items():
        same(turn, alone(request(member, prompt, 6, seed=member)))


def test_a_conversation_prefills_only_what_is_new() -> None:
    built = engine()
    built.submit(request(0, range(10), 6, conversation="a"))
    first = finish(built)[0]
    before = built.statistics.prefill_tokens
    context = [*range(10), *first.tokens.tolist(), 3, 4, 5]
    built.submit(request(1, context, 6, conversation="a"))
    same(finish(built)[1], alone(request(1, context, 6)))
    assert built.statistics.prefill_tokens - before == 3


def test_tasks_with_the_same_system_prompt_share_it_whenever_they_come() -> None:
    system = list(range(16))
    tasks = [request(id, [*system, 20 + id, 30, id, *range(id)], 6, seed=id) for id in range(6)]
    built = engine()
    for asked in tasks[:2]:  # at once: the second waits for what the first computes
        built.submit(asked)
    turns = finish(built)
    for asked in tasks[2:]:  # slots are free first, and then none is
        if asked.id == 2:
            built.release(0)
        built.submit(asked)
        turns |= finish(built)
    assert built.statistics.evictions == 1
    alone_tokens = sum(len(asked.tokens) - 1 for asked in tasks)
    assert built.statistics.prefill_tokens == alone_tokens - 5 * len(system)
    for asked in tasks:
        same(turns[asked.id], alone(asked))


def test_the_conversation_used_longest_ago_makes_room_and_the_others_keep_theirs() -> None:
    built = engine(slots=2)
    contexts = {name: [start, *range(8)] for start, name in enumerate("abc", 9)}

    def turn_of(name: str, id: int) -> int:
        """How many tokens it prefilled."""
        before = built.statistics.prefill_tokens
        asked = request(id, contexts[name], 3, conversation=name, seed=id)
        built.submit(asked)
        turn = finish(built)[id]
        same(turn, alone(asked))
        contexts[name] += [*turn.tokens.tolist(), 31]
        return built.statistics.prefill_tokens - before

    assert [turn_of(name, id) for id, name in enumerate("aba")] == [8, 8, 1]
    assert (turn_of("c", 3), built.statistics.evictions) == (8, 1)
    assert (turn_of("a", 4), built.statistics.evictions) == (1, 1), "b was used longest ago, not a"
    assert (turn_of("b", 5), built.statistics.evictions) == (len(contexts["b"]) - 5, 2)


def test_an_evicted_conversation_goes_on_as_if_it_had_not_been() -> None:
    built = engine(slots=2)
    contexts = {conversation: [conversation + 1, 2, 3] for conversation in range(5)}
    for turn_number in range(3):
        for conversation, context in contexts.items():
            id = 10 * turn_number + conversation
            asked = request(id, context, 4, conversation=conversation, seed=conversation)
            built.submit(asked)
            turn = finish(built)[id]
            same(turn, alone(asked))
            contexts[conversation] = [*context, *turn.tokens.tolist(), 9]
    assert built.statistics.evictions >= 10


def test_requests_beyond_the_slots_wait_in_line() -> None:
    built = engine(slots=2)
    for id in range(5):
        built.submit(request(id, [1, 2, id], 4))
    assert (built.waiting, built.live) == (5, 0)
    assert [finished.id for finished in step(built)] == [0, 1]
    assert (built.waiting, built.live, built.busy) == (3, 0, True)
    assert [finished.id for finished in step(built)] == [2, 3]
    assert [finished.id for finished in step(built)] == [4]
    assert not built.busy
    assert step(built) == []


def test_a_long_prompt_does_not_stall_what_decodes() -> None:
    built = engine(prefill_rows=1, prefill_tokens=4)
    built.submit(request(0, [1, 2], 12))
    built.submit(request(1, range(30), 4, seed=1))
    answered = [[finished.id for finished in step(built)] for _ in range(3)]
    assert answered == [[], [], [0]]
    assert built.live == 1
    same(finish(built)[1], alone(request(1, range(30), 4, seed=1)))


def test_a_long_context_is_prefilled_in_bounded_calls_and_chunks_come_in_between() -> None:
    built = engine(prefill_rows=2, prefill_tokens=4)
    running, long = request(0, [1, 2], 20, seed=2), request(1, range(30), 6, seed=1)
    built.submit(running)
    step(built)
    built.submit(long)
    computed, sampled = [], []
    while built.needs_prefill:
        before = built.statistics
        built.prefill()
        between = built.statistics
        assert between.decoded_tokens == before.decoded_tokens
        built.decode()
        computed.append(between.prefill_tokens - before.prefill_tokens)
        sampled.append(built.statistics.decoded_tokens - between.decoded_tokens)
    assert computed == [8, 8, 8, 5], "two rows of four tokens at most"
    assert sampled == [4, 4, 4, 4 + 4], "a chunk of the one that runs after every call, and at last one of both"
    assert built.live == 1
    same(finish(built)[1], alone(long))


def test_a_long_context_changes_no_token_of_what_runs_beside_it() -> None:
    built = engine(prefill_rows=1, prefill_tokens=4)
    running, long = request(0, [1, 2], 40, seed=2), request(1, range(30), 6, seed=1)
    built.submit(running)
    step(built)
    built.submit(long)
    turns = finish(built)
    for asked in (running, long):
        same(turns[asked.id], alone(asked))


def test_the_engine_says_what_there_is_to_do() -> None:
    def due() -> tuple[bool, bool]:
        return built.needs_prefill, built.can_decode

    built = engine(slots=2, prefill_rows=1, prefill_tokens=4)
    assert due() == (False, False)
    built.submit(request(0, [1, 2], 8))
    assert due() == (True, False)
    built.prefill()
    assert due() == (False, True)
    built.submit(request(1, [1, 2, 3], 8, conversation=0))
    assert due() == (False, True), "it has to wait for the first of its conversation"
    built.cancel(1)
    built.submit(request(2, range(9), 8))
    for _ in range(2):
        assert due() == (True, True)
        built.prefill()
    built.submit(request(3, [5, 6], 8))
    assert due() == (False, True), "no slot is free"
    built.decode()
    built.decode()
    assert (due(), built.waiting) == ((True, False), 1)
    built.prefill()
    built.swap(W1, (0, 1), "recompute")
    assert due() == (True, False), "it has to be computed again"
    built.cancel(3)
    assert due() == (False, False)
    assert built.decode() == []


def test_a_finished_slot_does_not_run_on() -> None:
    built = engine(chunk=16)
    built.submit(request(0, [1, 2, 3], 2))
    built.submit(request(1, [1, 2, 3], 7))
    turns = finish(built)
    assert (len(turns[0].tokens), len(turns[1].tokens)) == (2, 7)
    assert built.statistics.decoded_tokens == 9
    assert built.statistics.chunks == 1


def test_cancel_takes_back_what_waits_and_what_runs() -> None:
    built = engine(slots=1)
    for id in range(3):
        built.submit(request(id, [1, 2, id], 12))
    step(built)
    built.cancel(0)
    built.cancel(1)
    built.cancel(77)
    assert set(finish(built)) == {2}


def test_release_forgets_a_conversation_and_cancels_what_runs_of_it() -> None:
    built = engine(slots=2)
    built.submit(request(0, [1, 2, 3], 12, conversation="a"))
    step(built)
    built.release("a")
    built.release("unknown")
    assert not built.busy
    asked = request(1, [1, 2, 3], 6, conversation="a")
    built.submit(asked)
    same(finish(built)[1], alone(asked))


# -------------------------------------------------------------------- taken back


def aborted(built: Engine, asked: Request, steps: int, *, swap: Any = None) -> Turn:
    """A request that is taken back every so many chunks, and goes on."""
    part: Turn | None = None
    built.submit(asked)
    while True:
        for _ in range(steps):
            for finished in step(built):
                return finished.turn if part is None else joined(part, finished.turn)
        new = built.abort(asked.id)
        if new is not None:
            part = new if part is None else joined(part, new)
        assert built.abort(asked.id) is None, "nothing of it is left in the engine"
        if swap is not None:
            swap()
        left = asked if part is None else rest(asked, part)
        assert left is not None
        built.submit(left)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(0.8, top_k=5)], ids=["greedy", "free", "top-k"])
@pytest.mark.parametrize("steps", [1, 2])
def test_an_aborted_and_continued_generation_gives_the_ids_of_an_uninterrupted_one(
    sampling: Sampling, steps: int
) -> None:
    asked = request(0, range(11), 13, sampling=sampling, seed=5)
    free = alone(asked)
    built = engine(chunk=2)
    same(aborted(built, asked, steps), free)
    assert built.statistics.prefill_tokens == 10, "what was cached is used again"
    stop = max(free.tokens.tolist(), key=free.tokens.tolist().index)  # the id that comes up last
    asked = request(1, range(11), 13, sampling=sampling, seed=5, stop=(stop,))
    turn = aborted(built, asked, steps)
    same(turn, alone(asked))
    assert turn.finish == "stop"


def test_an_aborted_generation_goes_on_where_its_conversation_lost_its_slot() -> None:
    asked, built = request(0, range(11), 13, seed=5), engine(chunk=2, slots=1)

    def intrude() -> None:
        built.submit(request(7, [3, 2, 1], 2))
        while not step(built):
            pass

    same(aborted(built, asked, 2, swap=intrude), alone(asked))
    assert built.statistics.evictions > 5


def test_what_waits_or_fills_is_taken_back_without_a_token() -> None:
    built = engine(slots=1, prefill_rows=1, prefill_tokens=4)
    for id in range(2):
        built.submit(request(id, range(20 + id), 8, seed=id))
    step(built)
    assert (built.live, built.waiting) == (1, 1)
    assert [built.abort(id) for id in (0, 1, 77)] == [None] * 3
    assert not built.busy
    built.submit(request(0, range(20), 8))
    same(finish(built)[0], alone(request(0, range(20), 8)))


def test_an_aborted_turn_is_what_was_sampled_so_far() -> None:
    built, asked = engine(chunk=2), request(0, [7] * 40, 8, seed=1)
    built.submit(asked)
    for _ in range(2):  # so long a context takes two calls to prefill
        step(built)
    part = built.abort(0)
    assert part is not None
    assert (len(part.tokens), part.versions.tolist(), part.finish, part.kv_version) == (2, [0, 0], "length", 0)
    np.testing.assert_array_equal(part.tokens, alone(asked).tokens[:2])
    left = rest(asked, part)
    assert left is not None
    assert (len(left.tokens), left.max_tokens) == (42, 6)
    built.check(left)  # together they fill the engine's length, as before


def test_nothing_is_left_of_a_request_whose_limit_or_stop_id_was_sampled() -> None:
    asked = request(0, [1, 2, 3], 8, seed=1)
    turn = alone(asked)
    assert rest(asked, turn) is None
    stop = int(turn.tokens[2])
    assert stop not in turn.tokens[:2]
    assert rest(request(0, [1, 2, 3], 20, stop=(9, stop)), alone(request(0, [1, 2, 3], 3, seed=1))) is None


# -------------------------------------------------------------------- new weights


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_an_aborted_generation_goes_on_under_new_weights(kv: Literal["keep", "recompute"]) -> None:
    """As in flight: the first tokens are the old weights', the others the new ones'; `recompute` keeps no key."""
    built, prompt = engine(chunk=2, prefill_tokens=16), list(range(12))
    weights = iter([(W1, (0, 1)), (W0, (2, 0))])
    turn = aborted(built, request(0, prompt, 6), 1, swap=lambda: built.swap(*next(weights), kv))
    assert turn.versions.tolist() == [0, 0, 1, 1, 0, 0]
    assert turn.kv_version == 0
    for part, under in ((slice(0, 2), W0), (slice(2, 4), W1), (slice(4, 6), W0)):
        gap = np.abs(turn.logprobs - uncached_logprobs(prompt, turn, weights=under))[part]
        kept = kv == "keep" and under is W1
        assert gap.max() > 1e-3 if kept else gap.max() < 1e-5
    newcomer = request(7, prompt, 4, seed=7)
    built.submit(newcomer)
    same(finish(built)[7], alone(newcomer))


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_new_life_may_go_back_in_steps_and_everything_is_computed_again(kv: Literal["keep", "recompute"]) -> None:
    built, prompt = engine(chunk=2, version=(1, 5)), list(range(12))
    built.submit(request(0, prompt, 4, conversation="idle"))
    context = [*prompt, *finish(built)[0].tokens.tolist(), 1]
    built.submit(request(1, prompt, 4))
    step(built)
    built.swap(W1, (2, 3), kv)
    before = built.statistics
    asked = [request(2, context, 4, conversation="idle"), request(3, [*prompt, 9], 4, seed=3)]
    for each in asked:
        built.submit(each)
    turns = finish(built)
    assert turns[1].versions.tolist() == [5, 5, 3, 3]
    last = uncached_logprobs(prompt, turns[1], weights=W1)[2:]
    np.testing.assert_allclose(turns[1].logprobs[2:], last, atol=1e-5)
    for each in asked:
        same(turns[each.id], alone(each, weights=W1))
        assert (turns[each.id].versions.tolist(), turns[each.id].kv_version) == ([3] * 4, 3)
    # The new weights' keys are shared as ever: the prompt is computed once.
    assert built.statistics.prefill_tokens - before.prefill_tokens == len(context) - 1


@pytest.mark.parametrize("kv", ["keep", "recompute"])
@pytest.mark.parametrize("conversation", [0, 1], ids=["same conversation", "another"])
def test_after_new_weights_a_prompt_is_answered_as_by_a_fresh_engine(
    kv: Literal["keep", "recompute"], conversation: int
) -> None:
    prompt, weights = list(range(20)), [W0, W1]
    built = engine()
    for step, sampling in enumerate((GREEDY, Sampling(), Sampling(0.6))):
        # Each round ends with the weights that the next one takes for the old ones.
        built.submit(request(0, [*prompt, 4], 8, conversation=10, sampling=sampling, seed=3))
        old = finish(built)[0]
        built.release(10)
        built.swap(weights[(step + 1) % 2], (0, step + 1), kv)
        asked = request(1, [*prompt, 5], 8, conversation=10 + conversation, sampling=sampling, seed=3)
        built.submit(asked)
        new = finish(built)[1]
        same(new, alone(asked, weights=weights[(step + 1) % 2]))
        assert old.tokens.tolist() != new.tokens.tolist()
        assert new.versions.tolist() == [step + 1] * 8
        assert new.kv_version == step + 1
        built.release(asked.conversation)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_new_weights_in_flight_are_stamped_token_by_token(kv: Literal["keep", "recompute"]) -> None:
    built, prompt = engine(chunk=2, prefill_tokens=16), list(range(12))
    for member in range(2):
        built.submit(request(member, prompt, 4, seed=member))
    step(built)
    built.swap(W1, (0, 1), kv)
    newcomer = request(7, prompt, 4, seed=7)
    built.submit(newcomer)
    turns = finish(built)
    for member in range(2):
        assert turns[member].versions.tolist() == [0, 0, 1, 1]
        assert turns[member].kv_version == 0, "its first tokens attended to nothing newer"
        first = turns[member].logprobs[:2]
        np.testing.assert_allclose(first, uncached_logprobs(prompt, turns[member])[:2], atol=1e-5)
        if kv == "recompute":
            last = uncached_logprobs(prompt, turns[member], weights=W1)[2:]
            np.testing.assert_allclose(turns[member].logprobs[2:], last, atol=1e-5)
    same(turns[7], alone(newcomer, weights=W1))
    assert turns[7].versions.tolist() == [1] * 4
    assert turns[7].kv_version == 1


def test_kept_keys_are_those_of_the_old_weights() -> None:
    """`keep` really keeps: the second half differs from both weights' full forward pass."""
    built, prompt = engine(chunk=2, prefill_tokens=16), list(range(12))
    built.submit(request(0, prompt, 4))
    step(built)
    built.swap(W1, (0, 1), "keep")
    turn = finish(built)[0]
    for weights in (W0, W1):
        gap = np.abs(turn.logprobs - uncached_logprobs(prompt, turn, weights=weights))[2:]
        assert gap.max() > 1e-3


def test_a_resident_conversation_may_go_on_with_kept_keys_and_says_so() -> None:
    built = engine()
    built.submit(request(0, range(8), 4, conversation="a"))
    context = [*range(8), *finish(built)[0].tokens.tolist(), 1]
    built.swap(W1, (0, 5), "keep")
    before = built.statistics.prefill_tokens
    built.submit(request(1, context, 4, conversation="a"))
    turn = finish(built)[1]
    assert built.statistics.prefill_tokens - before == 1
    assert turn.kv_version == 0
    assert turn.versions.tolist() == [5] * 4


def test_new_weights_while_a_long_prompt_is_prefilled() -> None:
    built, prompt = engine(prefill_rows=1, prefill_tokens=4), list(range(30))
    built.submit(request(0, prompt, 6))
    built.submit(request(1, prompt, 6, seed=1))
    step(built)
    built.swap(W1, (0, 1), "recompute")
    for id, turn in finish(built).items():
        same(turn, alone(request(id, prompt, 6, seed=id), weights=W1))
    built.submit(request(2, [9, *prompt], 6))
    built.submit(request(3, [9, *prompt], 6, seed=3))
    step(built)
    built.swap(W0, (0, 2), "keep")
    turns = finish(built)
    assert turns[2].kv_version == 1
    assert turns[3].kv_version == 2, "what waited for a prefix of the old weights makes its own"
    same(turns[3], alone(request(3, [9, *prompt], 6, seed=3)))


def test_kept_keys_do_not_survive_into_another_life_or_a_repeated_version() -> None:
    for version in [(1, 0), (0, 3)]:
        built = engine(version=(0, 3))
        built.submit(request(0, range(8), 4, conversation="a"))
        finish(built)
        built.swap(W1, version, "keep")
        asked = request(1, range(9), 4, conversation="a")
        built.submit(asked)
        same(finish(built)[1], alone(asked, weights=W1))


def test_conversations_go_on_through_buckets_evictions_and_new_weights() -> None:
    built = engine(slots=2, kv_buckets=(8, 16, 32))
    contexts = {conversation: [conversation + 1, 2, 3] for conversation in range(3)}
    for step, weights in enumerate((W0, W1, W0, W1)):
        if step:
            built.swap(weights, (0, step), "recompute")
        for conversation, context in contexts.items():
            asked = request(10 * step + conversation, context, 6, conversation=conversation, seed=conversation)
            built.submit(asked)
        turns = finish(built)
        for conversation, context in contexts.items():
            turn = turns[10 * step + conversation]
            same(turn, alone(request(0, context, 6, seed=conversation), weights=weights, kv_buckets=()))
            assert turn.versions.tolist() == [step] * 6
            contexts[conversation] = [*context, *turn.tokens.tolist(), 9, 8, 7]
    assert built.statistics.evictions > 0


def test_weights_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    built = engine(version=(2, 7))
    leaves = jax.tree.leaves(W1)
    before = built.checksum()
    with pytest.raises(ValueError, match=r"lie before \(2, 7\)"):
        built.swap(W1, (2, 6), "keep")
    with pytest.raises(ValueError, match="arrays are given"):
        built.swap(leaves[1:], (2, 8), "keep")
    with pytest.raises(ValueError, match="bfloat16"):
        built.swap([leaf.astype(jnp.bfloat16) for leaf in leaves], (2, 8), "keep")
    with pytest.raises(ValueError, match="ndarray"):
        built.swap([np.asarray(leaf) for leaf in leaves], (2, 8), "keep")
    assert built.version == (2, 7)
    assert built.checksum() == before
    built.swap(leaves, (2, 8), "keep")
    assert built.checksum() != before


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(top_p=0.9), Sampling(top_k=2), GREEDY], ids=["free", "p", "k", "greedy"]
)
def test_weights_that_overflow_end_the_run_by_name(sampling: Sampling) -> None:
    built = engine(weights=jax.tree.map(lambda leaf: leaf * jnp.nan, W0))
    built.submit(request(41, [1, 2, 3], sampling=sampling))
    with pytest.raises(NumericsError, match="request 41"):
        step(built)


# -------------------------------------------------------------------- shapes


@pytest.mark.slow
def test_nothing_compiles_after_the_warm_up(compilations: list[str]) -> None:
    copied, placed = jax.tree.map(jnp.copy, W1), jax.device_put(W0, jax.devices()[0])
    built = engine(slots=3, length=40, chunk=5, kv_buckets=(16,), restricted=True)
    built.warm_up()
    shapes = built.statistics.compiled_shapes
    assert len(compilations) >= shapes == 2 * (2 + 1 + 2)
    compilations.clear()
    rng = np.random.default_rng(0)
    for id in range(12):
        length = int(rng.integers(1, 20))
        sampling = [GREEDY, Sampling(), Sampling(0.7, 0.9, 5)][id % 3]
        built.submit(request(id, [1] * length, int(rng.integers(1, 20)), sampling=sampling, stop=(3,) * (id % 4)))
    step(built)
    built.swap(copied, (1, 0), "recompute")
    finish(built)
    built.swap(placed, (1, 1), "keep")
    built.submit(request(50, [1, 2, 3]))
    finish(built)
    assert built.statistics.compiled_shapes == shapes
    assert compilations == []


def test_a_shape_that_was_not_declared_is_named_once_and_counted() -> None:
    built = engine()
    asked = [request(id, [1, 2, 3], 4, sampling=Sampling(top_k=id + 1)) for id in range(2)]
    built.submit(asked[0])
    finish(built)
    assert built.statistics.late_shapes == 0, "nothing is late before the warm-up"
    built = engine()
    built.warm_up()
    shapes = built.statistics.compiled_shapes
    built.submit(asked[0])
    with pytest.warns(RecompileWarning, match=r"\('decode', 16, 'restricted'\) .* while 1 requests wait"):
        turns = finish(built)
    built.submit(asked[1])  # warnings are errors here: a second one would be raised
    turns |= finish(built)
    assert (built.statistics.late_shapes, built.statistics.compiled_shapes) == (1, shapes + 1)
    for one in asked:
        same(turns[one.id], alone(one))


def test_warming_up_changes_nothing_that_is_cached() -> None:
    built = engine()
    built.submit(request(0, range(12), 12))
    step(built)
    built.warm_up()
    same(finish(built)[0], alone(request(0, range(12), 12)))


# -------------------------------------------------------------------- everything at once


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_random_workload_gives_what_each_request_gives_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    built = engine(
        slots=int(rng.integers(1, 4)), prefill_rows=int(rng.integers(1, 5)), prefill_tokens=int(rng.integers(1, 6))
    )
    prompts = [rng.integers(0, VOCABULARY, size=n).tolist() for n in (1, 6, 14)]
    asked: dict[int, Request] = {}
    turns: dict[int, Turn] = {}
    open_ids: set[int] = set()
    for id in range(28):
        conversation = int(rng.integers(0, 6))
        before = [old for old in asked.values() if old.conversation == conversation]
        if before and before[-1].id in open_ids:
            action = rng.integers(0, 3)
            if action == 0:
                built.cancel(before[-1].id)
                open_ids.discard(before[-1].id)
        else:
            context = prompts[rng.integers(0, 3)] + rng.integers(0, VOCABULARY, size=rng.integers(0, 3)).tolist()
            if before and before[-1].id in turns and rng.random() < 0.7:
                longer = [*before[-1].tokens.tolist(), *turns[before[-1].id].tokens.tolist(), int(rng.integers(0, 9))]
                context = longer if len(longer) < 36 else context
            asked[id] = request(
                id,
                context,
                int(rng.integers(1, 8)),
                conversation=conversation,
                seed=int(rng.integers(0, 1000)),
                sampling=[Sampling(), Sampling(0.6), GREEDY][rng.integers(0, 3)],
                stop=tuple(rng.integers(0, VOCABULARY, size=rng.integers(0, 3)).tolist()),
            )
            built.submit(asked[id])
            open_ids.add(id)
        if rng.random() < 0.1:
            built.release(conversation)  # whatever runs or not
            running = [old.id for old in asked.values() if old.conversation == conversation and old.id in open_ids]
            for old in running:
                built.cancel(old)
            open_ids -= set(running)
        for _ in range(int(rng.integers(0, 3))):
            done = {finished.id: finished.turn for finished in step(built)}
            turns |= done
            open_ids -= set(done)
    turns |= finish(built)
    assert open_ids <= set(turns) <= set(asked)
    reference = engine(slots=1, prefill_rows=1, prefill_tokens=48)
    for id, turn in turns.items():
        original = asked[id]
        # Another life each time: the reference reuses nothing of an earlier request.
        reference.swap(W0, (reference.version[0] + 1, 0), "recompute")
        reference.submit(original)
        same(turn, finish(reference)[id])
        np.testing.assert_array_equal(np.unique(turn.versions), [0])

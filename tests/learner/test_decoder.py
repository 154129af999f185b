import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from trouper.channels import ModelError
from trouper.learner.decoder import Decoder, check_token_ids, make_cache
from trouper.learner.model_config import ModelConfig
from trouper.learner.weights import array_shapes, init_model, load_model, write_json

_spec = importlib.util.spec_from_file_location("golden_weights", Path(__file__).with_name("golden_weights.py"))
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    rope_theta=100.0,
)


@pytest.fixture(scope="module")
def decoder():
    return louder(init_model(CONFIG, 0))


def louder(model):
    """The same model with larger matrices: attention then prefers some tokens, so a wrong mask shows."""
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x * 5 if x.ndim == 2 else x, state))
    return model


def causal(length):
    return np.tril(np.ones((length, length), bool))


@nnx.jit
def hidden_states(model, tokens, positions, mask):
    return model(tokens, positions, mask)


@nnx.jit
def next_logprobs(model, tokens, positions, mask):
    scores = jax.nn.log_softmax(model.logits(model(tokens, positions, mask))[:, :-1], -1)
    return jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]


extend = jax.jit(
    lambda graph, state, cache, tokens, positions, slots, kv_length: nnx.merge(graph, state).extend(
        cache, tokens, positions, slots, kv_length
    ),
    static_argnums=(0, 6),
)


def whole(model, tokens):
    """Hidden states of whole rows [B, T]."""
    batch, length = tokens.shape
    positions = jnp.tile(jnp.arange(length), (batch, 1))
    return hidden_states(model, jnp.asarray(tokens), positions, jnp.tile(causal(length), (batch, 1, 1)))


def logprobs(model, tokens, positions, mask):
    """Log-probability of each row's next token, float32 [B, T - 1]; softmax in float32."""
    return np.asarray(next_logprobs(model, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(mask)))


@pytest.mark.parametrize("name", golden.CONFIGS)
def test_logits_match_the_golden_ones(name, tmp_path):
    config = ModelConfig.from_hf(golden.CONFIGS[name])
    write_json(tmp_path / "config.json", golden.CONFIGS[name])
    arrays = {key: golden.weight(key, shape) for key, shape in array_shapes(config).items()}
    save_file(arrays, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    logits = np.asarray(model.logits(whole(model, golden.TOKENS)))[:, ::3]
    expected = np.load(Path(__file__).parent / "goldens" / "decoder_logits.npz")[name]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-scaled", "qwen2", "qwen3-tied"])
def test_appending_to_cached_slots_equals_one_whole_pass(name):
    model = louder(init_model(ModelConfig.from_hf(golden.CONFIGS[name]), 1))
    tokens = golden.TOKENS
    expected = whole(model, tokens)
    cache = make_cache(model.config, slots=4, length=20)
    slots = jnp.array([2, 0])
    parts = []
    for start, end in ((0, 7), (7, 14)):  # prefill, append
        positions = jnp.tile(jnp.arange(start, end), (2, 1))
        hidden, cache = extend(*nnx.split(model), cache, jnp.asarray(tokens[:, start:end]), positions, slots, 16)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, atol=2e-5)


def test_token_by_token_over_all_slots_equals_one_whole_pass(decoder):
    tokens = np.random.default_rng(0).integers(0, 40, (3, 7))
    cache = make_cache(CONFIG, slots=3, length=8)
    hidden = []
    for position in range(7):
        step, cache = extend(
            *nnx.split(decoder), cache, jnp.asarray(tokens[:, position, None]), jnp.full((3, 1), position), None, 8
        )
        hidden.append(step)
    np.testing.assert_allclose(jnp.concatenate(hidden, 1), whole(decoder, tokens), atol=2e-5)


def test_positions_beyond_the_cache_write_nothing(decoder):
    cache = make_cache(CONFIG, slots=2, length=8)
    tokens = jnp.array([[1, 2, 3]])
    _, cache = extend(*nnx.split(decoder), cache, tokens, jnp.array([[0, 1, 2]]), jnp.array([0]), 8)
    hidden, after = extend(*nnx.split(decoder), cache, tokens, jnp.array([[8, 9, 8]]), jnp.array([0]), 8)
    assert jax.tree.all(jax.tree.map(np.array_equal, cache, after))
    assert np.isfinite(hidden).all()


def test_slots_do_not_see_each_other(decoder):
    tokens = jnp.array([[5, 6, 7], [8, 9, 10]])
    positions = jnp.tile(jnp.arange(3), (2, 1))
    together, _ = extend(*nnx.split(decoder), make_cache(CONFIG, 2, 4), tokens, positions, None, 4)
    alone, _ = extend(*nnx.split(decoder), make_cache(CONFIG, 1, 4), tokens[1:], positions[1:], None, 4)
    np.testing.assert_allclose(together[1], alone[0], atol=1e-6)


# Two rows of prompt + completion, in every layout that a batch may have.
ROWS = [np.array([3, 14, 15, 9, 26]), np.array([5, 35, 8, 9, 7, 9, 32, 38, 4])]
COMPLETIONS = [2, 4]


@pytest.fixture(scope="module")
def alone(decoder):
    """Log-probs of each completion, each row a batch of its own."""
    return [
        logprobs(decoder, row[None], np.arange(len(row))[None], causal(len(row))[None])[0, -count:]
        for row, count in zip(ROWS, COMPLETIONS, strict=True)
    ]


def padded(side, rows, width=12):
    """Tokens, positions and mask, both [B, T]-shaped, of rows padded to `width` on one side."""
    tokens, positions = np.zeros((len(rows), width), int), np.zeros((len(rows), width), int)
    mask = np.zeros((len(rows), width, width), bool)
    for i, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        span = slice(start, start + len(row))
        tokens[i, span], positions[i, span], mask[i, span, span] = row, np.arange(len(row)), causal(len(row))
    return tokens, positions, mask


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_log_probs(decoder, alone, side):
    tokens, positions, mask = padded(side, ROWS)
    result = logprobs(decoder, tokens, positions, mask)
    assert np.isfinite(result).all()
    for i, row in enumerate(ROWS):
        end = 11 if side == "left" else len(row) - 1
        np.testing.assert_allclose(result[i, end - COMPLETIONS[i] : end], alone[i], atol=1e-5)


def test_packed_rows_restart_their_positions_and_do_not_see_each_other(decoder, alone):
    first, second = ROWS
    length = len(first) + len(second)
    tokens = np.concatenate(ROWS)[None]
    positions = np.concatenate([np.arange(len(first)), np.arange(len(second))])[None]
    mask = np.zeros((1, length, length), bool)
    mask[0, :5, :5], mask[0, 5:, 5:] = causal(5), causal(9)
    result = logprobs(decoder, tokens, positions, mask)[0]
    np.testing.assert_allclose(result[2:4], alone[0], atol=1e-5)
    np.testing.assert_allclose(result[-4:], alone[1], atol=1e-5)


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_batch_company_does_not_change_log_probs(decoder, alone, micro_batch):
    generator = np.random.default_rng(1)
    rows = [*ROWS, *(generator.integers(0, 40, size) for size in (3, 12, 7, 7, 2, 10))]
    tokens, positions, mask = padded("right", rows)
    parts = [
        logprobs(decoder, tokens[i : i + micro_batch], positions[i : i + micro_batch], mask[i : i + micro_batch])
        for i in range(0, 8, micro_batch)
    ]
    result = np.concatenate(parts)
    np.testing.assert_allclose(result[0, 2:4], alone[0], atol=1e-5)
    np.testing.assert_allclose(result[1, 4:8], alone[1], atol=1e-5)


def test_bfloat16_keeps_logits_and_their_normalizer_in_float32(decoder, alone):
    model = init_model(CONFIG, 0, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(decoder, nnx.Param)))
    tokens, positions, mask = padded("left", ROWS)
    hidden = hidden_states(model, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(mask))
    logits = model.logits(hidden)
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    # Not merely float32 by type: bfloat16 could not hold these values.
    assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))
    first, again = logprobs(model, tokens, positions, mask), logprobs(model, tokens, positions, mask)
    assert (first <= 0).all()
    np.testing.assert_array_equal(np.exp(again - first), 1)
    for i in range(2):
        np.testing.assert_allclose(first[i, 11 - COMPLETIONS[i] : 11], alone[i], atol=0.15)


def test_queries_in_blocks_have_the_output_and_the_gradients_of_one_dense_product(decoder):
    """Three blocks, the last one short, under a random mask: no layout of segments is assumed beyond causality."""
    generator = np.random.default_rng(0)
    q, k, v, weight = (
        jnp.asarray(generator.normal(size=shape), jnp.float32)
        for shape in ((2, 300, 4, 8), (2, 2, 8, 300), (2, 2, 300, 8), (2, 300, 32))
    )
    mask = np.tril(generator.random((2, 300, 300)) < 0.3) | np.eye(300, dtype=bool)
    mask[1, 280:] = False  # padding

    def result(attend):
        def loss(q, k, v):
            output = attend(q, k, v, mask)
            return (output * weight).sum(), output

        gradients, output = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
        return output[:, :280], *gradients

    attention = decoder.layers[0].self_attn
    weight = weight.at[1, 280:].set(0)
    for found, dense in zip(result(attention.attend_rows), result(attention.attend), strict=True):
        assert np.linalg.norm(found - dense) <= 1e-5 * np.linalg.norm(dense)


def test_recomputing_blocks_changes_no_gradient():
    def gradients(remat):
        model = init_model(CONFIG, 3, remat=remat)
        loss = nnx.jit(nnx.value_and_grad(lambda m: (m.logits(whole(m, ROWS[0][None])) ** 2).mean()))
        return loss(model)

    (plain, plain_gradients), (saving, saving_gradients) = gradients(False), gradients(True)
    np.testing.assert_allclose(plain, saving, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), plain_gradients, saving_gradients)


def test_a_tied_embedding_is_one_parameter_with_both_gradients():
    config = ModelConfig.from_hf(golden.CONFIGS["llama-tied"])
    model = init_model(config, 0)
    names = [path[0] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert "lm_head" not in names
    assert names.count("embed_tokens") == 1
    gradient = nnx.jit(nnx.grad(lambda m: jax.nn.logsumexp(m.logits(whole(m, np.array([[1, 2]]))))))(model)
    rows = np.abs(gradient["embed_tokens"]["embedding"].get_value()).sum(-1)
    assert (rows > 0).all()  # as head: every row; as input: more for the rows that were read
    assert rows[[1, 2]].min() > np.delete(rows, [1, 2]).max()


def test_initial_parameters_follow_from_the_seed():
    first, same, other = (nnx.state(init_model(CONFIG, seed), nnx.Param) for seed in (4, 4, 5))
    assert jax.tree.all(jax.tree.map(np.array_equal, first, same))
    assert not jax.tree.all(jax.tree.map(np.array_equal, first, other))
    assert isinstance(init_model(CONFIG, 4), Decoder)


@pytest.mark.parametrize("accepted", [[0], [248_069, 248_319], [], [[1, 2], [3, 4]]])
def test_ids_within_the_table_are_accepted_whatever_the_tokenizer_counts(accepted):
    ids = check_token_ids(accepted, 248_320)
    assert ids.dtype == np.int32
    assert ids.tolist() == accepted


@pytest.mark.parametrize("refused", [248_320, -1, 2**40])
def test_ids_outside_the_table_are_refused_by_number(refused):
    with pytest.raises(ModelError, match=rf"{refused} is outside the embedding table of 248320 rows"):
        check_token_ids([5, refused], 248_320)


def test_ids_in_a_narrow_or_broken_dtype_are_refused():
    with pytest.raises(ModelError, match="uint16"):
        check_token_ids(np.array([70_000 % 65_536], np.uint16), 248_320)
    with pytest.raises(ModelError, match="float64"):
        check_token_ids([1.0], 8)
    assert check_token_ids(np.array([7], np.uint8), 16).tolist() == [7]


@given(st.lists(st.integers(-3, 20), max_size=6), st.integers(1, 16))
@settings(deadline=None)
def test_exactly_the_rows_of_the_table_are_accepted(ids, vocab_size):
    if all(0 <= number < vocab_size for number in ids):
        assert check_token_ids(ids, vocab_size).tolist() == ids
    else:
        with pytest.raises(ModelError):
            check_token_ids(ids, vocab_size)

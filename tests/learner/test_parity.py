"""Engine and learner with the same weights: what one says of a token it sampled, the other says when it trains it."""

from collections import defaultdict

import numpy as np
import pytest

from trouper.channels import Row, Sampling
from trouper.learner.batch import BatchConfig
from trouper.learner.engine import Engine, Request
from trouper.learner.learner import Learner
from trouper.learner.loss import LossConfig
from trouper.learner.optimizer import OptimizerConfig

FAMILIES = {
    "llama": {"num_hidden_layers": 2},
    "qwen2": {"model_type": "qwen2", "attention_bias": True, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
}
VOCAB_LIMIT = 24
GROUPS, MEMBERS, TURNS = 3, 4, 3


def play(engine, prompts, temperatures, observe):
    """Rows of groups whose members share a prompt, over several turns; ids that end a turn make them unequal."""
    tokens = {(g, m): prompts[g] for g in range(GROUPS) for m in range(MEMBERS)}
    turns = defaultdict(list)
    for turn in range(TURNS):
        for number, ((group, member), context) in enumerate(tokens.items()):
            sampling = Sampling(temperatures[group])
            request = Request(number, (group, member), context, 6, sampling, (3, 5), seed=97 * number + turn)
            engine.submit(request)
        while engine.busy:
            engine.prefill()
            for finished in engine.decode():
                key = divmod(finished.id, MEMBERS)
                turns[key].append((len(tokens[key]), finished.turn))
                tokens[key] = np.concatenate([tokens[key], finished.turn.tokens, observe()])
    rows = {}
    for key, context in tokens.items():
        mask, logprobs = np.zeros(len(context), np.bool_), np.zeros(len(context), np.float32)
        for start, turn in turns[key]:
            here = slice(start, start + len(turn.tokens))
            mask[here], logprobs[here] = True, turn.logprobs
        versions = np.where(mask, 0, -1).astype(np.int32)
        rows[key] = Row(context, mask, logprobs, versions, Sampling(temperatures[key[0]]))
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ratio_of_a_first_step_is_one(family, make_decoder, make_group):
    decoder = make_decoder(0, **FAMILIES[family])
    rng = np.random.default_rng(1)
    engine = Engine(
        decoder, slots=8, length=64, chunk=3, prefill_rows=4, prefill_tokens=8, kv_buckets=(), vocab_limit=VOCAB_LIMIT
    )

    def ids(low, high):
        return rng.integers(0, VOCAB_LIMIT, rng.integers(low, high)).astype(np.int32)

    rows = play(engine, [ids(1, 20) for _ in range(GROUPS)], [0.6, 1.0, 1.3], lambda: ids(0, 4))
    assert engine.statistics.reused_tokens > 0
    groups = [
        make_group(g, [[rows[g, m]] for m in range(MEMBERS)], rng.normal(size=MEMBERS).tolist()) for g in range(GROUPS)
    ]
    for share_prefix in (True, False):
        learner = Learner(
            decoder,
            loss=LossConfig(),
            optimizer=OptimizerConfig(),
            batch=BatchConfig(row_tokens=128, micro_batch_size=2, share_prefix=share_prefix),
            vocab_limit=VOCAB_LIMIT,
        )
        learner.add(groups)
        metrics = learner.update()
        assert metrics["tokens"] == sum(row.sampled for row in rows.values())
        assert metrics["mismatch/abs_max"] <= 1e-4
        assert metrics["mismatch/is_ratio_max"] == pytest.approx(1, abs=1e-4)


def test_a_published_copy_gives_the_engine_the_trained_weights(make_decoder, random_groups):
    """The learner's copy is in the order the engine expects, and its next step does not reach it."""
    decoder = make_decoder()
    learner = Learner(
        decoder,
        loss=LossConfig(),
        optimizer=OptimizerConfig(learning_rate=0.1),
        batch=BatchConfig(row_tokens=64, micro_batch_size=2),
    )
    engine = Engine(decoder, slots=2, length=16, chunk=4, prefill_rows=2, prefill_tokens=8, kv_buckets=())

    def said():
        engine.submit(Request(0, 0, np.array([1, 2, 3], np.int32), 8, Sampling(0.0)))
        turns = []
        while not turns:
            engine.prefill()
            turns = engine.decode()
        engine.release(0)
        return turns[0].turn.tokens.tolist()

    before, first = engine.checksum(), said()
    learner.add(random_groups(0))
    learner.update()
    engine.swap(learner.copy_params(), (0, 1), "keep")
    after, second = engine.checksum(), said()
    assert after != before
    assert second != first
    learner.add(random_groups(1))
    learner.update()
    assert engine.checksum() == after
    assert Engine(decoder, slots=2, length=16).checksum() == before  # nor has training reached the decoder

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from trouper.channels import ConfigError, NumericsError, Row, Sampling
from trouper.learner.batch import BatchConfig, Packer, Sample, check_row


def seen_by(batch, row, token):
    """Indices a token of a packed row may look at, itself included."""
    segments = batch.segments[row]
    allowed = (segments == segments[token]) | ((segments == batch.prefixes[row, token]) & (segments >= 0))
    return np.flatnonzero(allowed & (np.arange(len(segments)) <= token))


def trained(batches):
    """Every trained token as (what predicts it, itself, log-prob, advantage, weight, temperature)."""
    found = []
    for batch in batches:
        for row, n in zip(*np.nonzero(batch.mask), strict=True):
            context = seen_by(batch, row, batch.sources[row, n])
            assert batch.positions[row, context].tolist() == list(range(len(context)))
            numbers = [a[row, n] for a in (batch.sampler, batch.advantages, batch.weights, batch.temperatures)]
            found.append((tuple(batch.tokens[row, context]), batch.targets[row, n], *map(float, numbers)))
    return sorted(found)


def expected(samples):
    return sorted(
        (
            tuple(s.row.tokens[:t]),
            s.row.tokens[t],
            float(s.row.logprobs[t]),
            float(np.float32(s.advantage)),
            float(np.float32(s.weight)),
            float(np.float32(s.row.sampling.temperature)),
        )
        for s in samples
        for t in np.flatnonzero(s.row.loss_mask)
    )


@st.composite
def groups_of_samples(draw):
    ids = st.integers(0, 3)  # few ids, so that prefixes collide and every id is some padding id
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        prompts = draw(st.lists(st.lists(ids, min_size=1, max_size=5), min_size=1, max_size=2))
        samples = []
        for _ in range(draw(st.integers(0, 5))):
            prompt = draw(st.sampled_from(prompts))
            body = draw(st.lists(st.tuples(ids, st.booleans()), max_size=7))
            tail = draw(st.lists(ids, max_size=2))
            tokens = np.array([*prompt, 1, *(t for t, _ in body), *tail], np.int32)
            mask = np.array([False] * len(prompt) + [True] + [m for _, m in body] + [False] * len(tail))
            number = float(len(samples) + 10 * len(groups) + 1)
            logprobs = np.where(mask, -np.arange(len(tokens)) - number / 100, 0).astype(np.float32)
            row = Row(tokens, mask, logprobs, np.zeros(len(tokens), np.int32), Sampling(temperature=number))
            samples.append(Sample(row, number, 1 / number))
        groups.append(samples)
    return groups


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    groups_of_samples(),
    st.integers(15, 40),
    st.integers(8, 40),
    st.integers(1, 3),
    st.sets(st.integers(1, 14)),
    st.booleans(),
    st.booleans(),
)
def test_every_sampled_token_is_trained_once_with_exactly_its_own_context(
    groups, width, most_trained, size, buckets, share, streamed
):
    config = BatchConfig(
        row_tokens=width,
        micro_batch_size=size,
        buckets=tuple(buckets),
        trained_tokens=most_trained,
        share_prefix=share,
    )
    packer, batches = Packer(config), []
    for samples in groups:
        packer.add(samples)
        if streamed:
            batches += packer.full()
    batches += packer.rest()
    assert trained(batches) == expected([s for samples in groups for s in samples])
    assert {(b.tokens.shape[1], b.mask.shape[1]) for b in batches} <= set(config.shapes)
    assert all(len(b.tokens) == size for b in batches)
    assert packer.tokens == sum(int((b.segments >= 0).sum()) for b in batches)
    assert packer.slots == sum(b.tokens.size for b in batches)
    assert list(packer.rest()) == []


def test_a_groups_prompt_is_laid_out_once(make_row):
    prompt = list(range(20))
    samples = [Sample(make_row(prompt, [1, 2, 3, member]), 1.0, 1.0) for member in range(8)]
    packer = Packer(BatchConfig(row_tokens=64))
    packer.add(samples)
    (batch,) = packer.rest()
    # The last sampled token predicts nothing, so 3 of 4 are laid out.
    assert packer.tokens == 20 + 8 * 3
    assert batch.positions[0, : packer.tokens].tolist() == [*range(20), *[20, 21, 22] * 8]


def test_a_group_too_long_for_a_packed_row_is_split_and_each_part_has_the_prompt(make_row):
    samples = [Sample(make_row([7] * 10, [1, 2, 3, member]), 1.0, 1.0) for member in range(8)]
    packer = Packer(BatchConfig(row_tokens=20, micro_batch_size=2))
    packer.add(samples)
    batches = list(packer.rest())
    assert trained(batches) == expected(samples)
    assert packer.tokens == 3 * 10 + 8 * 3
    packer = Packer(BatchConfig(row_tokens=64, trained_tokens=8))
    packer.add(samples)
    batches = list(packer.rest())
    assert trained(batches) == expected(samples)
    assert all(batch.mask.sum(1).max() <= 8 for batch in batches)


def test_prompts_that_only_begin_alike_share_what_they_have_in_common(make_row):
    samples = [Sample(make_row([9] * 10 + [member], [1, 2]), 1.0, 1.0) for member in range(4)]
    packer = Packer(BatchConfig(row_tokens=64))
    packer.add(samples)
    assert trained(packer.rest()) == expected(samples)
    assert packer.tokens == 10 + 4 * 2


def test_the_layout_with_least_padding_is_taken_and_among_equals_the_one_of_fewest_calls(make_row):
    config = BatchConfig(row_tokens=64, buckets=(32, 16), micro_batch_size=2)

    def shapes(*lengths):
        packer = Packer(config)
        for group, length in enumerate(lengths):
            packer.add([Sample(make_row([group] * 3, [1] * length), 1.0, 1.0)])
        return [batch.tokens.shape for batch in packer.rest()]

    assert shapes(6) == [(2, 16)]
    # Two pieces of 8 to a row of 16 would take as many places in twice the calls.
    assert shapes(6, 6, 6, 6, 6) == [(2, 32)]
    assert shapes(20) == [(2, 32)]
    # One row of 64 would hold both and leave the second row empty.
    assert shapes(30, 30) == [(2, 32)]
    # What is left after full rows is laid out as narrow as it allows.
    assert shapes(60, 60, 6) == [(2, 64), (2, 16)]


def test_a_full_micro_batch_takes_the_narrowest_shape_that_holds_its_rows(make_row):
    packer = Packer(BatchConfig(row_tokens=64, buckets=(40,)))
    for _ in range(3):
        packer.add([Sample(make_row([1, 2, 3], [4] * 33), 1.0, 1.0)])
    assert [batch.tokens.shape for batch in packer.full()] == [(1, 40)] * 2
    assert packer.tokens == 2 * 35


@pytest.mark.parametrize(
    ("row_tokens", "widths"),
    [(2048, [1024, 1536, 2048]), (440, [256, 384, 440]), (256, [128, 256]), (129, [128, 129]), (64, [64])],
)
def test_without_buckets_a_half_and_three_quarters_of_the_row_are_compiled_too(row_tokens, widths):
    assert [width for width, _ in BatchConfig(row_tokens=row_tokens).shapes] == widths
    assert BatchConfig(row_tokens=row_tokens, buckets=()).shapes == ((row_tokens, row_tokens),)


def test_full_micro_batches_leave_early_and_the_open_rows_wait(make_row):
    packer = Packer(BatchConfig(row_tokens=8, micro_batch_size=2))
    left = []
    for _ in range(5):
        packer.add([Sample(make_row([1, 2, 3], [4] * 5), 1.0, 1.0)])
        left.append(len(list(packer.full())))
    assert left == [0, 0, 1, 0, 1]
    assert len(list(packer.rest())) == 1


def test_masks_come_from_lengths_never_from_ids(make_row):
    end = 2  # also the padding id
    short, long = make_row([], [20, 21, end]), make_row([], [20, end], [7], [23, end])
    assert short.loss_mask.tolist() == [True] * 3
    assert long.loss_mask.tolist() == [True, True, False, True, True]
    rows = [make_row([9], [20, 21, end]), make_row([9], [20, end], [7], [23, end])]
    for share in (True, False):
        packer = Packer(BatchConfig(row_tokens=16, share_prefix=share))
        packer.add([Sample(row, 1.0, 1.0) for row in rows])
        found = trained(packer.rest())
        assert len(found) == 3 + 4
        assert ((9, 20, end, 7, 23), end) in [entry[:2] for entry in found]


def test_rows_that_cannot_be_trained_are_refused_by_name(make_row):
    config = BatchConfig(row_tokens=8, trained_tokens=4)
    check_row(config, make_row([1, 2], [3, 4, 5, 6]), "fits")
    with pytest.raises(ConfigError, match=r"slot 3.*row_tokens = 8"):
        check_row(config, make_row([1] * 8, [3, 4]), "slot 3")
    with pytest.raises(ConfigError, match="trained_tokens = 4"):
        check_row(config, make_row([1], [3] * 5), "slot 3")
    with pytest.raises(ConfigError, match="temperature 0"):
        check_row(config, make_row([1], [3], temperature=0.0), "slot 3")
    with pytest.raises(ConfigError, match="nothing predicts"):
        check_row(config, make_row([], [3]), "slot 3")
    row = make_row([1], [3])
    for sampling in (Sampling(top_p=0.9), Sampling(top_k=20)):
        with pytest.raises(ConfigError, match="support"):
            check_row(config, msgspec.structs.replace(row, sampling=sampling), "slot 3")
    for bad in (float("nan"), float("-inf")):
        with pytest.raises(NumericsError, match="1 of 2 sampled tokens"):
            check_row(config, make_row([1], [3, 4], logprobs=[-1, bad]), "slot 3")


@pytest.mark.parametrize(
    "wrong",
    [
        {"row_tokens": 0},
        {"row_tokens": 8, "micro_batch_size": 0},
        {"row_tokens": 8, "buckets": [9]},
        {"row_tokens": 8, "trained_tokens": 0},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, BatchConfig)

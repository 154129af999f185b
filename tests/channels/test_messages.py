from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trouper.channels import (
    Attempt,
    Episode,
    Group,
    Lost,
    Message,
    Outcome,
    Row,
    Sampling,
    Task,
    Turn,
    Void,
    Weights,
    decoder,
    encode,
)
from trouper.channels.messages import EpisodeStatus, FinishReason, LossKind

integers = st.integers(-1, 2**31 - 1)
numbers = st.floats(width=32)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
tasks = st.builds(Task, id=st.text(), payload=st.dictionaries(st.text(), plain, max_size=3), environment=st.text())
attempts = st.builds(
    Attempt, slot=integers, draw=integers, member=integers, tries=integers, run_seed=integers, task=tasks
)
samplings = st.builds(Sampling, temperature=st.floats(0, 2), top_p=st.floats(0.1, 1), top_k=st.integers(0, 100))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    length = draw(st.integers(0, 8))
    return Row(
        tokens=draw(hnp.arrays(np.int32, length)),
        loss_mask=draw(hnp.arrays(np.bool_, length)),
        logprobs=draw(hnp.arrays(np.float32, length)),
        versions=draw(hnp.arrays(np.int32, length)),
        sampling=draw(samplings),
    )


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    length = draw(st.integers(0, 8))
    return Turn(
        tokens=draw(hnp.arrays(np.int32, length)),
        logprobs=draw(hnp.arrays(np.float32, length)),
        versions=draw(hnp.arrays(np.int32, length)),
        finish=draw(st.sampled_from(get_args(FinishReason))),
        kv_version=draw(integers),
    )


episodes = st.builds(
    Episode,
    attempt=attempts,
    rows=st.lists(rows(), max_size=2).map(tuple),
    reward=st.none() | numbers,
    status=st.sampled_from(get_args(EpisodeStatus)),
    turns=st.integers(0, 9),
    messages=st.lists(st.builds(Message, role=st.text(), content=st.text()), max_size=2).map(tuple),
    metrics=st.dictionaries(st.text(), numbers, max_size=2),
    timings=st.dictionaries(st.text(), numbers, max_size=2),
)
losses = st.builds(Lost, attempt=attempts, kind=st.sampled_from(get_args(LossKind)), cause=st.text())
voids = st.builds(Void, slot=integers, reason=st.text())


@st.composite
def groups(draw: st.DrawFn) -> Group:
    members = tuple(draw(st.lists(episodes, max_size=2)))
    return Group(
        slot=draw(integers),
        draw=draw(integers),
        episodes=members,
        advantages=draw(hnp.arrays(np.float32, len(members))),
        void=draw(st.none() | st.text()),
        lost=draw(st.integers(0, 4)),
    )


def same(one: Any, other: Any) -> bool:
    """Equal to the bit, through structs, arrays and NaNs."""
    if type(one) is not type(other):
        return False
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other) or (one != one and other != other)


@settings(deadline=None)
@given(st.one_of(tasks, attempts, rows(), turns(), episodes, losses, voids, groups()))
def test_every_message_survives_encoding(message: msgspec.Struct) -> None:
    assert same(decoder(type(message)).decode(encode(message)), message)


@pytest.mark.parametrize("wrong", [{"finish": "tired"}, {"kv_version": "0"}, {"tokens": None}])
def test_decoding_refuses_what_does_not_fit(wrong: dict[str, Any]) -> None:
    empty = np.zeros(0, np.float32)
    fields = {"tokens": empty, "logprobs": empty, "versions": empty, "finish": "stop", "kv_version": 0}
    with pytest.raises(msgspec.ValidationError):
        decoder(Turn).decode(encode({**fields, **wrong}))


@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "versions"])
def test_a_row_whose_arrays_differ_in_length_is_refused(name: str) -> None:
    arrays = {
        "tokens": np.zeros(3, np.int32),
        "loss_mask": np.zeros(3, np.bool_),
        "logprobs": np.zeros(3, np.float32),
        "versions": np.zeros(3, np.int32),
    }
    arrays[name] = arrays[name][:2]
    with pytest.raises(ValueError, match=rf"Row\.{name} has 2 entries and Row\.tokens 3"):
        Row(**arrays)  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError, match="equally long"):
        decoder(Row).decode(encode(arrays))


def row(tokens: list[int], mask: list[bool]) -> Row:
    length = len(tokens)
    return Row(
        np.array(tokens, np.int32), np.array(mask, np.bool_), np.zeros(length, np.float32), np.zeros(length, np.int32)
    )


def test_a_row_counts_its_sampled_tokens() -> None:
    assert row([1, 2, 3, 4], [False, True, False, True]).sampled == 2


def attempt(**changes: Any) -> Attempt:
    values = {"slot": 7, "draw": 5, "member": 1, "tries": 0, "run_seed": 42, "task": Task("t")}
    return Attempt(**{**values, **changes})


def test_an_attempts_seed_depends_on_run_draw_member_and_try_alone() -> None:
    assert attempt().seed == attempt(slot=8, task=Task("other")).seed
    seeds = {attempt(**{name: 3}).seed for name in ("draw", "member", "tries", "run_seed")} | {attempt().seed}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert attempt().seed == 240059875  # pinned: a resumed run must draw the same
    assert attempt().id == "5.1.0"


def test_messages_are_frozen_and_those_with_arrays_compare_by_identity() -> None:
    with pytest.raises(AttributeError):
        attempt().slot = 1  # type: ignore[misc]
    assert attempt() == attempt()
    one = row([1], [True])
    assert one == one
    assert one != row([1], [True])


def test_weights_are_known_by_life_and_step() -> None:
    assert Weights(life=2, step=30, params=None, checksum=0).version == (2, 30)


def test_an_episode_counts_the_sampled_tokens_of_all_its_rows() -> None:
    episode = Episode(attempt(), (row([1, 2], [True, True]), row([3], [True])), 1.0, "done", 1)
    assert episode.sampled == 3


def test_outcome_is_what_the_grouper_takes() -> None:
    assert set(get_args(Outcome)) == {Episode, Lost, Void}

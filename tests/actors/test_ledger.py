import itertools
import os
import resource
import shutil
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.ledger import Ledger, SlotDraw
from trouper.channels import Attempt, Episode, Group, Message, Row, RunError, Sampling, Task


def make_group(slot, draw=None, *, seed=0, payload=None, reward=0.5, members=2, void=None):
    rng = np.random.default_rng((slot, seed))

    def row():
        length = int(rng.integers(1, 6))
        mask = rng.random(length) < 0.5
        return Row(
            tokens=rng.integers(0, 99, length, np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
            versions=np.where(mask, slot, -1).astype(np.int32),
            sampling=Sampling(temperature=0.7, top_k=5),
        )

    draw = slot if draw is None else draw
    task = Task(f"task-{draw}", {"secret": 3, "deep": [1, {"a": None}]} if payload is None else payload, "guess")
    episodes = tuple(
        Episode(
            attempt=Attempt(slot, draw, member, 1, 7, task),
            rows=(row(), row()),
            reward=reward,
            status="max_turns",
            turns=2,
            messages=(Message("user", "höher"), Message("assistant", "4")),
            sampled_digest="abc",
            metrics={"num_turns": 2.0},
            timings={"total": 0.25},
        )
        for member in range(members)
    )
    advantages = rng.standard_normal(members).astype(np.float32)
    return Group(slot, draw, episodes, advantages, void=void, lost=1)


def void_group(slot, reason="lost"):
    return Group(slot, -1, (), np.zeros(0, np.float32), void=reason, lost=4)


def plain(value):
    """A value that compares by type, dtype, shape and bits."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, {name: plain(getattr(value, name)) for name in value.__struct_fields__})
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [plain(each) for each in value])
    return (type(value).__name__, value)


def slots(replay):
    return [group.slot for group in replay.groups]


def segments(ledger):
    return sorted(path.name for path in ledger.folder.iterdir())


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path / "ledger")
    yield made
    made.close()


def reopened(ledger, first_slot=0, life=9):
    """What another process reads; the segment it begins is deleted again."""
    other, before = Ledger(ledger.folder), set(ledger.folder.iterdir())
    replay = other.begin(life, first_slot)
    other.close()
    for path in set(ledger.folder.iterdir()) - before:
        path.unlink()
    return replay


def test_nothing_is_made_before_the_first_life_begins(ledger):
    assert not ledger.folder.exists()
    replay = ledger.begin(1, 0)
    assert (replay.draws, replay.used, replay.groups, replay.quarantined, replay.damaged) == (
        {},
        frozenset(),
        (),
        {},
        (),
    )
    assert segments(ledger) == ["00000001.log"]
    assert (ledger.folder / "00000001.log").read_bytes() == b"trouper-ledger 1 life 1\n"


@pytest.mark.parametrize("reward", [None, 1, 0.1 + 0.2, -0.0])
def test_every_field_of_a_group_comes_back(ledger, reward):
    ledger.begin(1, 0)
    group = make_group(3, 8, reward=None if reward is None else float(reward), void="no_signal")
    ledger.complete(group)
    ledger.complete(void_group(4))
    ledger.sync()
    assert plain(reopened(ledger).groups) == plain((group, void_group(4)))


def test_a_whole_number_as_reward_comes_back_as_the_same_number(ledger):
    ledger.begin(1, 0)
    ledger.complete(make_group(3, reward=2))
    ledger.sync()
    assert [episode.reward for episode in reopened(ledger).groups[0].episodes] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("payload", "found"),
    [({"t": (1, {3: b"x"})}, {"t": [1, {3: b"x"}]}), ({"huge": 1 << 70}, {}), ({"thing": object()}, {})],
)
def test_a_payload_that_cannot_be_kept_costs_no_group(ledger, payload, found):
    ledger.begin(1, 0)
    ledger.complete(make_group(3, payload=payload))
    ledger.sync()
    (group,) = reopened(ledger).groups
    assert [episode.attempt.task for episode in group.episodes] == [Task("task-3", found, "guess")] * 2
    assert plain(group.episodes[1].rows) == plain(make_group(3, payload=payload).episodes[1].rows)


def test_what_was_not_synced_is_not_there(ledger):
    ledger.begin(1, 0)
    ledger.drew(SlotDraw(0, 0, 0))
    ledger.sync()
    ledger.drew(SlotDraw(1, 1, 0))
    ledger.complete(make_group(0))
    assert reopened(ledger).draws == {0: SlotDraw(0, 0, 0)}
    assert reopened(ledger).groups == ()


def test_the_newest_record_of_a_slot_counts(ledger):
    ledger.begin(1, 0)
    for record in (SlotDraw(0, 0, 0), SlotDraw(1, 1, 0), SlotDraw(0, -1, 1), SlotDraw(0, 5, 1), SlotDraw(2, 6, 0)):
        ledger.drew(record)
    ledger.complete(make_group(0, 0))
    ledger.complete(make_group(1, 1))
    newest = make_group(0, 5)
    ledger.complete(newest)
    ledger.sync()
    replay = reopened(ledger)
    assert replay.draws == {0: SlotDraw(0, 5, 1), 1: SlotDraw(1, 1, 0), 2: SlotDraw(2, 6, 0)}
    assert replay.used == {0, 1, 5, 6}
    assert slots(replay) == [1, 0]
    assert plain(replay.groups[1]) == plain(newest)


def moved_up(ledger):
    """Slot 5 takes slot 1's place, and slot 1's task goes on in slot 5."""
    for slot in (0, 1, 5):
        ledger.drew(SlotDraw(slot, 10 + slot, 0))
    ledger.complete(make_group(1, 15), SlotDraw(5, 11, 2))
    ledger.sync()


def test_a_group_that_moved_up_leaves_its_slot_to_whom_it_overtook(ledger):
    ledger.begin(1, 0)
    moved_up(ledger)
    replay = reopened(ledger)
    assert replay.draws == {0: SlotDraw(0, 10, 0), 1: SlotDraw(1, 15, 0), 5: SlotDraw(5, 11, 2)}
    assert replay.used == {10, 11, 15}
    assert slots(replay) == [1]
    beyond = reopened(ledger, first_slot=2)  # the group is trained, the other one still goes on
    assert (beyond.draws, slots(beyond)) == ({5: SlotDraw(5, 11, 2)}, [])


def test_a_segment_stays_while_a_slot_is_open_that_a_group_moved_up_from(ledger):
    ledger.begin(1, 0)
    moved_up(ledger)
    ledger.prune(2)
    assert reopened(ledger, first_slot=2).draws == {5: SlotDraw(5, 11, 2)}
    ledger.prune(6)
    assert reopened(ledger, first_slot=6).used == set()


def test_a_payload_that_cannot_be_kept_costs_no_exchange(ledger):
    ledger.begin(1, 0)
    ledger.complete(make_group(1, 15, payload={"thing": object()}), SlotDraw(5, 11, 2))
    ledger.sync()
    assert reopened(ledger).draws[5] == SlotDraw(5, 11, 2)


def test_slots_before_the_first_are_left_out_but_their_draws_are_used(ledger):
    ledger.begin(1, 0)
    for slot in range(4):
        ledger.drew(SlotDraw(slot, 10 + slot, 0))
        ledger.complete(make_group(slot, 10 + slot))
    ledger.sync()
    replay = reopened(ledger, first_slot=2)
    assert set(replay.draws) == {2, 3}
    assert slots(replay) == [2, 3]
    assert replay.used == {10, 11, 12, 13}


def test_forgotten_groups_do_not_come_back_and_later_ones_do(ledger):
    ledger.begin(1, 0)
    for slot in (0, 1, 2):
        ledger.complete(make_group(slot))
    ledger.forget(iter([0, 1]))
    ledger.complete(make_group(1, seed=1))
    ledger.sync()
    ledger.forget([])
    replay = reopened(ledger)
    assert slots(replay) == [2, 1]
    assert plain(replay.groups[1]) == plain(make_group(1, seed=1))


def test_lives_of_one_process_go_on_with_one_ledger(ledger):
    ledger.begin(1, 0)
    ledger.complete(make_group(0))
    replay = ledger.begin(2, 0)  # what the earlier life buffered is not lost
    assert slots(replay) == [0]
    ledger.complete(make_group(1))
    ledger.sync()
    assert slots(ledger.begin(3, 1)) == [1]
    assert segments(ledger) == ["00000001.log", "00000002.log", "00000003.log"]
    assert (ledger.folder / "00000003.log").read_bytes() == b"trouper-ledger 1 life 3\n"


def test_segments_are_in_order_of_their_numbers(ledger):
    ledger.begin(1, 0)
    ledger.drew(SlotDraw(0, 1, 0))
    ledger.sync()
    (ledger.folder / "00000001.log").rename(ledger.folder / "99999999.log")
    ledger.begin(2, 0)
    ledger.drew(SlotDraw(0, 2, 1))
    ledger.sync()
    assert segments(ledger) == ["100000000.log", "99999999.log"]
    (ledger.folder / "notes.txt").write_text("no segment")
    assert reopened(ledger).draws == {0: SlotDraw(0, 2, 1)}


def test_pruning_deletes_the_oldest_segments_and_carries_quarantined_tasks_over(ledger):
    ledger.begin(1, 0)
    ledger.quarantine("bad", "it exploded")
    for step in range(5):
        for slot in (2 * step, 2 * step + 1):
            ledger.drew(SlotDraw(slot, slot, 0))
            ledger.complete(make_group(slot))
        ledger.prune(2 * step)
    assert segments(ledger) == ["00000005.log", "00000006.log"]
    replay = reopened(ledger, first_slot=8)
    assert slots(replay) == [8, 9]
    assert replay.quarantined == {"bad": "it exploded"}
    ledger.prune(10)
    ledger.prune(10)
    assert segments(ledger) == ["00000006.log"]  # it holds nothing of a slot, so no other one was begun
    assert reopened(ledger, first_slot=10).quarantined == {"bad": "it exploded"}


def test_pruning_never_keeps_an_older_record_of_a_slot_without_the_newer_one(ledger):
    ledger.begin(1, 0)
    ledger.complete(make_group(0))
    ledger.complete(make_group(9))  # far ahead: this segment stays
    ledger.begin(2, 0)
    ledger.forget([0])
    ledger.prune(1)
    assert slots(reopened(ledger, first_slot=0)) == [9]


def test_damage_in_a_segment_costs_the_rest_of_it_and_no_other(ledger):
    ledger.begin(1, 0)
    first = ledger.folder / "00000001.log"
    for slot in range(2):
        ledger.complete(make_group(slot))
        ledger.sync()
    ledger.begin(2, 0)
    ledger.complete(make_group(7))
    ledger.sync()
    whole = first.read_bytes()
    for spoilt in (whole[:-1], whole[:-1] + b"?"):
        first.write_bytes(spoilt)
        replay = reopened(ledger)
        assert slots(replay) == [0, 7]
        assert [str(first) in sentence and "at byte" in sentence for sentence in replay.damaged] == [True]


def test_a_record_that_no_longer_reads_costs_no_other(ledger):
    ledger.begin(1, 0)
    ledger.complete(msgspec.structs.replace(make_group(8), lost="many"))
    ledger.complete(make_group(9))
    ledger.sync()
    replay = reopened(ledger)
    assert slots(replay) == [9]
    assert "00000001.log holds a record at byte 24 that was left out: Expected `int`, got `str`" in replay.damaged[0]


def test_another_format_is_refused(ledger):
    ledger.begin(1, 0)
    (ledger.folder / "00000002.log").write_bytes(b"trouper-ledger 2 life 4\nwhatever")
    with pytest.raises(RunError, match=r"00000002\.log has format 2 and this trouper reads format 1"):
        reopened(ledger)


@pytest.mark.parametrize("large_first", [True, False])
def test_a_full_disk_is_named_and_nothing_half_written_counts(ledger, large_first):
    ledger.begin(1, 0)
    ledger.complete(make_group(0))
    ledger.sync()
    kept = (ledger.folder / "00000001.log").read_bytes()
    large = make_group(1, payload={"text": "x" * (1 << 17)})
    for group in [large, make_group(2)] if large_first else [make_group(2), large]:
        ledger.complete(group)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))  # no file may grow beyond 64 KiB
        with pytest.raises(RunError, match=r"00000001\.log cannot be written \(File too large\); make room .*--resume"):
            ledger.sync()
        assert (ledger.folder / "00000001.log").read_bytes() == kept
        ledger.close()  # the failure was told: it is not tried again on the way out
        assert slots(reopened(ledger)) == [0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ledger.sync()  # there is room again: nothing was lost, and the file of uncertain end is left alone
    assert slots(reopened(ledger)) == ([0, 1, 2] if large_first else [0, 2, 1])
    assert (ledger.folder / "00000001.log").read_bytes() == kept


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"the ledger at .*file/ledger cannot be read or written \(Not a directory\)"):
        Ledger(tmp_path / "file" / "ledger").begin(1, 0)


def test_a_segment_that_cannot_be_read_is_named(ledger):
    ledger.begin(1, 0)
    (ledger.folder / "00000002.log").mkdir()
    with pytest.raises(RunError, match=r"00000002\.log cannot be read or written \(Is a directory\)"):
        reopened(ledger)


def test_records_are_taken_while_another_thread_syncs(ledger):
    ledger.begin(1, 0)
    done = threading.Event()

    def sync():
        while not done.is_set():
            ledger.sync()

    thread = threading.Thread(target=sync)
    thread.start()
    draws = [SlotDraw(slot, slot, 0) for slot in range(5000)]
    for each in draws:
        ledger.drew(each)
    done.set()
    thread.join()
    ledger.sync()
    assert list(reopened(ledger).draws.values()) == draws


def test_an_empty_sync_writes_nothing(ledger):
    ledger.sync()
    ledger.close()
    assert not ledger.folder.exists()


class Model:
    """What a log of records means, without a disk."""

    def __init__(self, records):
        self.records = records

    def replay(self, first_slot):
        draws, groups, quarantined = {}, {}, {}
        for kind, value in self.records:
            if kind == "drew" and value.slot >= first_slot:
                draws[value.slot] = value
            elif kind == "complete" and value.slot >= first_slot:
                groups.pop(value.slot, None)
                groups[value.slot] = value
            elif kind == "forget":
                for slot in value:
                    groups.pop(slot, None)
            elif kind == "quarantine":
                quarantined[value[0]] = value[1]
        return draws, plain(list(groups.values())), quarantined

    def draws(self, first_slot):
        values = [value for kind, value in self.records if kind in ("drew", "complete")]
        return {value.draw for value in values if value.slot >= first_slot} - {-1}


slot_numbers = st.integers(0, 7)
operations = st.one_of(
    st.tuples(st.just("drew"), st.builds(SlotDraw, slot_numbers, st.integers(-1, 9), st.integers(0, 2))),
    st.tuples(st.just("complete"), st.builds(make_group, slot_numbers, st.integers(0, 9), members=st.integers(0, 2))),
    st.tuples(st.just("complete"), st.builds(void_group, slot_numbers)),
    st.tuples(st.just("forget"), st.lists(slot_numbers, max_size=3)),
    st.tuples(st.just("quarantine"), st.tuples(st.sampled_from("ab"), st.sampled_from(["boom", "stuck"]))),
    st.tuples(st.just("sync"), st.none()),
    st.tuples(st.just("prune"), st.integers(0, 2)),
    st.tuples(st.just("begin"), st.integers(0, 1)),
    st.tuples(st.just("kill"), st.floats(0, 1)),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(operations, max_size=40))
def test_whatever_happens_what_was_synced_is_there_and_nothing_half_is(tmp_path_factory, sequence):
    folders = (tmp_path_factory.mktemp("life") / "ledger" for _ in itertools.count())
    ledger = Ledger(next(folders))
    ledger.begin(0, 0)
    first_slot, buffered, written, ever = 0, [], Model([]), Model([])

    def newest():
        return max(ledger.folder.iterdir())

    def fits(replay, model):
        state = (replay.draws, plain(list(replay.groups)), replay.quarantined)
        return state == model.replay(first_slot) and model.draws(first_slot) <= replay.used <= ever.draws(0)

    marks = {newest().stat().st_size: 0}  # how many records were on disk when the newest segment had this size
    for operation, value in [*sequence, ("kill", 1.0)]:
        if operation in ("sync", "prune", "begin"):
            before = newest()
            written, buffered = Model(written.records + buffered), []
            if operation == "sync":
                ledger.sync()
            else:
                first_slot += value
            if operation == "prune":
                ledger.prune(first_slot)
            if operation == "begin":
                assert fits(ledger.begin(1, first_slot), written)
            if newest() != before:
                marks = {}
            marks[newest().stat().st_size] = len(written.records)
        elif operation == "kill":
            size = min(marks) + round(value * (max(marks) - min(marks)))
            killed, ledger = ledger, Ledger(next(folders))
            shutil.copytree(killed.folder, ledger.folder)
            killed.close()
            cut = newest()
            os.truncate(cut, size)
            replay = ledger.begin(1, first_slot)
            assert size not in marks or not any(cut.name in sentence for sentence in replay.damaged)
            synced = marks[max(mark for mark in marks if mark <= size)]
            at_most = synced if size in marks else len(written.records)
            prefixes = (Model(written.records[:count]) for count in range(synced, at_most + 1))
            found = next((each for each in prefixes if fits(replay, each)), None)
            assert found is not None
            written, buffered = found, []
            marks = {newest().stat().st_size: len(written.records)}
        else:
            getattr(ledger, operation)(*(value if operation == "quarantine" else [value]))
            buffered.append((operation, value))
            ever.records.append((operation, value))
    ledger.close()


def test_behind_a_missing_segment_no_group_is_trusted(ledger):
    for life, slot in ((1, 3), (2, 4), (3, 5)):
        ledger.begin(life, 0)
        ledger.complete(make_group(slot))
        ledger.drew(SlotDraw(slot + 10, slot, 0))
        ledger.sync()
    (ledger.folder / "00000002.log").unlink()  # it may have said that slot 3's group is of no use
    replay = reopened(ledger)
    assert [group.slot for group in replay.groups] == [5]
    assert replay.draws.keys() == {13, 15}
    (told,) = replay.damaged
    assert "no segment between 00000001.log and 00000003.log; the 1 complete groups before the gap" in told

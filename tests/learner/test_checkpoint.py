import gc
import math
import resource
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trouper.channels import CheckpointError
from trouper.learner.batch import BatchConfig
from trouper.learner.checkpoint import Checkpoints
from trouper.learner.learner import Learner
from trouper.learner.loss import LossConfig
from trouper.learner.optimizer import OptimizerConfig


def tree(value=1.0, **more):
    return {
        "params": {"a/kernel": jnp.full((2, 3), value), "b": jnp.full(4, value, jnp.bfloat16)},
        "step": np.asarray(7, np.int32),
    } | more


def assert_same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture
def checkpoints(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", max_to_keep=2) as made:
        yield made


def test_what_was_saved_comes_back_with_its_record(checkpoints):
    meta = {"life": 2, "slots": [[3, 0], [5, 1]], "source": {"position": 12, "name": "guess"}, "none": None}
    checkpoints.save(4, tree(), meta)
    checkpoints.wait()
    found, record = checkpoints.restore(None, tree(0.0))
    assert_same(found, tree())
    assert {str(a.dtype) for a in jax.tree.leaves(found)} == {"float32", "bfloat16", "int32"}
    assert record == checkpoints.meta() == meta


def test_steps_are_numbers_and_the_newest_are_kept(checkpoints):
    for step in (2, 9, 10):
        checkpoints.save(step, tree(float(step)), {"at": step})
    checkpoints.wait()
    assert checkpoints.steps() == [9, 10]
    assert checkpoints.latest() == 10
    assert checkpoints.meta(9) == {"at": 9}
    assert_same(checkpoints.restore(9, tree())[0], tree(9.0))


def test_a_learner_saves_in_the_background_while_it_trains_on(checkpoints, make_decoder, random_groups):
    def learner(seed):
        return Learner(
            make_decoder(seed),
            loss=LossConfig(),
            optimizer=OptimizerConfig(learning_rate=0.1),
            batch=BatchConfig(row_tokens=64),
        )

    trained, other = learner(0), learner(1)
    trained.add(random_groups(0))
    trained.update()
    saved = jax.tree.map(np.array, trained.state_tree())
    checkpoints.save(1, trained.state_tree(), {})
    for seed in (1, 2):
        trained.add(random_groups(seed))
        trained.update()
    checkpoints.wait()
    other.load_state_tree(checkpoints.restore(1, other.state_tree())[0])
    assert_same(other.state_tree(), saved)


def test_a_missing_step_is_an_error_that_names_what_there_is(checkpoints):
    for ask in (lambda: checkpoints.restore(None, tree()), checkpoints.meta):
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            ask()
    assert checkpoints.latest() is None
    checkpoints.save(3, tree(), {})
    checkpoints.wait()
    with pytest.raises(CheckpointError, match=r"step 4; it holds \[3\]"):
        checkpoints.restore(4, tree())


def test_a_step_is_never_written_twice_or_out_of_order(checkpoints):
    checkpoints.save(3, tree(), {})
    for step in (3, 2):
        with pytest.raises(CheckpointError, match="already holds step 3"):
            checkpoints.save(step, tree(), {})


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (tree(rng=np.zeros((), np.int32)), "rng is missing"),
        ({"step": np.zeros((), np.int32)}, "params/a/kernel is not part of this run, and 1 more"),
        (tree() | {"step": np.zeros(2, np.int32)}, r"step is int32\[\] and should be int32\[2\]"),
        (tree() | {"step": np.zeros((), np.float32)}, r"step is int32\[\] and should be float32\[\]"),
    ],
)
def test_arrays_that_do_not_fit_are_named(checkpoints, like, message):
    checkpoints.save(3, tree(), {})
    checkpoints.wait()
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(3, like)


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write(folder, *steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, tree(float(step)), {"at": step})


def test_half_written_steps_are_never_loaded_and_cleared_away_by_the_next_save(tmp_path):
    folder = tmp_path / "checkpoints"
    write(folder, 3)
    shutil.copytree(folder / "3", folder / "4.orbax-checkpoint-tmp-1700000000000000")
    shutil.copytree(folder / "3", folder / "4.orbax-checkpoint-tmp")
    shutil.copytree(folder / "3", folder / "2.deleted")
    before = files_of(folder)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [3]
        assert checkpoints.restore(None, tree())[1] == {"at": 3}
        assert files_of(folder) == before  # another process may be writing
        checkpoints.save(4, tree(), {"at": 4})
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]


def test_stray_things_neither_break_nor_win(tmp_path):
    folder = tmp_path / "checkpoints"
    write(folder, 10)
    (folder / "20").write_text("a stray file")
    for name in ("30", "007", "٣", "best"):
        (folder / name).mkdir()
    (folder / "007" / "content").write_text("")
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [10]
        assert checkpoints.restore(None, tree())[1] == {"at": 10}
        for step in (20, 30):
            checkpoints.save(step, tree(float(step)), {"at": step})
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20, 30]
        assert_same(checkpoints.restore(20, tree())[0], tree(20.0))
    assert (folder / "20.damaged").read_text() == "a stray file"


def test_the_newest_is_the_highest_number(tmp_path):
    write(tmp_path, 9900, 10000)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 10000
        assert checkpoints.restore(None, tree())[1] == {"at": 10000}


def array_files(step):
    return sorted((step / "arrays" / "d").iterdir())


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


DAMAGE = {
    "an array file cut short": lambda step: cut(array_files(step)[0]),
    "an array file lost": lambda step: remove(array_files(step)[0]),
    "the arrays lost": lambda step: remove(step / "arrays"),
    "the arrays' names cut short": lambda step: cut(step / "arrays" / "_METADATA"),
    "the record lost": lambda step: remove(step / "meta"),
    "the record cut short": lambda step: cut(step / "meta" / "metadata"),
    "the list of sizes cut short": lambda step: cut(step / "sizes.json"),
    "the record and the list of sizes lost": lambda step: [remove(step / name) for name in ("meta", "sizes.json")],
    "the arrays and the list of sizes lost": lambda step: [remove(step / name) for name in ("arrays", "sizes.json")],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_newest_step_is_set_aside_for_the_one_before(tmp_path, damage):
    write(tmp_path, 10, 20, 30)
    for step in (20, 30):
        damage(tmp_path / str(step))
    notes = []
    with Checkpoints(tmp_path, note=notes.append) as checkpoints:
        with pytest.raises(CheckpointError, match=r"step 30 in .* cannot be read .*; name an older step, or none"):
            checkpoints.restore(30, tree())
        assert notes == []
        found, record = checkpoints.restore(None, tree())
        assert record == {"at": 10}
        assert_same(found, tree(10.0))
        assert ["step 30" in notes[0], "step 20" in notes[1], len(notes)] == [True, True, 2]
        assert "it is now 30.damaged, and step 10 is used instead" in notes[0]
        assert checkpoints.steps() == [10]
        checkpoints.save(20, tree(20.5), {"at": "again"})
        checkpoints.wait()
        assert_same(checkpoints.restore(None, tree())[0], tree(20.5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "20", "20.damaged", "30.damaged"]


def test_a_step_damaged_twice_is_set_aside_twice(tmp_path):
    write(tmp_path, 10)
    for _ in range(2):
        write(tmp_path, 20)
        cut(array_files(tmp_path / "20")[0])
        with Checkpoints(tmp_path, note=lambda _: None) as checkpoints:
            assert checkpoints.restore(None, tree())[1] == {"at": 10}


def test_without_a_listener_a_damaged_step_is_a_logged_warning(tmp_path, caplog):
    write(tmp_path, 10, 20)
    cut(array_files(tmp_path / "20")[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore(None, tree())
    (record,) = [record for record in caplog.records if record.name == "trouper.learner.checkpoint"]
    assert record.levelname == "WARNING"
    assert "bytes and was written with" in record.message


def test_when_none_can_be_read_all_are_named_and_left(tmp_path):
    write(tmp_path, 10, 20)
    for step in (10, 20):
        cut(array_files(tmp_path / str(step))[0])
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=r"(?s)no checkpoint that can be read:.*step 20.*step 10.*from a copy"),
    ):
        checkpoints.restore(None, tree())
    assert checkpoints.steps() == [10, 20]


def test_what_does_not_fit_is_never_passed_over(tmp_path):
    write(tmp_path, 10)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(20, tree(more=np.zeros(3)), {})
        checkpoints.wait()
        with pytest.raises(CheckpointError, match=r"step 20 .* does not fit .*more is not part of this run"):
            checkpoints.restore(None, tree())
        assert checkpoints.steps() == [10, 20]


@pytest.mark.parametrize(
    "lack", [MemoryError("no room"), ValueError("RESOURCE_EXHAUSTED: Too many open files"), PermissionError("no")]
)
def test_a_lack_of_memory_files_or_rights_is_no_damage(checkpoints, monkeypatch, lack):
    checkpoints.save(3, tree(), {})
    checkpoints.save(4, tree(), {})
    checkpoints.wait()

    def lacking(*args, **kwargs):
        raise lack

    monkeypatch.setattr(checkpoints._orbax, "restore", lacking)
    with pytest.raises(CheckpointError, match=rf"step 4 .*{lack}.*see that memory, open files and rights suffice"):
        checkpoints.restore(None, tree())
    assert checkpoints.steps() == [3, 4]


def scored(folder, scores, **options):
    """Save steps with their scores in one life, and return what is left."""
    with Checkpoints(folder, **options) as checkpoints:
        for step, score in scores.items():
            checkpoints.save(step, tree(float(step)), {"at": step}, score)
        checkpoints.wait()
        return checkpoints.steps()


def test_the_newest_and_the_best_have_limits_of_their_own_and_survive_a_resume(tmp_path):
    limits = {"max_to_keep": 2, "keep_best": 1}
    first = {100: 0.9, 200: 0.8, 300: math.nan, 400: 0.6, 500: 0.5}
    assert scored(tmp_path, first, **limits) == [100, 400, 500]
    with Checkpoints(tmp_path, **limits) as resumed:
        assert resumed.restore(None, tree())[1] == {"at": 500}
    assert scored(tmp_path, {600: 0.7}, **limits) == [100, 500, 600]
    assert scored(tmp_path, {700: None}, **limits) == [100, 600, 700]
    assert scored(tmp_path, {800: 0.95, 900: 0.1, 1000: 0.2}, **limits) == [800, 900, 1000]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_to_keep": 1}, [5]),
        ({"max_to_keep": 1, "keep_best": 1}, [3, 5]),  # of equals the newer
        ({"max_to_keep": 1, "keep_best": 2}, [1, 3, 5]),
        ({"max_to_keep": 1, "keep_best": 9}, [1, 3, 5]),  # what has no score is never best
        ({"max_to_keep": None, "keep_best": 1}, [1, 2, 3, 4, 5]),
        ({"max_to_keep": 9, "keep_best": 1}, [1, 2, 3, 4, 5]),
    ],
)
def test_which_steps_are_kept(tmp_path, limits, left):
    scores = {1: -1.0, 2: math.nan, 3: -1.0, 4: math.inf, 5: None}
    assert scored(tmp_path, scores, **limits) == left


def test_a_step_that_is_still_being_written_does_not_count(tmp_path, monkeypatch):
    gate = threading.Event()
    write_sizes = Checkpoints._write_sizes
    monkeypatch.setattr(Checkpoints, "_write_sizes", lambda self: (gate.wait(30), write_sizes(self)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, tree(), {})
        assert (checkpoints.latest(), checkpoints.latest(), checkpoints.steps()) == (None, None, [])
        gate.set()
        checkpoints.wait()
        assert checkpoints.latest() == 1


def test_a_full_disk_is_reported_by_the_next_call_and_earlier_steps_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, tree(), {})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = {"big": np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8).view(np.float32)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # no file may grow beyond 64 KiB
        checkpoints.save(2, noise, {})
        with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*checkpoints"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == [1]
    assert_same(checkpoints.restore(None, tree())[0], tree())
    checkpoints.save(2, tree(2.0), {})  # there is room again
    checkpoints.save(3, tree(3.0), {})
    checkpoints.close()
    with Checkpoints(tmp_path / "checkpoints") as again:
        assert again.steps() == [1, 2, 3]
        assert_same(again.restore(3, tree())[0], tree(3.0))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/checkpoints"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def test_closing_leaves_no_thread_behind(tmp_path):
    before = set(threading.enumerate())
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(1, tree(), {})
    gc.collect()  # the pool of a closed event loop ends its thread when it is collected
    left = set(threading.enumerate()) - before
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 1


def test_a_score_may_come_after_the_checkpoint_and_survives_a_resume(tmp_path):
    limits = {"max_to_keep": 1, "keep_best": 1}
    with Checkpoints(tmp_path, **limits) as checkpoints:
        checkpoints.save(1, tree(), {})
        checkpoints.wait()
        checkpoints.rate(1, 0.9)
        checkpoints.rate(7, 2.0)  # is not there
        checkpoints.save(2, tree(), {})
        checkpoints.wait()
        checkpoints.rate(2, math.nan)
    assert scored(tmp_path, {3: None}, **limits) == [1, 3]
    with Checkpoints(tmp_path, **limits) as checkpoints:
        checkpoints.rate(3, 1.0)
    assert scored(tmp_path, {4: 0.0}, **limits) == [3, 4]
    assert Checkpoints(tmp_path).restore(3, tree())[1] == {"at": 3}

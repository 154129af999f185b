import gc
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


def test_half_written_steps_are_never_loaded_and_cleared_away(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, tree(), {"at": 3})
        checkpoints.wait()
    shutil.copytree(folder / "3", folder / "4.orbax-checkpoint-tmp-1700000000000000")
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [3]
        assert checkpoints.restore(None, tree())[1] == {"at": 3}
    assert sorted(path.name for path in folder.iterdir()) == ["3"]


@pytest.mark.parametrize("damage", ["arrays", "arrays/_METADATA", "meta", "meta/metadata"])
def test_a_damaged_step_is_an_error_that_says_what_to_delete(tmp_path, damage):
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(3, tree(), {})
        checkpoints.wait()
    target = folder / "3" / damage
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with (
        Checkpoints(folder) as checkpoints,
        pytest.raises(CheckpointError, match=r"step 3 in .* cannot be read.*delete"),
    ):
        checkpoints.restore(None, tree())


def test_a_full_disk_is_reported_by_the_next_call_and_earlier_steps_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, tree(), {})
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = {"big": np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8).view(np.float32)}
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # no file may grow beyond 64 KiB
        checkpoints.save(2, noise, {})
        with pytest.raises(CheckpointError, match=r"could not be written to .*checkpoints"):
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == [1]
    checkpoints.save(3, tree(3.0), {})
    checkpoints.close()
    with Checkpoints(tmp_path / "checkpoints") as again:
        assert again.steps() == [1, 3]
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

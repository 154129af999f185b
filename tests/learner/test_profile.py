"""A real trace of a tiny computation."""

import jax
import jax.numpy as jnp
import pytest

from trouper.channels import ConfigError
from trouper.learner.profile import StepProfile


def traces(folder):
    return sorted(folder.rglob("*.xplane.pb"))


def test_the_chosen_steps_are_traced_and_no_other(tmp_path):
    profile = StepProfile(tmp_path, 1, 2)
    for step in range(4):
        for _ in range(2):
            with profile.call(step):
                jax.block_until_ready(jnp.ones(8) * step)
        assert bool(traces(tmp_path)) == (step == 3)
    profile.close()
    (trace,) = traces(tmp_path)
    assert b"train" in trace.read_bytes()


def test_a_run_that_ends_inside_still_writes_its_trace(tmp_path):
    profile = StepProfile(tmp_path, 0, 9)
    with profile.call(0):
        jax.block_until_ready(jnp.ones(8))
    profile.close()
    profile.close()
    assert len(traces(tmp_path)) == 1


@pytest.mark.parametrize(("first", "last"), [(-1, 2), (3, 2)])
def test_steps_that_cannot_be_are_refused(tmp_path, first, last):
    with pytest.raises(ConfigError, match=r"profile steps \["):
        StepProfile(tmp_path, first, last)

import gc

import pytest

from trouper.actors.garbage import ALLOCATIONS, collecting_rarely


def fail() -> None:
    with collecting_rarely():
        assert gc.get_threshold()[0] == ALLOCATIONS
        assert gc.get_freeze_count() > 0
        raise ValueError("inside")


def test_collections_are_rare_inside_and_as_before_after_a_failure() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="inside"):
        fail()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0

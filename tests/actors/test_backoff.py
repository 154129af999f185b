import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.backoff import Backoff, RestartWindow
from trouper.channels import Exited


def at(time: float) -> Exited:
    return Exited(name="child", reason="failed", attempt=1, at=time)


def test_window_allows_so_many_and_no_more() -> None:
    window = RestartWindow(max_restarts=2, window=10.0)
    assert [window.allows(at(time)) for time in (0.0, 1.0, 2.0)] == [True, True, False]
    assert [exited.at for exited in window.history] == [0.0, 1.0, 2.0]


def test_window_forgets_what_is_exactly_as_old_as_it_is_long() -> None:
    window = RestartWindow(max_restarts=1, window=10.0)
    assert window.allows(at(0.0))
    assert window.allows(at(10.0))
    assert not window.allows(at(19.9))


def test_window_of_no_restarts_allows_none() -> None:
    assert not RestartWindow(max_restarts=0, window=1.0).allows(at(5.0))


@settings(deadline=None)
@given(
    gaps=st.lists(st.floats(0, 20), min_size=1, max_size=60),
    max_restarts=st.integers(0, 5),
    window=st.floats(0.1, 30),
)
def test_window_agrees_with_counting_everything(gaps: list[float], max_restarts: int, window: float) -> None:
    restarts, now, past = RestartWindow(max_restarts, window), 0.0, []
    for gap in gaps:
        now += gap
        past.append(now)
        recent = [time for time in past if time > now - window]
        assert restarts.allows(at(now)) == (len(recent) <= max_restarts)
        assert [exited.at for exited in restarts.history] == recent


@pytest.mark.parametrize(("max_restarts", "window"), [(-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_window_refuses_impossible_numbers(max_restarts: int, window: float) -> None:
    with pytest.raises(ValueError, match="it must be"):
        RestartWindow(max_restarts, window)


@settings(deadline=None)
@given(
    seed=st.text(max_size=5),
    first=st.floats(0, 10),
    factor=st.floats(1, 10),
    longest=st.floats(10, 100),
    uptimes=st.lists(st.floats(0, 120), max_size=50),
)
def test_delays_double_up_to_a_bound_until_the_child_was_healthy(
    seed: str, first: float, factor: float, longest: float, uptimes: list[float]
) -> None:
    one, same = (Backoff(seed, first, factor, longest, healthy=60.0) for _ in range(2))
    failures = 0
    for uptime in uptimes:
        if uptime >= 60.0:
            failures = 0
        ceiling = min(longest, first * factor**failures)
        delay = one.delay(uptime)
        assert ceiling / 2 * 0.999 <= delay <= ceiling * 1.001
        assert delay == same.delay(uptime)
        failures += 1


def test_a_thousand_failures_do_not_overflow() -> None:
    backoff = Backoff("seed", longest=30.0)
    assert all(backoff.delay(0.0) <= 30.0 for _ in range(5000))


def test_siblings_do_not_come_back_in_step() -> None:
    assert len({Backoff(f"0/run/{child}").delay(0.0) for child in range(20)}) == 20


@pytest.mark.parametrize("wrong", [{"first": -1.0}, {"first": 5.0, "longest": 4.0}, {"factor": 0.5}])
def test_backoff_refuses_impossible_numbers(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"first = |factor = "):
        Backoff("seed", **wrong)

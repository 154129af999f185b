"""What is logged, warned of or said by another thread while a run goes on stands in its log."""

import logging
import threading
import warnings

import pytest
import trio
import trio.testing

from trouper.actors.log_lines import LogLines


@pytest.fixture
def shown():
    return []


@pytest.fixture
def kept():
    return []


def warn():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)  # pytest has put its own in place of it
        warnings.warn("a shape came late", stacklevel=2)


async def test_what_is_logged_or_warned_of_is_shown(shown, kept):
    log = logging.getLogger("trouper.actors.anything")
    with LogLines(shown.append, kept.append):
        log.info("too quiet")
        log.warning("restarting %r", "sampler", exc_info=LookupError("gone"))
        warn()
    log.warning("too late")
    restarting, late_shape = shown
    assert restarting == "restarting 'sampler'\nLookupError: gone"
    assert "UserWarning: a shape came late" in late_shape
    assert kept == []


async def test_what_another_thread_says_is_shown_at_once_and_kept_by_the_loop(shown, kept, capsys):
    log = logging.getLogger("trouper.actors.heartbeat")
    with LogLines(shown.append, kept.append):
        await trio.to_thread.run_sync(log.warning, "the loop is blocked")
        while not kept:  # the loop runs what a thread has left for it in a moment of its own
            await trio.lowlevel.checkpoint()
    assert (shown, kept) == ([], ["the loop is blocked"])
    assert capsys.readouterr().err == "the loop is blocked\n"


async def test_what_the_loop_comes_to_after_the_end_is_dropped(shown, kept):
    thread = threading.Thread(target=logging.getLogger("trouper").warning, args=("late",))
    with LogLines(shown.append, kept.append):
        thread.start()
        thread.join()
    await trio.testing.wait_all_tasks_blocked()
    assert kept == []


async def test_a_log_that_cannot_be_written_does_not_fail_who_warns(kept, capsys):
    def full(text):
        raise OSError("no space left on device")

    with LogLines(full, kept.append):
        logging.getLogger("trouper").warning("something")
    assert "no space left on device" in capsys.readouterr().err


async def test_arguments_that_do_not_fit_do_not_fail_who_warns(shown, kept, capsys):
    with LogLines(shown.append, kept.append) as lines:
        lines.handle(logging.makeLogRecord({"msg": "%d steps", "args": ("no",), "levelno": logging.WARNING}))
    assert shown == []
    assert "TypeError: %d format" in capsys.readouterr().err


async def test_warnings_that_were_captured_before_are_so_afterwards(shown, kept):
    for before in (True, False):
        logging.captureWarnings(before)
        takes = warnings.showwarning
        with LogLines(shown.append, kept.append), LogLines(shown.append, kept.append):
            pass
        assert warnings.showwarning is takes

import io
import math
import os
import threading

import pytest
from rich.console import Console

from trouper.actors.progress import LiveScreen, PlainScreen, open_screen
from trouper.actors.summary import closing, duration, sparkline


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def printed():
    return []


class TestPlain:
    def test_a_step_is_a_line_of_what_is_known(self, printed):
        screen = PlainScreen(printed.append, total=10)
        screen.step(2, 20.0, {"reward/mean": 0.5, "throughput/tokens_per_s": 123.4, "kl": 1.0, "grad_norm": math.nan})
        assert printed == ["step 2/10 · reward 0.500 · tok/s 123 · 20.0 s, 1 min 20 s left"]

    def test_nothing_known_leaves_no_gap(self, printed):
        PlainScreen(printed.append, total=None).step(2, 20.0, {})
        assert printed == ["step 2 · 20.0 s"]

    def test_lines_are_sparse_but_the_last_step_is_always_there(self, printed):
        screen = PlainScreen(printed.append, total=100, interval=5.0)
        for step in range(1, 101):
            screen.step(step, step * 0.1, {})
        assert [line.split(" ·")[0] for line in printed] == ["step 1/100", "step 51/100", "step 100/100"]

    def test_notes_and_the_summary_come_at_once(self, printed):
        screen = PlainScreen(printed.append, total=None)
        screen.note("saved")
        screen.close("done")
        assert printed == ["saved", "done"]

    def test_a_resumed_run_counts_its_own_pace(self, printed):
        screen = PlainScreen(printed.append, total=100, done=90)
        screen.step(91, 10.0, {})
        assert printed[0].endswith("10.0 s, 1 min 30 s left")

    def test_without_an_end_nothing_is_foretold(self, printed):
        screen = PlainScreen(printed.append, total=None)
        screen.step(1, 10.0, {})
        assert "left" not in printed[0]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_reader_that_goes_away_ends_nothing(terminal):
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w")  # noqa: SIM115  # closed below, which must not fail either
    stream.isatty = lambda: terminal
    screen = open_screen(2, stream=stream)
    screen.note("hello")
    screen.step(2, 1.0, {})
    screen.close("done")
    stream.close()


class TestLive:
    def console(self):
        return Console(file=Terminal(), force_terminal=True, width=100, color_system=None)

    def test_the_panel_shows_steps_queues_and_the_curve(self):
        console = self.console()
        screen = LiveScreen(console, total=10)
        screen.step(1, 5.0, {"reward/mean": 0.1})
        screen.step(2, 10.0, {"reward/mean": 0.9})
        screen.update(12.0, {"queue/groups/depth": 3.0, "queue/tasks/depth": 0.0})
        text = console.file.getvalue()
        assert "step 2/10" in text
        assert "38.0 s left" in text
        assert "groups 3 · tasks 0" in text
        assert "▁█" in text
        screen.close("2 steps in 12.0 s")
        assert "2 steps in 12.0 s" in console.file.getvalue()

    def test_no_thread_is_started(self):
        before = threading.active_count()
        screen = LiveScreen(self.console(), total=10)
        screen.step(1, 5.0, {})
        assert threading.active_count() == before
        screen.close("")

    def test_brackets_in_a_note_are_text(self):
        console = self.console()
        screen = LiveScreen(console, total=10)
        screen.note("[red]list[0]")
        assert "[red]list[0]" in console.file.getvalue()


def test_the_screen_follows_the_stream():
    assert isinstance(open_screen(10, stream=io.StringIO()), PlainScreen)
    assert isinstance(open_screen(10, stream=Terminal()), LiveScreen)


class TestSummary:
    def test_a_curve_is_drawn_between_its_ends(self):
        assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
        assert sparkline([1.0, 1.0]) == "▅▅"
        assert sparkline([0.0, math.nan, 1.0]) == "▁ █"
        assert sparkline([]) == sparkline([math.nan]) == ""

    def test_a_long_curve_is_averaged_into_the_width(self):
        assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"
        assert len(sparkline(list(range(1000)), width=60)) == 60

    @pytest.mark.parametrize(
        ("seconds", "said"),
        [(8.24, "8.2 s"), (59.99, "1 min 00 s"), (200, "3 min 20 s"), (3599.7, "1 h 00 min"), (7500, "2 h 05 min")],
    )
    def test_durations_are_readable(self, seconds, said):
        assert duration(seconds) == said

    def test_a_run_without_steps_has_a_summary(self):
        assert closing([], 3.0) == "0 steps in 3.0 s"

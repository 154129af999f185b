import json
import math
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.actors.trace_reading import read
from trouper.actors.account import DATA, CallTimes, State
from trouper.actors.metrics import Recorder, read_metrics, step_metrics
from trouper.actors.progress import PlainScreen
from trouper.actors.run_directory import RunDirectory
from trouper.actors.summary import Usage
from trouper.channels import Attempt, Episode, Group, Message, Row, RunError, Task


@pytest.fixture
def shown():
    return []


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path)


@pytest.fixture
def recorder_of(run, clock, shown):
    def make(life=1, **options):
        return Recorder(run, life, PlainScreen(shown.append, None, interval=0), clock, **options)

    return make


def episode(reward=1.0, versions=(3, 3), status="done", member=0, prompt=2, **fields):
    sampled = len(versions)
    row = Row(
        tokens=np.arange(prompt + sampled, dtype=np.int32),
        loss_mask=np.array([False] * prompt + [True] * sampled),
        logprobs=np.zeros(prompt + sampled, np.float32),
        versions=np.array([-1] * prompt + list(versions), np.int32),
    )
    attempt = Attempt(slot=7, draw=9, member=member, tries=0, run_seed=0, task=Task("add"))
    return Episode(attempt=attempt, rows=(row,), reward=reward, status=status, turns=1, **fields)


def group(*episodes, void=None, lost=0, advantages=None):
    values = np.zeros(len(episodes), np.float32) if advantages is None else np.array(advantages, np.float32)
    return Group(slot=7, draw=9, episodes=episodes, advantages=values, void=void, lost=lost)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestStepMetrics:
    def test_rewards_are_averaged_over_those_there_are(self):
        numbers = step_metrics([group(episode(1.0), episode(0.0), episode(None)), group(episode(1.0))], 3)
        assert numbers["reward/mean"] == pytest.approx(2 / 3)
        assert numbers["reward/unscored"] == 1
        assert numbers["episodes"] == 4
        assert numbers["groups"] == 2

    def test_equal_rewards_are_no_signal_whatever_rounding_says(self):
        third = float(np.float32(0.3))
        groups = [group(*[episode(third)] * 7), group(episode(1.0), episode(0.0)), group(episode(0.7))]
        assert step_metrics(groups, 3)["reward/frac_zero_std"] == pytest.approx(2 / 3)

    def test_a_group_that_nobody_could_judge_has_no_signal(self):
        numbers = step_metrics([group(episode(None), episode(None))], 3)
        assert numbers["reward/frac_zero_std"] == 1
        assert "reward/mean" not in numbers

    def test_lengths_count_sampled_tokens(self):
        numbers = step_metrics([group(episode(versions=(3,) * 4, prompt=50), episode(versions=(3,) * 8))], 3)
        assert numbers["completions/mean_length"] == 6
        assert numbers["completions/max_length"] == 8
        assert numbers["completions/tokens"] == 12

    def test_episodes_cut_short_are_counted_by_what_cut_them(self):
        cut = [episode(status=status) for status in ("done", "truncated", "timeout", "timeout")]
        numbers = step_metrics([group(*cut)], 3)
        assert numbers["completions/clipped_ratio"] == 0.75
        assert numbers["completions/status/timeout"] == 0.5

    def test_staleness_is_counted_per_sampled_token(self):
        numbers = step_metrics([group(episode(versions=(1, 3, 3, 3)), episode(versions=()))], 3)
        assert numbers["async/staleness_mean"] == 0.5
        assert numbers["async/staleness_max"] == 2

    def test_void_groups_are_counted_by_reason(self):
        numbers = step_metrics([group(void="lost", lost=4), group(void="lost", lost=4), group(void="end_of_data")], 3)
        assert numbers == {
            "groups": 3,
            "episodes": 0,
            "async/void/lost": 2,
            "async/void/end_of_data": 1,
            "async/lost_members": 8,
        }

    def test_what_episodes_named_is_averaged_over_those_that_have_it(self):
        numbers = step_metrics(
            [
                group(
                    episode(metrics={"rewards/exact": 1.0, "tools/call_frequency": 2.0}, timings={"env": 3.0}),
                    episode(metrics={"rewards/exact": 0.0}),
                )
            ],
            3,
        )
        assert numbers["rewards/exact/mean"] == 0.5
        assert numbers["tools/call_frequency"] == 2
        assert numbers["time/episode/env"] == 3

    def test_a_step_without_groups_has_no_means(self):
        assert step_metrics([], 0) == {"groups": 0, "episodes": 0}


class TestRecorder:
    def test_a_step_is_one_line_with_its_life_and_its_time(self, run, clock, recorder_of):
        with recorder_of(life=2) as recorder:
            clock.now += 1.5
            recorder.record(1, {"reward/mean": 0.25})
            assert lines(run.metrics) == [{"step": 1, "life": 2, "time": 1.5, "reward/mean": 0.25}]
            assert recorder.curve == [(1, 0.25)]

    def test_a_step_that_nobody_could_judge_is_a_step_of_the_summary(self, run, recorder_of):
        with recorder_of() as recorder:
            recorder.record(1, {"reward/unscored": 4})
            assert recorder.summary().startswith("1 step in")

    def test_a_full_disk_is_named(self, run, recorder_of):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with recorder_of() as recorder:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            try:
                with pytest.raises(RunError, match=r"metrics.jsonl cannot be written: .*--resume"):
                    recorder.record(1, {})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def test_numbers_that_are_not_finite_are_null(self, run, recorder_of):
        with recorder_of() as recorder:
            recorder.record(1, {"kl": math.nan, "entropy": math.inf, "grad_norm": np.float32(2)})
        assert "NaN" not in run.metrics.read_text()
        assert {"kl": None, "entropy": None, "grad_norm": 2.0}.items() <= lines(run.metrics)[0].items()

    def test_tokens_per_second_are_counted_between_steps(self, run, clock, recorder_of):
        with recorder_of() as recorder:
            for step, seconds in ((1, 10.0), (2, 5.0)):
                clock.now += seconds
                recorder.record(step, {"completions/tokens": 100.0})
        assert [line["throughput/tokens_per_s"] for line in lines(run.metrics)] == [10, 20]

    def test_an_evaluation_is_told_but_is_no_step(self, run, clock, recorder_of, shown):
        with recorder_of() as recorder:
            recorder.record(5, {"eval/held_out/pass@1": 0.5})
            assert shown == ["step 5: eval/held_out/pass@1 0.500"]
            assert recorder.curve == []

    def test_notes_go_to_the_log_and_to_the_screen(self, run, clock, recorder_of, shown):
        with recorder_of(life=3) as recorder:
            clock.now += 12.25
            recorder.note("environment 4 restarted")
            assert run.log.read_text() == "-- life 3\n    12.250 environment 4 restarted\n"
            assert shown == ["environment 4 restarted"]

    def test_lives_are_counted_from_the_log(self, run, recorder_of):
        for life in range(3):
            assert run.lives() == life
            with recorder_of(life):
                pass

    def test_the_end_says_what_it_came_to_and_where_the_time_went(self, run, clock, recorder_of, shown):
        states = {State("decode", "optimizer step", "open"): 18.0, State("decode", DATA, "open"): 12.0}
        with recorder_of() as recorder:
            recorder.usage = lambda: Usage(
                states=states, slots=4, engine_slots=4, attempts=CallTimes(), calls=CallTimes()
            )
            for step, reward in ((1, 0.1), (2, 0.9), (3, 0.5)):
                clock.now += 10
                recorder.record(step, {"reward/mean": reward, "time/step": 10.0})
        for text in (shown[-1], run.log.read_text()):
            assert "3 steps in 30.0 s" in text
            assert "first 0.100 (step 1), last 0.500 (step 3), best 0.900 (step 2)" in text
            assert "trainer  busy  60%: optimizer step 60%" in text
            assert "idle  40%: sampling 40%" in text

    def test_a_steps_numbers_are_counters_of_the_trace(self, run, clock, recorder_of):
        with recorder_of() as recorder:
            for step, staleness in ((1, 0.5), (2, math.nan), (3, 1.5)):
                clock.now += 10
                recorder.record(step, {"async/staleness_mean": staleness, "kl": 1.0})
        assert read(run.trace).counters == {"async/staleness_mean": [(10.0, 0.5), (30.0, 1.5)]}

    def test_lives_of_a_process_are_marks_of_one_trace(self, run, recorder_of):
        with recorder_of(life=3) as recorder:
            recorder.begin_life(4)
        assert read(run.trace).marks == ["life 3", "life 4"]

    def test_the_best_and_the_worst_episode_are_written_to_read(self, run, recorder_of):
        with recorder_of(episodes_per_step=2) as recorder:
            members = [
                episode(
                    reward, member=member, messages=(Message("user", "2 + 2?"), Message("assistant", f"é {reward}"))
                )
                for member, reward in enumerate((0.5, 1.0, 0.0))
            ]
            recorder.episodes(4, group(*members, advantages=[0.0, 1.0, -1.0]))
            recorder.episodes(4, group(*members, advantages=[0.0, 1.0, -1.0]))
            recorder.episodes(5, group(episode(None), advantages=[0.0]))
        best, worst, unscored = lines(run.episodes)
        assert (best["step"], best["attempt"], best["reward"], best["advantage"]) == (4, "9.1.0", 1.0, 1.0)
        assert best["messages"][1] == {"role": "assistant", "content": "é 1.0"}
        assert worst["reward"] == 0.0
        assert (unscored["step"], unscored["reward"]) == (5, None)

    def test_a_line_that_a_kill_cut_off_is_taken_away(self, run, recorder_of):
        whole = json.dumps({"step": 1, "life": 1, "time": 0.0, "text": "x" * 200_000})
        for torn in ("", whole + "\n"):
            run.metrics.write_text(torn + '{"step": 2, "li' + "f" * 150_000)
            with recorder_of(life=2) as recorder:
                recorder.record(2, {"kl": 1.0})
            assert [line["step"] for line in lines(run.metrics)] == ([1, 2] if torn else [2])


class TestReading:
    def record(self, recorder_of, life, steps, value):
        with recorder_of(life) as recorder:
            for step in steps:
                recorder.record(step, {"reward/mean": value})

    def test_after_a_resume_the_newest_life_is_read(self, run, recorder_of):
        self.record(recorder_of, 1, range(1, 213), 0.1)
        self.record(recorder_of, 2, range(201, 221), 0.2)
        steps = read_metrics(run.metrics)
        assert list(steps) == list(range(1, 221))
        assert {step for step, record in steps.items() if record["life"] == 2} == set(range(201, 221))
        assert steps[212]["reward/mean"] == 0.2
        assert len(lines(run.metrics)) == 232

    def test_steps_that_the_newest_life_has_not_reached_again_are_gone(self, run, recorder_of):
        self.record(recorder_of, 1, range(1, 11), 0.1)
        self.record(recorder_of, 2, range(6, 8), 0.2)
        assert list(read_metrics(run.metrics)) == list(range(1, 8))

    def test_several_calls_for_a_step_are_one_record(self, run, recorder_of):
        with recorder_of() as recorder:
            recorder.record(1, {"kl": 1.0, "entropy": 2.0})
            recorder.record(1, {"kl": 3.0, "grad_norm": 4.0})
        assert {"kl": 3.0, "entropy": 2.0, "grad_norm": 4.0}.items() <= read_metrics(run.metrics)[1].items()

    def test_names_of_an_older_life_do_not_stay_in_a_record(self, run, recorder_of):
        with recorder_of(1) as recorder:
            recorder.record(1, {"async/void/lost": 1.0})
        with recorder_of(2) as recorder:
            recorder.record(1, {"kl": 1.0})
        assert "async/void/lost" not in read_metrics(run.metrics)[1]

    def test_a_late_evaluation_is_found_under_its_weights_step(self, run, recorder_of):
        with recorder_of(1) as recorder:
            recorder.record(0, {"eval/held_out/pass@1": 0.1})
            for step in range(1, 10):
                recorder.record(step, {"reward/mean": 0.5})
            recorder.record(5, {"eval/held_out/pass@1": 0.2})
            recorder.record(8, {"eval/held_out/pass@1": 0.3})
        with recorder_of(2) as recorder:
            recorder.record(7, {"reward/mean": 0.6})
        steps = read_metrics(run.metrics)
        assert steps[0]["eval/held_out/pass@1"] == 0.1
        assert steps[5]["eval/held_out/pass@1"] == 0.2
        assert steps[5]["reward/mean"] == 0.5
        assert list(steps) == list(range(8))

    def test_an_evaluation_done_again_leaves_the_training_record(self, run, recorder_of):
        with recorder_of(1) as recorder:
            recorder.record(5, {"reward/mean": 0.5})
            recorder.record(5, {"eval/held_out/pass@1": 0.2})
        with recorder_of(2) as recorder:
            recorder.record(5, {"eval/held_out/pass@1": 0.3})
        record = read_metrics(run.metrics)[5]
        assert (record["reward/mean"], record["eval/held_out/pass@1"], record["life"]) == (0.5, 0.3, 1)

    def test_a_line_that_is_being_written_is_left_out(self, run, recorder_of):
        self.record(recorder_of, 1, [1], 0.1)
        with run.metrics.open("a") as file:
            file.write('{"step": 2, "li')
        assert list(read_metrics(run.metrics)) == [1]

    def test_damage_is_named(self, run):
        run.metrics.write_text('{"step": 1, "life": 1}\noops\n{"step": 2, "life": 1}\n')
        with pytest.raises(ValueError, match="line 2 is not JSON"):
            read_metrics(run.metrics)

    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=5))
    @settings(deadline=None)
    def test_every_step_is_read_once_from_the_life_that_trained_it_last(self, tmp_path_factory, lives):
        run = RunDirectory(tmp_path_factory.mktemp("run"))
        expected = {}
        for life, (start, count) in enumerate(lives, start=1):
            start = min(start, max(expected, default=0))  # A life goes on from a checkpoint of the one before.
            expected = {step: seen for step, seen in expected.items() if step <= start}
            with Recorder(run, life, PlainScreen(lambda line: None, None), lambda: 0.0) as recorder:
                for step in range(start + 1, start + count + 1):
                    recorder.record(step, {"kl": float(life)})
                    expected[step] = life
        read = read_metrics(run.metrics)
        assert {step: record["life"] for step, record in read.items()} == expected
        assert all(record["kl"] == record["life"] for record in read.values())

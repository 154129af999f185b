import resource
from types import SimpleNamespace

import pytest
import trio
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tests.actors.trace_reading import read
from trouper.actors.account import DATA, OTHER, REQUESTS, CallTimes, State, TimeAccount, sampler_idle, trainer_idle
from trouper.actors.perfetto import numbered, read_trace
from trouper.actors.standard import StandardRun, standard_graph
from trouper.actors.summary import Usage, advice, closing
from trouper.actors.trace import NO_TRACE, Trace, flow_of
from trouper.envs import Rewards, StepResult

SAMPLER, TRAINER = "sampler device", "trainer device"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.perfetto-trace"


class TestTrace:
    def test_spans_nest_and_carry_what_they_were_given(self, path, clock):
        trace = Trace(path, clock)
        slot = trace.track("slot 0", group="episodes")
        with slot.span("attempt", task="sum", number=3, share=0.5):
            clock.now += 1.5
            with slot.span("step", (7, 2**64 - 1)):
                clock.now += 2.0
        trace.close()
        attempt, step = read(path).spans
        assert (attempt.name, attempt.start, attempt.end) == ("attempt", 0.0, 3.5)
        assert attempt.annotations == {"task": "sum", "number": 3, "share": 0.5}
        assert (step.outer, step.start, step.end, step.flows) == (attempt, 1.5, 3.5, [7, 2**64 - 1])
        assert read(path).parents == {"episodes": "", "slot 0": "episodes"}

    def test_counters_and_marks(self, path, clock):
        trace = Trace(path, clock)
        trace.track("run").mark("life 1")
        for value in (1, 2.5):
            trace.counter("queue/groups/depth", value)
            clock.now += 1
        trace.close()
        reading = read(path)
        assert reading.marks == ["life 1"]
        assert reading.counters == {"queue/groups/depth": [(0.0, 1.0), (1.0, 2.5)]}

    def test_an_exception_ends_its_spans(self, path, clock):
        trace = Trace(path, clock)
        track = trace.track("a")
        with pytest.raises(ValueError, match="no"), track.span("outer"), track.span("inner"):
            raise ValueError("no")
        trace.close()
        assert read(path).open == []
        assert len(read(path).spans) == 2

    def test_a_file_that_is_cut_anywhere_holds_all_before_the_cut(self, path, clock):
        trace = Trace(path, clock)
        for name in ("one", "two", "three"):
            with trace.track(f"track {name}").span(name, (1,), note=name):
                clock.now += 1
        trace.close()
        content, packets = path.read_bytes(), list(read_trace(path))
        assert pb.Trace.FromString(content).packet == packets
        whole = 0
        for end in range(len(content)):
            path.write_bytes(content[:end])
            found = list(read_trace(path))
            assert found == packets[: len(found)]
            assert len(found) - whole in (0, 1)
            whole = len(found)
            read(path)
        assert whole == len(packets) - 1

    def test_rotation_bounds_the_size_and_each_file_stands_alone(self, path, clock):
        trace = Trace(path, clock, file_bytes=200_000, files=3)
        run = trace.track("run")
        run.begin("the whole run", step=1)
        for index in range(40_000):
            clock.now += 0.001
            with trace.track(f"slot {index % 4}").span("attempt"):
                trace.counter("depth", index)
        run.end()
        trace.close()
        files = [numbered(path, number) for number in range(3)]
        assert sorted(path.parent.iterdir()) == sorted(files)
        assert sum(file.stat().st_size for file in files) < 3 * (200_000 + 4096 * 40)
        newest, *older = [read(file) for file in files]
        assert [span.name for span in newest.open] == []
        for reading in (newest, *older):
            assert reading.of("run", "the whole run")[0].start == 0.0  # it was open when the file began
            assert reading.counters["depth"]
        assert all([span.name for span in reading.open if span.track == "run"] for reading in older)

    def test_what_an_earlier_process_left_is_not_appended_to(self, path, clock):
        for name in ("first", "second"):
            trace = Trace(path, clock)
            with trace.track("a").span(name):
                clock.now += 1
            trace.close()
            path.write_bytes(path.read_bytes()[:-1])  # killed in the middle of a write
        assert [span.name for span in read(numbered(path, 1)).spans] == ["first"]
        assert [span.name for span in read(path).spans] == ["second"]

    def test_a_full_disk_costs_the_trace_and_not_the_run(self, path, clock, caplog):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            trace = Trace(path, clock)
            with trace.track("a").span("b"):
                pass
            trace.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "trace.perfetto-trace cannot be written and ends here" in caplog.text

    def test_no_trace_takes_everything(self, tmp_path):
        with NO_TRACE.track("a").span("b", (1,), c=2) as track:
            track.mark("d")
        NO_TRACE.counter("e", 1.0)
        NO_TRACE.close()
        assert list(tmp_path.iterdir()) == []


class TestAccount:
    """What two devices are at, and whose fault it is when one is at nothing."""

    @pytest.mark.parametrize(
        ("state", "sampler", "trainer"),
        [
            (State("decode", DATA, "open"), None, "sampling"),
            (State(REQUESTS, DATA, "open"), "environments", "environments"),
            (State(REQUESTS, "optimizer step", "held"), "weights", None),
            (State(REQUESTS, "optimizer step", "open"), "environments", None),
            (State(REQUESTS, DATA, "held"), "environments", "environments"),  # stragglers hold what holds admission
            (State(REQUESTS, "compile", "held"), "compile", None),
            (State("compile", DATA, "held"), None, "compile"),
            (State("compile", OTHER, "held"), None, "compile"),  # actors start one after another
            (State(REQUESTS, "optimizer step", "over"), "draining", None),
            (State("decode", OTHER, "open"), None, "host"),
        ],
    )
    def test_causes(self, state, sampler, trainer):
        assert (sampler_idle(state), trainer_idle(state)) == (sampler, trainer)

    def test_every_second_is_charged_once_also_in_nested_blocks(self, clock):
        account = TimeAccount(lambda: clock.now - 1000.0)
        clock.now += 1
        with account.trainer.doing("checkpoint"):
            clock.now += 2
            with account.sampler.doing("decode"), account.trainer.doing("copy weights"):
                clock.now += 4
            clock.now += 8
        account.settle()
        assert account.seconds == {
            State(OTHER, OTHER, "held"): 1.0,
            State(OTHER, "checkpoint", "open"): 10.0,
            State("decode", "copy weights", "open"): 4.0,
        } | {key: 0.0 for key, seconds in account.seconds.items() if seconds == 0.0}

    def test_of_thousands_of_spans_a_second_the_long_ones_are_drawn(self, path, clock):
        trace = Trace(path, clock)
        account = TimeAccount(lambda: clock.now - 1000.0, trace)
        for index in range(1000):
            with account.sampler.doing("decode", requests=index):
                clock.now += 0.0005 if index % 100 else 0.01
        trace.close()
        spans = read(path).of(SAMPLER, "decode")
        assert 250 < len(spans) < 600
        drawn = [span.annotations["requests"] for span in spans if span.seconds > 0.005]
        assert drawn == list(range(0, 1000, 100))
        assert sum(account.seconds.values()) == pytest.approx(990 * 0.0005 + 10 * 0.01)

    def test_metrics_tell_of_the_time_since_they_were_last_asked_for(self, clock):
        account = TimeAccount(lambda: clock.now - 1000.0, admission=lambda: "held")
        for busy, idle in ((3.0, 1.0), (1.0, 1.0)):
            with account.trainer.doing("micro-batch"):
                with account.sampler.doing("decode"):
                    clock.now += busy
                with account.sampler.doing(REQUESTS):
                    clock.now += idle
            metrics = account.metrics()
            assert metrics["device/sampler/idle/weights"] == metrics["device/sampler/idle_frac"] == idle / (busy + idle)
            assert metrics["time/rollout_wait"] == idle
            assert metrics["device/idle_frac"] == 0.0


class TestAdvice:
    """One knob, by the largest loss."""

    def usage(self, states, calls=None, used=1.0, generating=0.0):
        elapsed, attempts, called = sum(states.values()), CallTimes(), CallTimes()
        attempts.add("attempt", used * 8 * elapsed)
        attempts.add("generate", generating * elapsed)
        for name, seconds in (calls or {}).items():
            called.add(name, seconds)
        return Usage(states=states, slots=8, engine_slots=4, attempts=attempts, calls=called)

    @pytest.mark.parametrize(
        ("states", "given", "knob"),
        [
            (
                {State(REQUESTS, DATA, "open"): 9.0},
                {"calls": {"tool:a": 5.0, "tool:b": 5.0}},
                "rollout.max_concurrency",
            ),
            ({State(REQUESTS, DATA, "open"): 9.0}, {"calls": {"tool:a": 9.0, "tool:b": 1.0}}, "a faster tool:a: 90%"),
            ({State(REQUESTS, DATA, "held"): 9.0}, {"used": 0.3}, "rollout.max_staleness"),
            (
                {State("decode", DATA, "held"): 5.0, State(REQUESTS, "optimizer step", "held"): 5.0},
                {},
                "rollout.max_staleness",
            ),
            ({State("decode", DATA, "open"): 9.0}, {"generating": 4.0}, "engine.slots"),
            ({State("decode", DATA, "open"): 9.0}, {"generating": 2.0}, "rollout.max_concurrency"),
            ({State(REQUESTS, "micro-batch", "held"): 9.0}, {}, "train.micro_batch_size"),
            ({State(REQUESTS, "compile", "held"): 9.0}, {}, "train.max_steps"),
            ({State("decode", "checkpoint", "open"): 9.0}, {}, "checkpoint.save_interval_steps"),
            ({State("decode", "micro-batch", "open"): 9.0}, {}, "nothing"),
        ],
    )
    def test_the_largest_loss_decides(self, states, given, knob):
        small = {State(REQUESTS, "compile", "held"): 0.3, State("decode", "micro-batch", "open"): 1.0}
        assert knob in advice(self.usage({**small, **states}, **given))

    def test_shares_of_each_device_are_the_whole_of_the_wall_time(self):
        usage = self.usage({State(REQUESTS, DATA, "open"): 1.0, State("decode", "checkpoint", "open"): 3.0})
        text = closing([(1, 0.5), (2, 0.7)], 4.0, usage)
        assert "sampler  busy  75%: decode 75%\n         idle  25%: environments 25%" in text
        assert "trainer  busy  75%: checkpoint 75%\n         idle  25%: environments 25%" in text
        assert len(text.splitlines()) <= 12

    def test_late_groups_are_told_by_the_length_of_their_episodes(self):
        lengths = {
            "grouper/late/up_to_128_tokens": 3,
            "grouper/in_time/up_to_128_tokens": 4,
            "grouper/in_time/up_to_64_tokens": 1996,
            "grouper/late/up_to_64_tokens": 4,
            "grouper/in_time/up_to_1_tokens": 0,
        }
        assert closing([], 1.0, None, lengths).splitlines()[-1] == (
            "late     7 groups were dropped: 4 of 2,000 up to 64 tokens an episode · 3 of 7 up to 128 tokens an episode"
        )


class Search:
    """Two tools, one of them fifty times slower; an episode calls both."""

    def __init__(self):
        self.tools = [self.quick, self.slow]

    async def quick(self) -> str:
        await trio.sleep(0.1)
        return "b"

    async def slow(self) -> str:
        await trio.sleep(5.0)
        return "b"

    async def reset(self, task):
        return "a"

    async def step(self, action):
        return StepResult("b", done=True)


def length(task, messages, text):
    return float(len(text))


async def both(talk, world):
    """An agent that calls each tool after a turn."""
    talk.user(await world.reset())
    for name in ("quick", "slow"):
        await talk.generate()
        talk.user((await world.call(name, {})).text)


class TestRun:
    async def test_what_a_run_did_is_there(self, play, autojump_clock):
        sampling = {"max_response_tokens": 24, "max_context_tokens": 128}
        game = await play(rewards=Rewards({"length": length}, (1.0,)), sampling=sampling, engine={"chunk": 2})()
        reading = read(game.directory / "trace.perfetto-trace")
        assert {span.name for span in reading.of(SAMPLER)} >= {"prefill", "decode", "swap", "attest"}
        assert {span.name for span in reading.of(TRAINER)} >= {"micro-batch", "optimizer step", "copy weights"}
        assert {span.name for span in reading.of("slot 0")} == {"attempt", "generate", "reward:length"}
        assert {span.name for span in reading.of("environment 0")} == {"create", "reset", "step", "score", "close"}
        assert {span.name for span in reading.of("grouper")} == {"group", "ledger sync"}
        assert len(reading.of("barrier", "weight sync")) == 5  # of four steps, and the first
        assert reading.marks == ["life 1"]
        generate = reading.of("slot 0", "generate")
        assert all(span.outer in reading.of("slot 0", "attempt") for span in generate)
        steps = reading.of("environment 0", "step")
        assert {round(span.seconds, 6) for span in steps} == {1.0}
        counted = {"queue/groups/depth", "episodes/busy", "sampler/requests", "sampler/tokens_per_s"}
        assert reading.counters.keys() >= counted | {"async/staleness_max", "memory/resident_mib", "reward/mean"}
        assert reading.counters["memory/resident_mib"][0][1] > 10

    async def test_a_flow_leads_from_the_turns_of_an_episode_to_the_step_that_trained_it(self, play, autojump_clock):
        game = await play()()
        reading = read(game.directory / "trace.perfetto-trace")
        turns = [span for index in range(8) for span in reading.of(f"slot {index}", "generate")]
        updates = {span.annotations["step"]: span for span in reading.of(TRAINER, "optimizer step")}
        assert updates.keys() == {1, 2, 3, 4}
        for step, group in game.groups:
            for episode in group.episodes:
                flow = flow_of(episode.attempt)
                own = [span for span in turns if flow in span.flows]
                assert len(own) == episode.turns
                (batch,) = [span for span in reading.of(TRAINER, "micro-batch") if flow in span.flows]
                assert batch.annotations["slot"] == group.slot
                assert [number for number, span in updates.items() if flow in span.flows] == [step + 1]
                assert max(span.end for span in own) <= batch.start <= batch.end <= updates[step + 1].start

    async def test_device_time_adds_up_and_is_told_alike_by_trace_metrics_and_table(self, play, autojump_clock):
        game = await play()()
        account = game.run.time
        assert sum(account.seconds.values()) == pytest.approx(game.seconds)
        reading = read(game.directory / "trace.perfetto-trace")
        usage = Usage(states=account.seconds, slots=8, engine_slots=4, attempts=CallTimes(), calls=CallTimes())
        for track, device in ((SAMPLER, sampler_idle), (TRAINER, trainer_idle)):
            told = {f"idle: {cause}": seconds for cause, seconds in usage.idle(device).items() if cause != "host"}
            for name, seconds in (told | usage.busy(device)).items():
                spans = [span for span in reading.of(track, name) if span.end is not None]
                ended = sum(span.seconds for span in spans) + sum(
                    game.seconds - span.start for span in reading.open if (span.track, span.name) == (track, name)
                )
                assert ended == pytest.approx(seconds, abs=1e-6), name
        assert usage.busy(sampler_idle)["swap"] == pytest.approx(4 * 0.05)
        assert usage.busy(trainer_idle)["optimizer step"] == pytest.approx(4.0)
        for record in game.metrics.values():
            whole = sum(value for name, value in record.items() if name.startswith("device/sampler/idle/"))
            assert whole == pytest.approx(record["device/sampler/idle_frac"])
            assert 0 <= record["device/idle_frac"] <= record["device/trainer/idle_frac"] <= 1

    async def test_one_tool_that_is_fifty_times_slower_is_named(self, play, autojump_clock):
        game = await play(make_environment=Search, agent=both)()
        table = (game.directory / "log.txt").read_text()
        assert "calls    tool:slow " in table
        assert "try      a faster tool:slow: 98% of all environment time, 5.0 s a call" in table
        reading = read(game.directory / "trace.perfetto-trace")
        tools = [span for span in reading.spans if span.name.startswith("tool:")]
        assert {(span.name, round(span.seconds, 3)) for span in tools} == {("tool:slow", 5.0), ("tool:quick", 0.1)}

    async def test_a_tool_that_the_model_made_up_gets_no_name(self, play, autojump_clock):
        async def inventive(talk, world):
            talk.user(await world.reset())
            await talk.generate()
            await world.call(f"invented {trio.current_time()}", {})

        game = await play(make_environment=Search, agent=inventive)()
        assert {name for name in game.run.episodes.calls.calls if name.startswith("tool:")} == {"tool:unknown"}

    async def test_slots_beyond_the_first_are_counted_but_not_drawn(self, play, autojump_clock):
        game = await play(
            engine={"slots": 32}, rollout={"num_generations": 2, "max_concurrency": 64}, train={"groups_per_step": 32}
        )()
        reading = read(game.directory / "trace.perfetto-trace")
        assert {track for track in reading.parents if track.startswith("slot ")} == {f"slot {n}" for n in range(16)}
        assert game.run.episodes.attempts.calls["attempt"] == 4 * 64
        assert max(value for _, value in reading.counters["episodes/busy"]) > 16

    async def test_evaluation_has_tracks_of_its_own(self, play, stream, autojump_clock):
        evaluation = {"every_steps": 2, "tasks": {"source": "held:out"}, "count": 3, "max_concurrency": 1}
        game = await play(held_out=stream(), evaluation=evaluation)()
        reading = read(game.directory / "trace.perfetto-trace")
        assert {span.name for span in reading.of("evaluation slot 0")} == {"attempt", "generate"}
        assert not any(span.flows for span in reading.of("evaluation slot 0"))  # it is never trained
        assert all(span.flows for span in reading.of("slot 0", "generate"))
        assert reading.parents["evaluation slot 0"] == "evaluation"
        assert reading.parents["slot 0"] == "episodes"

    async def test_a_failed_attempt_leaves_no_span_open(self, play, letters, autojump_clock):
        class Shaky(letters):
            made = 0

            def __init__(self):
                Shaky.made += 1
                self.number = Shaky.made

            async def step(self, action):
                if self.number % 3 == 0:
                    raise OSError("gone")
                if self.number % 3 == 1:
                    await trio.sleep_forever()
                return await super().step(action)

        game = await play(make_environment=Shaky, rollout={"max_consecutive_lost": 1000, "max_attempts": 9})()
        assert game.run.breaker.lost.total() > 0
        reading = read(game.directory / "trace.perfetto-trace")
        assert [span for span in reading.open if not span.name.startswith("idle")] == []

    async def test_a_graph_of_ones_own_draws_without_a_trace(self, play, autojump_clock):
        game = await play(train={"max_steps": 1})()
        nothing = SimpleNamespace(trace=NO_TRACE, log=None)
        run = StandardRun(
            game.config, game.run._cast, None, None, None, None, nothing, None, None, game.run.sampler.weights, None
        )
        assert "sampler" in standard_graph(run).mermaid()

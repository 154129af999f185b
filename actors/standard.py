"""The standard run: the actors of agentic GRPO, wired into a graph.

    source -> tasks -> episode slots -> episodes -> grouper -> groups -> trainer -> weights -> barrier

The graph is an ordinary one; a graph of your own may use the same actors. Knows neither files nor dotted names:
`trouper.actors.launch` loads what goes in.
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import trio
from msgspec import Struct

from trouper.actors.accelerator import Accelerator, DeviceThread
from trouper.actors.account import Admission, TimeAccount, resident_mib
from trouper.actors.barrier import Attested, Barrier
from trouper.actors.child import NEVER, ON_ERROR
from trouper.actors.config import RunConfig
from trouper.actors.episode import Breaker, EpisodeRules, EpisodeSlots
from trouper.actors.evaluator import Evaluator
from trouper.actors.generation import GenerationEngine
from trouper.actors.graph import Graph
from trouper.actors.ledger import Ledger
from trouper.actors.life import Life
from trouper.actors.metrics import Recorder
from trouper.actors.redo import Resumed, begin
from trouper.actors.sampler import Generate, Sampler
from trouper.actors.summary import Usage
from trouper.actors.supervisor import Strategy
from trouper.actors.trainer import CheckpointFolder, CheckpointMeta, PolicyLearner
from trouper.channels import Attempt, Exited, Group, Outcome, Receiver, Sampling, Sender, Weights
from trouper.envs import Agent, Chat, Rewards, Tasks
from trouper.learner.profile import StepProfile


class Cast(Struct, frozen=True, kw_only=True, eq=False):
    """Everything a run needs that is not the model: what the configuration's dotted names stand for.

    Attributes:
        chat: turns text into ids.
        tasks: the stream to train on.
        held_out: the stream to evaluate on, if any.
        make_environment: makes one environment object.
        agent: plays.
        rewards: judge.
    """

    chat: Chat
    tasks: Tasks
    held_out: Tasks | None
    make_environment: Callable[[], Any]
    agent: Agent
    rewards: Rewards


class StandardRun:
    """The actors of a standard run.

    Args:
        config: the whole configuration.
        cast: what it names.
        learner: holds the parameters.
        publish: a copy of them for the samplers, and its checksum.
        rewind: puts the learner back to the newest checkpoint and returns its JSON item; to the beginning, and None,
            where there is no checkpoint.
        make_engine: builds a generation engine that holds given weights.
        recorder: takes metrics and notes.
        checkpoints: where to save.
        ledger: remembers draws and complete groups; the first life has begun in it.
        weights: the first ones.
        resumed: what earlier processes left, if any.
        profile: traces chosen steps.
        wire: puts the actors into a graph; `standard_graph` when None.
        make_accelerator: makes what runs the calls of the named part; a simulation gives its own.

    Attributes:
        life: the present one, once the trainer has begun.
    """

    life: Life

    def __init__(
        self,
        config: RunConfig,
        cast: Cast,
        learner: PolicyLearner,
        publish: Callable[[], tuple[Any, int]],
        rewind: Callable[[], CheckpointMeta | None],
        make_engine: Callable[[Weights], GenerationEngine],
        recorder: Recorder,
        checkpoints: CheckpointFolder,
        ledger: Ledger,
        weights: Weights,
        resumed: Resumed,
        *,
        profile: StepProfile | None = None,
        wire: "Callable[[StandardRun], Graph] | None" = None,
        make_accelerator: Callable[[str], Accelerator] = DeviceThread,
    ) -> None:
        self.config = config
        self._cast = cast
        self._recorder = recorder
        self._learner = learner
        self._publish = publish
        self._rewind = rewind
        self._checkpoints = checkpoints
        self._ledger = ledger
        self._profile = profile
        rollout, sync = config.rollout, config.sync
        self.time = TimeAccount(lambda: recorder.elapsed, recorder.trace, self._admission, self._count)
        self._counted = (0.0, 0)  # when tokens were counted last, and how many there were
        recorder.usage = self._usage
        self.sampler_device = make_accelerator("sampler")
        self.trainer_device = make_accelerator("trainer")
        self._disk = make_accelerator("ledger")
        self.breaker = Breaker(rollout.max_consecutive_lost, rollout.max_lost_fraction)
        self.sampler = Sampler(
            make_engine,
            weights,
            self.sampler_device,
            max_waiting=2 * config.engine.slots,
            mode=sync.mode,
            kv=sync.kv,
            drain_timeout=sync.drain_timeout,
            time=self.time.sampler,
        )
        first = Attested(weights.life, weights.step)
        track = recorder.trace.track("barrier")
        self.barrier = Barrier([self.sampler], self._attest, first=first, timeout=sync.timeout, track=track)
        self.episodes = self._slots(
            "training", rollout.max_concurrency, config.sampling.temperature, 1.0, 0, self.breaker
        )
        self.evaluator = self._make_evaluator() if cast.held_out is not None else None
        # How the next life begins; the first one with what the process began with.
        self._next: tuple[Weights, Resumed] | None = (weights, resumed)
        self._last_gauges: dict[str, float] = {}
        self.graph = (wire or standard_graph)(self)

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.life.trainer.step if self._next is None else self._next[0].step

    # The learning domain: whatever fails in it, all of it begins again with the trainer ------------------------

    async def train(
        self,
        inbox: Receiver[Group],
        outbox: Sender[Weights],
        stop: trio.Event,
        *,
        task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The trainer. Its start begins a life, so it is the first of its domain."""
        await self._begin_life()
        await self.life.trainer.run(inbox, outbox, stop, task_status=task_status)

    async def group(self, inbox: Receiver[Outcome], outbox: Sender[Group]) -> None:
        """The grouper."""
        await self.life.grouper.run(inbox, outbox)

    async def draw(self, outbox: Sender[Attempt], voids: Sender[Outcome]) -> None:
        """The source."""
        await self.life.source.run(outbox, voids)

    async def _begin_life(self) -> None:
        (weights, resumed), self._next = self._next or await self._after_failure(), None
        for damage in resumed.damaged:
            self._recorder.note(damage)
        if resumed.position.open:
            self._recorder.note(resumed.describe(weights.life, weights.step))
        self._last_gauges = {name: at for name, at in self._last_gauges.items() if not name.startswith("grouper/")}
        self.life = Life(
            self.config,
            self._cast.tasks,
            self._learner,
            self._publish,
            self.trainer_device,
            self._disk,
            self._ledger,
            self._checkpoints,
            self._recorder,
            self._gauges,
            weights,
            resumed,
            self._profile,
            self.time.trainer,
        )

    async def _after_failure(self) -> tuple[Weights, Resumed]:
        life = self.life.number + 1
        with self.time.trainer.doing("load"):
            saved = await self.trainer_device.run(self._rewind)
            params, checksum = await self.trainer_device.run(self._publish)
        self._recorder.begin_life(life)
        step = saved.step if saved else 0
        source = saved.source if saved else None
        resumed = await self._disk.run(
            partial(begin, self._ledger, source, self.config, life=life, step=step, redo=True)
        )
        return Weights(life=life, step=step, params=params, checksum=checksum), resumed

    def _attest(self, weights: Weights) -> None:
        if weights.life == self.life.number:  # else they are of a life that has failed meanwhile
            self.life.pacer.attest(weights.step)

    def note(self, text: str) -> None:
        """Show a line to whoever watches the run, and keep it."""
        self._recorder.note(text)

    def note_exit(self, exited: Exited) -> None:
        """Write down what failed, and which life of it."""
        if exited.error is not None:
            error = exited.error
            self._recorder.log(f"{exited.name} failed in its life {exited.attempt}: {type(error).__name__}: {error}")

    def _slots(
        self,
        kind: Literal["training", "evaluation"],
        concurrency: int,
        temperature: float,
        top_p: float,
        top_k: int,
        breaker: Breaker,
    ) -> EpisodeSlots:
        config, cast = self.config, self._cast
        return EpisodeSlots(
            concurrency,
            make_environment=cast.make_environment,
            agent=cast.agent,
            chat=cast.chat,
            rewards=cast.rewards,
            rules=EpisodeRules(
                sampling=Sampling(temperature, top_p, top_k),
                max_prompt_tokens=config.sampling.max_prompt_tokens,
                max_response_tokens=config.sampling.max_response_tokens,
                max_turns=config.sampling.max_turns,
                max_context_tokens=config.sampling.max_context_tokens,
                episode_timeout=config.rollout.episode_timeout,
                max_attempts=config.rollout.max_attempts,
                on_rewrite=config.chat.on_rewrite,
            ),
            deadlines=config.environment,
            sampler=self.sampler,
            breaker=breaker,
            note=self._recorder.log,
            trace=self._recorder.trace,
            kind=kind,
        )

    def _evaluation_slots(self) -> EpisodeSlots:
        evaluation, sampling = self.config.evaluation, self.config.sampling
        breaker = Breaker(sys.maxsize, 1.0)  # an evaluation that loses everything says so, and training goes on
        concurrency, temperature = evaluation.max_concurrency, evaluation.temperature
        return self._slots("evaluation", concurrency, temperature, sampling.top_p, sampling.top_k, breaker)

    def _make_evaluator(self) -> Evaluator:
        assert self._cast.held_out is not None
        return Evaluator(
            self.config.evaluation,
            self._cast.held_out,
            self._evaluation_slots,
            self.barrier.attested,
            self._recorder,
            run_seed=self.config.run.seed,
        )

    def _admission(self) -> Admission:
        if self._next is not None:  # no life has begun
            return "held"
        pacer, busy = self.life.pacer, self.episodes.busy
        if pacer.total is not None and pacer.admitted >= pacer.total:
            return "open" if busy else "over"
        newest = pacer.version + self.config.rollout.max_staleness
        held = pacer.admitted // pacer.groups_per_step > newest and busy < self.config.rollout.max_concurrency
        return "held" if held else "open"

    def _count(self) -> None:
        """The trace's counters."""
        count, (then, tokens) = self._recorder.trace.counter, self._counted
        self._counted = (now, total) = (self._recorder.elapsed, self.sampler.sampled_tokens)
        if now > then:
            count("sampler/tokens_per_s", (total - tokens) / (now - then))
        count("sampler/requests", self.sampler.running)
        count("episodes/busy", self.episodes.busy)
        count("memory/resident_mib", resident_mib())
        for channel in self.graph.statistics():
            count(f"queue/{channel.name}/depth", channel.depth)

    def _usage(self) -> Usage:
        self.time.settle()
        return Usage(
            states=self.time.seconds,
            slots=self.config.rollout.max_concurrency,
            engine_slots=self.config.engine.slots,
            attempts=self.episodes.attempts,
            calls=self.episodes.calls,
        )

    def _gauges(self) -> Mapping[str, float]:
        """What the other actors can tell about the time since the last call."""
        totals = {
            "time/gen": self.sampler_device.busy_seconds,
            "time/weight_sync": self.barrier.seconds,
            "sampler/tokens": float(self.sampler.sampled_tokens),
            "supervisor/restarts": float(self.graph.restarts),
            "env/restarts": float(self.episodes.restarts),
            "loop/blocked_seconds": self.graph.heartbeat.blocked_seconds,
            "loop/incidents": float(self.graph.heartbeat.incidents),
        }
        totals |= {f"env/failures/{kind}": float(count) for kind, count in self.breaker.lost.items()}
        grouper = self.life.grouper
        totals |= {f"grouper/{name}": float(count) for name, count in grouper.counts.items()}
        gauges = {
            "episodes/busy": float(self.episodes.busy),
            "grouper/open_groups": float(grouper.open_groups),
            "tasks/quarantined": float(len(self.life.quarantine.causes)),
        }
        for channel in self.graph.statistics():
            gauges[f"queue/{channel.name}/depth"] = float(channel.depth)
            totals[f"queue/{channel.name}/wait_s"] = channel.send_wait
        gauges |= self.time.metrics()
        since = {name: value - self._last_gauges.get(name, 0.0) for name, value in totals.items()}
        self._last_gauges = totals
        return gauges | since


def standard_graph(run: StandardRun) -> Graph:
    """How the actors of a run are wired, unless you wire them yourself."""
    config = run.config
    graph = Graph(
        config.run.name,
        max_restarts=config.run.max_restarts,
        window=config.run.restart_window,
        seed=config.run.seed,
        on_exit=run.note_exit,
        note=run.note,
    )
    per_step = config.train.groups_per_step * config.rollout.num_generations
    tasks = graph.channel("tasks", Attempt, capacity=config.rollout.num_generations)
    episodes = graph.channel("episodes", Outcome, capacity=per_step)
    groups = graph.channel("groups", Group, capacity=config.train.groups_per_step)
    weights = graph.channel("weights", Weights, capacity=1)
    requests = graph.channel("requests", Generate, capacity=config.engine.slots)
    # Declared in the order of starting: consumers first, so that a stop reaches the source first.
    graph.actor("sampler", run.sampler.run, requests=requests, restart=ON_ERROR, start_timeout=math.inf)
    graph.actor("barrier", run.barrier.run, inbox=weights, restart=NEVER)
    if run.evaluator is not None:
        graph.actor("evaluator", run.evaluator.run, requests=requests, restart=NEVER)
        graph.link("barrier", "evaluator", "attested step")
    with graph.domain(
        "learning",
        strategy=Strategy.ONE_FOR_ALL,
        max_restarts=config.run.max_restarts,
        window=config.run.restart_window,
    ):
        graph.actor(
            "trainer",
            run.train,
            inbox=groups,
            outbox=weights,
            restart=ON_ERROR,
            start_timeout=math.inf,
            grace=math.inf,  # it ends after the running device call and the checkpoint
        )
        graph.actor("grouper", run.group, inbox=episodes, outbox=groups, restart=ON_ERROR)
        graph.actor("episodes", run.episodes.run, inbox=tasks, outbox=episodes, requests=requests, restart=ON_ERROR)
        graph.actor("source", run.draw, outbox=tasks, voids=episodes, restart=ON_ERROR)
    graph.link("barrier", "sampler", "weights (life, step)")
    graph.link("barrier", "source", "pacer: attested step")
    graph.link("grouper", "source", "pacer: closed and reopened slots")
    graph.link("sampler", "episodes", "turns")
    return graph

"""The standard run: the actors of agentic GRPO, wired into a graph.

    source -> tasks -> episode slots -> episodes -> grouper -> groups -> trainer -> weights -> barrier

The graph is an ordinary one; a graph of your own may use the same actors. Knows neither files nor dotted names:
`trouper.actors.launch` loads what goes in.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from trouper.actors.accelerator import Accelerator, DeviceThread
from trouper.actors.barrier import Barrier
from trouper.actors.child import NEVER, ON_ERROR
from trouper.actors.config import RunConfig
from trouper.actors.episode import Breaker, EpisodeRules, EpisodeSlots
from trouper.actors.evaluator import Evaluator
from trouper.actors.graph import Graph
from trouper.actors.grouper import Grouper
from trouper.actors.metrics import Recorder
from trouper.actors.pacer import Pacer
from trouper.actors.sampler import Generate, GenerationEngine, Sampler
from trouper.actors.source import Source
from trouper.actors.trainer import CheckpointFolder, CheckpointMeta, PolicyLearner, Trainer
from trouper.channels import Attempt, Group, Outcome, Sampling, Weights
from trouper.envs import Agent, Chat, Rewards, Tasks


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
        make_engine: builds a generation engine that holds given weights.
        recorder: takes metrics and notes.
        checkpoints: where to save.
        weights: the first ones.
        resumed: the newest checkpoint's JSON item, if there is one.
        wire: puts the actors into a graph; `standard_graph` when None.
        make_accelerator: makes what runs the calls of the named part; a simulation gives its own.
    """

    def __init__(
        self,
        config: RunConfig,
        cast: Cast,
        learner: PolicyLearner,
        publish: Callable[[], tuple[Any, int]],
        make_engine: Callable[[Weights], GenerationEngine],
        recorder: Recorder,
        checkpoints: CheckpointFolder,
        weights: Weights,
        resumed: CheckpointMeta | None = None,
        wire: "Callable[[StandardRun], Graph] | None" = None,
        make_accelerator: Callable[[str], Accelerator] = DeviceThread,
    ) -> None:
        self.config = config
        self._cast = cast
        self._recorder = recorder
        rollout, train, sync = config.rollout, config.train, config.sync
        self.pacer = Pacer(
            groups_per_step=train.groups_per_step,
            max_staleness=rollout.max_staleness,
            max_steps=train.max_steps,
            max_redraws=rollout.max_redraws,
            weight_sync_steps=sync.weight_sync_steps,
            first_step=weights.step,
        )
        if resumed:
            self.pacer.restore({open_.slot: open_.redraws for open_ in resumed.source.open})
        self.sampler_device = make_accelerator("sampler")
        self.trainer_device = make_accelerator("trainer")
        self.breaker = Breaker(rollout.max_consecutive_lost, rollout.max_lost_fraction)
        self.sampler = Sampler(
            make_engine,
            weights,
            self.sampler_device,
            max_waiting=2 * config.engine.slots,
            mode=sync.mode,
            kv=sync.kv,
            drain_timeout=sync.drain_timeout,
        )
        self.barrier = Barrier([self.sampler], self.pacer, timeout=sync.timeout)
        self.source = Source(
            cast.tasks,
            self.pacer,
            num_generations=rollout.num_generations,
            run_seed=config.run.seed,
            resumed=resumed.source if resumed else None,
        )
        self.episodes = self._slots(rollout.max_concurrency, config.sampling.temperature, 1.0, 0, self.breaker)
        self.grouper = Grouper(
            self.pacer,
            num_generations=rollout.num_generations,
            estimator=train.advantage_estimator,
            scale_rewards=train.scale_rewards,
            lost_members=rollout.lost_members,
            min_members=rollout.min_members,
            dynamic_sampling=rollout.dynamic_sampling,
        )
        self.trainer = Trainer(
            learner,
            publish,
            self.trainer_device,
            self.pacer,
            self.source,
            checkpoints,
            recorder,
            gauges=self._gauges,
            weights=weights,
            weight_sync_steps=sync.weight_sync_steps,
            save_interval_steps=config.checkpoint.save_interval_steps,
            mask_truncated=rollout.mask_truncated,
            drop_last=train.drop_last,
            max_empty_steps=train.max_empty_steps,
        )
        self.evaluator = self._make_evaluator() if cast.held_out is not None else None
        self.graph = (wire or standard_graph)(self)
        self._last_gauges: dict[str, float] = {}

    def _slots(self, concurrency: int, temperature: float, top_p: float, top_k: int, breaker: Breaker) -> EpisodeSlots:
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
        )

    def _evaluation_slots(self) -> EpisodeSlots:
        evaluation, sampling = self.config.evaluation, self.config.sampling
        breaker = Breaker(sys.maxsize, 1.0)  # an evaluation that loses everything says so, and training goes on
        return self._slots(evaluation.max_concurrency, evaluation.temperature, sampling.top_p, sampling.top_k, breaker)

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

    def _gauges(self) -> Mapping[str, float]:
        """What the other actors can tell about the time since the last call."""
        totals = {
            "time/gen": self.sampler_device.busy_seconds,
            "time/weight_sync": self.barrier.seconds,
            "sampler/tokens": float(self.sampler.sampled_tokens),
            "supervisor/restarts": float(self.graph.restarts),
            "env/restarts": float(self.episodes.restarts),
        }
        totals |= {f"env/failures/{kind}": float(count) for kind, count in self.breaker.lost.items()}
        totals |= {f"grouper/{name}": float(count) for name, count in self.grouper.counts.items()}
        gauges = {"episodes/busy": float(self.episodes.busy), "grouper/open_groups": float(self.grouper.open_groups)}
        for channel in self.graph.statistics():
            gauges[f"queue/{channel.name}/depth"] = float(channel.depth)
            totals[f"queue/{channel.name}/wait_s"] = channel.send_wait
        since = {name: value - self._last_gauges.get(name, 0.0) for name, value in totals.items()}
        self._last_gauges = totals
        return gauges | since


def standard_graph(run: StandardRun) -> Graph:
    """How the actors of a run are wired, unless you wire them yourself."""
    config = run.config
    graph = Graph(config.run.name, seed=config.run.seed)
    per_step = config.train.groups_per_step * config.rollout.num_generations
    tasks = graph.channel("tasks", Attempt, capacity=config.rollout.num_generations)
    episodes = graph.channel("episodes", Outcome, capacity=per_step)
    groups = graph.channel("groups", Group, capacity=config.train.groups_per_step)
    weights = graph.channel("weights", Weights, capacity=1)
    requests = graph.channel("requests", Generate, capacity=config.engine.slots)
    # Declared in the order of starting: consumers first, so that a stop reaches the source first.
    graph.actor("sampler", run.sampler.run, requests=requests, restart=ON_ERROR, start_timeout=float("inf"))
    graph.actor("barrier", run.barrier.run, inbox=weights, restart=NEVER)
    if run.evaluator is not None:
        graph.actor("evaluator", run.evaluator.run, requests=requests, restart=NEVER)
        graph.link("barrier", "evaluator", "attested step")
    graph.actor(
        "trainer",
        run.trainer.run,
        inbox=groups,
        outbox=weights,
        restart=NEVER,
        start_timeout=float("inf"),
        grace=float("inf"),  # it ends after the running device call and the checkpoint
    )
    graph.actor("grouper", run.grouper.run, inbox=episodes, outbox=groups, restart=NEVER)
    graph.actor("episodes", run.episodes.run, inbox=tasks, outbox=episodes, requests=requests, restart=NEVER)
    graph.actor("source", run.source.run, outbox=tasks, voids=episodes, restart=NEVER)
    graph.link("barrier", "sampler", "weights (life, step)")
    graph.link("barrier", "source", "pacer: attested step")
    graph.link("grouper", "source", "pacer: closed and reopened slots")
    graph.link("sampler", "episodes", "turns")
    return graph

"""The trainer: accumulates groups as they arrive, steps the optimizer once per step's slots, publishes and saves.

Knows the learner's interface, not its maths. A stop request is heard between two device calls: what the current step
had accumulated is given up (its slots are open in the checkpoint and are played again), the last step is saved.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import trio
from msgspec import Struct

from trouper.actors.accelerator import Accelerator
from trouper.actors.account import BARRIER, DATA, DISK, NOT_TIMED, DeviceTime
from trouper.actors.ledger import Ledger
from trouper.actors.metrics import Recorder, step_metrics
from trouper.actors.pacer import Pacer
from trouper.actors.source import Source, SourcePosition
from trouper.actors.trace import flow_of
from trouper.channels import Group, HopelessRun, NumericsError, Receiver, Sender, Weights
from trouper.learner.profile import StepProfile


class PolicyLearner(Protocol):
    """What the trainer needs of `trouper.learner.learner.Learner`."""

    def add(self, groups: Sequence[Group]) -> None:
        """Accumulate the gradient of some groups."""

    def update(self) -> dict[str, float]:
        """Take the optimizer step; metrics."""

    def warm_up(self) -> None:
        """Compile every shape."""

    def state_tree(self) -> Any:
        """Everything a checkpoint has to hold."""


class CheckpointFolder(Protocol):
    """What the trainer needs of `trouper.learner.checkpoint.Checkpoints`."""

    def save(self, step: int, tree: Any, meta: dict[str, Any], score: float | None) -> None:
        """Write a step; may go on in the background."""

    def wait(self) -> None:
        """Until nothing goes on in the background."""

    def rate(self, step: int, score: float) -> None:
        """Give a complete step its score afterwards."""

    def latest(self) -> int | None:
        """The newest step that is complete."""


class CheckpointMeta(Struct, frozen=True):
    """The JSON item of a checkpoint, written in the same commit as the arrays.

    Attributes:
        step: steps of the training order that are done.
        life: which life of the learner wrote it.
        source: where the tasks stand.
    """

    step: int
    life: int
    source: SourcePosition


def rate_checkpoints(checkpoints: CheckpointFolder, recorder: Recorder, metric: str) -> None:
    """Rate checkpoints by the evaluations of their weights, which come after they were saved."""
    for step in list(recorder.evaluated):
        if metric in (numbers := recorder.evaluated.pop(step)):
            checkpoints.rate(step, numbers[metric])


class Trainer:
    """One learner as an actor.

    Args:
        learner: does the maths.
        publish: a copy of the parameters in the sampler's dtype, which no later step donates, and its checksum.
        accelerator: where its calls run.
        pacer: says how many groups a step has.
        source: says which slots are open, for checkpoints.
        checkpoints: where to save.
        ledger: is told what checkpoints hold.
        disk: where the ledger's calls run.
        recorder: takes the metrics.
        gauges: numbers of the other actors, read once per step.
        weights: of the life's beginning; its step number says how many steps are done already.
        weight_sync_steps: steps between two publications.
        save_interval_steps: steps between two saves; 0 saves only at the end.
        mask_truncated: train nothing on episodes that were cut short.
        drop_last: leave out a last step that is short of groups.
        max_empty_steps: steps in a row without anything to train before the run is called hopeless.
        best_metric: by which checkpoints are compared.
        profile: traces chosen steps.
        time: told what the device is at.
    """

    def __init__(
        self,
        learner: PolicyLearner,
        publish: Callable[[], tuple[Any, int]],
        accelerator: Accelerator,
        pacer: Pacer,
        source: Source,
        checkpoints: CheckpointFolder,
        ledger: Ledger,
        disk: Accelerator,
        recorder: Recorder,
        *,
        gauges: Callable[[], Mapping[str, float]],
        weights: Weights,
        weight_sync_steps: int,
        save_interval_steps: int,
        mask_truncated: bool,
        drop_last: bool,
        max_empty_steps: int,
        best_metric: str,
        profile: StepProfile | None = None,
        time: DeviceTime = NOT_TIMED,
    ) -> None:
        self.step = weights.step
        self._learner = learner
        self._copy = publish
        self._accelerator = accelerator
        self._pacer = pacer
        self._source = source
        self._checkpoints = checkpoints
        self._ledger = ledger
        self._disk = disk
        self._recorder = recorder
        self._gauges = gauges
        self._life = weights.life
        self._weight_sync_steps = weight_sync_steps
        self._save_interval_steps = save_interval_steps
        self._mask_truncated = mask_truncated
        self._drop_last = drop_last
        self._max_empty_steps = max_empty_steps
        self._best_metric = best_metric
        self._profile = profile
        self._time = time
        self._saved = self._published = weights.step
        # A copy of the present parameters, if there is one: steps without training publish it again.
        self._copied: tuple[Any, int] | None = (weights.params, weights.checksum)
        self._empty_steps = 0
        self._interruptible = trio.CancelScope()
        self._stop = trio.Event()
        self._added = False
        self._metrics: Mapping[str, float] = {}  # of the last step
        self._step_started = 0.0
        self._seconds: dict[str, float] = {}

    async def run(
        self,
        inbox: Receiver[Group],
        outbox: Sender[Weights],
        stop: trio.Event,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Train until the data ends or a stop is asked for, and save."""
        with self._time.doing("compile"):
            await self._accelerator.run(self._learner.warm_up)
        self._stop = stop
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch)
            await self._train(inbox, outbox)
            nursery.cancel_scope.cancel()
        if self._profile is not None:
            await self._accelerator.run(self._profile.close)
        if self.step > self._saved:
            await self._save()
        with self._time.doing("checkpoint", step=self._saved):
            await self._accelerator.run(self._checkpoints.wait)

    async def _watch(self) -> None:
        await self._stop.wait()
        self._interruptible.cancel()

    async def _unless_stopped(self, wait: Callable[[], Any]) -> Any:
        """The result of a wait that a stop request cuts short; None when it did."""
        with trio.CancelScope() as self._interruptible:
            if not self._stop.is_set():
                return await wait()
        return None

    async def _compute(self, call: Callable[..., Any], *args: Any) -> Any:
        if self._profile is not None:
            call, args = self._profile.run, (self.step + 1, call, *args)
        return await self._accelerator.run(call, *args)

    async def _train(self, inbox: Receiver[Group], outbox: Sender[Weights]) -> None:
        await self._publish(outbox)
        self._begin_step()
        hand: list[Group] = []
        while not self._stop.is_set():
            with self._timed("trainer_wait"), self._time.doing(DATA):
                try:
                    group: Group | None = await self._unless_stopped(inbox.receive)
                except trio.EndOfChannel:
                    break
            if group is None:
                return
            hand.append(group)
            trained = self._trained(group)
            if any(episode.reward is not None and episode.sampled for episode in trained.episodes):
                self._added = True
                with self._timed("train"), self._time.doing("micro-batch", _flows([group]), slot=group.slot):
                    await self._compute(self._learner.add, [trained])
            if len(hand) == self._pacer.size(self.step) and not self._is_short(hand):
                await self._finish_step(hand, outbox)
                hand = []
        if hand and not self._stop.is_set():
            if self._drop_last:
                self._recorder.note(
                    f"the data ended with {len(hand)} of {self._pacer.groups_per_step} groups for step "
                    f"{self.step + 1}; train.drop_last leaves them out"
                )
            else:
                await self._finish_step(hand, outbox)
        if self.step > self._published:  # the last weights are evaluated, whatever weight_sync_steps is
            await self._publish(outbox)

    def _is_short(self, hand: list[Group]) -> bool:
        return self._drop_last and len(hand) < self._pacer.groups_per_step

    def _trained(self, group: Group) -> Group:
        for episode in group.episodes:
            if episode.sampled_digest and episode.digest() != episode.sampled_digest:
                raise NumericsError(
                    f"episode {episode.attempt.id}: the ids in its rows are not the ids that were sampled; an actor "
                    "between sampler and trainer changed them, and must leave rows as they are"
                )
        if not self._mask_truncated:
            return group
        whole = [index for index, episode in enumerate(group.episodes) if episode.status == "done"]
        episodes = tuple(group.episodes[index] for index in whole)
        return msgspec.structs.replace(group, episodes=episodes, advantages=group.advantages[whole])

    async def _finish_step(self, hand: list[Group], outbox: Sender[Weights]) -> None:
        metrics = step_metrics(hand, self.step)
        if self._added:
            with self._timed("train"), self._time.doing("optimizer step", _flows(hand), step=self.step + 1):
                metrics |= await self._compute(self._learner.update)
            self._empty_steps = 0
            self._copied = None
        else:
            self._count_empty(hand)
        self._metrics = metrics
        self.step += 1
        self._source.forget(self.step * self._pacer.groups_per_step)
        if self.step % self._weight_sync_steps == 0:
            with self._timed("publish"):
                await self._publish(outbox)
        now = trio.current_time()
        metrics |= {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        metrics |= {"time/step": now - self._step_started, **self._gauges()}
        self._recorder.record(self.step, metrics)
        for group in hand:
            self._recorder.episodes(self.step, group)
        self._begin_step()
        # After the record, so that no step is committed that nobody can read of; its time is the next step's.
        if self._save_interval_steps and self.step % self._save_interval_steps == 0:
            with self._timed("checkpoint"):
                await self._save()

    def _count_empty(self, hand: list[Group]) -> None:
        self._empty_steps += 1
        if self._empty_steps >= self._max_empty_steps:
            reasons = ", ".join(
                sorted({group.void or "every episode was cut short or has no reward" for group in hand})
            )
            raise HopelessRun(
                f"{self._empty_steps} steps in a row had nothing to learn from ({reasons}); train.max_empty_steps "
                "allows no more. The log names what was lost and why"
            )

    async def _publish(self, outbox: Sender[Weights]) -> None:
        if self._copied is None:
            with self._time.doing("copy weights", step=self.step):
                self._copied = await self._accelerator.run(self._copy)
        params, checksum = self._copied
        self._published = self.step
        weights = Weights(life=self._life, step=self.step, params=params, checksum=checksum)
        with self._time.doing(BARRIER):
            await self._unless_stopped(lambda: outbox.send(weights))

    async def _save(self) -> None:
        # The source is asked here, in its own thread: it goes on while the device thread writes.
        source = self._source.position(self.step * self._pacer.groups_per_step)
        meta = CheckpointMeta(step=self.step, life=self._life, source=source)
        score = self._metrics.get(self._best_metric)
        with self._time.doing("checkpoint", step=self.step):
            committed = await self._accelerator.run(self._write, meta, score)
        self._saved = self.step
        if committed is not None:
            with self._time.doing(DISK):
                await self._disk.run(self._ledger.prune, committed * self._pacer.groups_per_step)

    def _write(self, meta: CheckpointMeta, score: float | None) -> int | None:
        rate_checkpoints(self._checkpoints, self._recorder, self._best_metric)
        self._ledger.sync()  # a resume takes the ledger's word on slots, so it must not be the older one
        self._checkpoints.save(meta.step, self._learner.state_tree(), msgspec.to_builtins(meta), score)
        return self._checkpoints.latest()

    def _begin_step(self) -> None:
        self._step_started = trio.current_time()
        self._added = False
        self._seconds = {}

    def _timed(self, name: str) -> "_Timer":
        return _Timer(self._seconds, name)


def _flows(groups: Sequence[Group]) -> list[int]:
    return [flow_of(episode.attempt) for group in groups for episode in group.episodes]


class _Timer:
    """Adds the time spent inside to a named sum."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._started = trio.current_time()

    def __exit__(self, *exc: object) -> None:
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + trio.current_time() - self._started

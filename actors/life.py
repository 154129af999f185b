"""One life of the learning: what begins together at a checkpoint, and ends together when any of it fails.

Pacer, source, grouper and trainer know of each other what no message says: which slots are open, which step is next.
So they are made anew together, at the start of a process as after a failure inside it: there is one way to resume.
"""

from collections.abc import Callable, Mapping
from typing import Any

from trouper.actors.accelerator import Accelerator
from trouper.actors.account import DeviceTime
from trouper.actors.config import RunConfig
from trouper.actors.grouper import Grouper
from trouper.actors.ledger import Ledger
from trouper.actors.metrics import Recorder
from trouper.actors.pacer import Pacer
from trouper.actors.quarantine import Quarantine
from trouper.actors.redo import Resumed
from trouper.actors.source import Source
from trouper.actors.trainer import CheckpointFolder, PolicyLearner, Trainer
from trouper.channels import Weights
from trouper.envs import Tasks
from trouper.learner.profile import StepProfile


class Life:
    """The learning domain's objects.

    Args:
        config: the whole configuration.
        tasks: the stream to train on.
        learner: holds the parameters of the step that the life begins with.
        publish: a copy of them for the samplers, and its checksum.
        device: where the learner's calls run.
        disk: where the ledger's calls run.
        ledger: has begun this life.
        checkpoints: where to save.
        recorder: takes metrics and notes.
        gauges: numbers of the other actors.
        weights: the first ones.
        resumed: what earlier lives left.
        profile: traces chosen steps.
        time: told what the learner's device is at.
    """

    def __init__(
        self,
        config: RunConfig,
        tasks: Tasks,
        learner: PolicyLearner,
        publish: Callable[[], tuple[Any, int]],
        device: Accelerator,
        disk: Accelerator,
        ledger: Ledger,
        checkpoints: CheckpointFolder,
        recorder: Recorder,
        gauges: Callable[[], Mapping[str, float]],
        weights: Weights,
        resumed: Resumed,
        profile: StepProfile | None,
        time: DeviceTime,
    ) -> None:
        rollout, train, sync = config.rollout, config.train, config.sync
        position = resumed.position
        self.number = weights.life

        def remember(task_id: str, cause: str) -> None:
            ledger.quarantine(task_id, cause)
            recorder.note(f"task {task_id!r} is not drawn any more: every member of its group was lost: {cause}")

        self.quarantine = Quarantine(rollout.quarantine_after, position.quarantined, remember)
        self.pacer = Pacer(
            groups_per_step=train.groups_per_step,
            max_staleness=rollout.max_staleness,
            max_steps=train.max_steps,
            max_redraws=rollout.max_redraws,
            weight_sync_steps=sync.weight_sync_steps,
            first_step=weights.step,
            attested=False,  # the trainer publishes them first of all
        )
        self.pacer.restore(
            {open_.slot: open_.redraws for open_ in position.open}, {group.slot for group in resumed.groups}
        )
        self.source = Source(
            tasks,
            self.pacer,
            self.quarantine,
            ledger,
            num_generations=rollout.num_generations,
            run_seed=config.run.seed,
            resumed=position,
        )
        self.grouper = Grouper(
            self.pacer,
            ledger,
            disk,
            self.quarantine,
            num_generations=rollout.num_generations,
            estimator=train.advantage_estimator,
            scale_rewards=train.scale_rewards,
            lost_members=rollout.lost_members,
            min_members=rollout.min_members,
            dynamic_sampling=rollout.dynamic_sampling,
            drop_late=self.source if rollout.on_late == "drop" else None,
            redo=resumed.groups,
            track=recorder.trace.track("grouper"),
        )
        self.trainer = Trainer(
            learner,
            publish,
            device,
            self.pacer,
            self.source,
            checkpoints,
            ledger,
            disk,
            recorder,
            gauges=gauges,
            weights=weights,
            weight_sync_steps=sync.weight_sync_steps,
            save_interval_steps=config.checkpoint.save_interval_steps,
            mask_truncated=rollout.mask_truncated,
            drop_last=train.drop_last,
            max_empty_steps=train.max_empty_steps,
            best_metric=config.checkpoint.best_metric,
            profile=profile,
            time=time,
        )

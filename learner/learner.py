"""The learner: takes groups as they arrive, and gives one training step's parameters and metrics. Knows no Trio.

It owns parameters and optimizer state. Every call belongs on the one thread that drives its devices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from numpy.typing import NDArray

from trouper.channels import CheckpointError, ConfigError, Group, NumericsError
from trouper.learner.advantage import ScaleRewards, scored, step_scale
from trouper.learner.batch import BatchConfig, MicroBatch, Packer, Sample, check_row, empty_micro_batch
from trouper.learner.decoder import Decoder, check_token_ids
from trouper.learner.loss import LossConfig, denominator, token_weight
from trouper.learner.mesh import MeshConfig, make_mesh
from trouper.learner.optimizer import OptimizerConfig, learning_rate, make_optimizer
from trouper.learner.step import Step, StepReport


@functools.partial(jax.jit, static_argnames="dtype")
def _fresh(arrays: Sequence[ArrayLike], dtype: np.dtype[Any] | None) -> list[jax.Array]:
    return [jnp.array(a, dtype, copy=True) for a in arrays]


def _copied(arrays: Sequence[ArrayLike], to: Any, dtype: Any = None) -> list[jax.Array]:
    """Buffers of our own, safe to donate, or safe from donation.

    `device_put` alone is not: it shares buffers with its source wherever they lie right already, and with more than one
    device it does so even under `may_alias=False`. A compiled copy shares nothing.
    """
    fresh = _fresh(list(arrays), None if dtype is None else np.dtype(dtype))
    placed: list[jax.Array] = jax.device_put(fresh, to)
    return placed


class Learner:
    """Policy optimisation over groups.

    Args:
        decoder: the model to train. Its arrays are copied; drop it to free its memory.
        loss: the loss.
        optimizer: optimizer and schedule.
        batch: shapes of the micro-batches.
        mesh: how parameters and rows are spread over devices.
        devices: those to use; None means all that JAX sees, as many of them as the mesh takes.
        num_iterations: optimizer steps on each step's data; above 1 the ratio is taken against the log-probs at step
            start, and the whole step is needed before the first gradient.
        scale_rewards: `batch` divides the groups' centred advantages by the standard deviation over the step, which
            needs the whole step too; anything else has been done when the group was made.
        vocab_limit: number of ids the tokenizer knows, where the embedding table has more rows.
        reference: parameters for the KL term, in the order of `params`; None means those of `decoder`. Only used
            with `beta > 0`.

    Raises:
        ConfigError: the mesh, the batch and the devices do not fit together.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        batch: BatchConfig,
        mesh: MeshConfig | None = None,
        devices: Sequence[jax.Device] | None = None,
        num_iterations: int = 1,
        scale_rewards: ScaleRewards = "none",
        vocab_limit: int | None = None,
        reference: Sequence[jax.Array] | None = None,
    ) -> None:
        mesh = MeshConfig() if mesh is None else mesh
        if num_iterations < 1:
            raise ConfigError(f"num_iterations = {num_iterations}; it must be 1 or more")
        shares = mesh.data * mesh.fsdp
        if batch.micro_batch_size % shares:
            raise ConfigError(
                f"micro_batch_size = {batch.micro_batch_size} packed rows cannot be shared out over data={mesh.data} x "
                f"fsdp={mesh.fsdp} = {shares} devices; make it a multiple of {shares}"
            )
        self._vocabulary = decoder.config.vocab_size
        self._loss = loss
        self._batch = batch
        self._num_iterations = num_iterations
        self._scale_by_step = scale_rewards == "batch"
        self._learning_rate = learning_rate(optimizer)
        self._compiled = Step(
            decoder,
            loss=loss,
            optimizer=make_optimizer(optimizer),
            mesh=make_mesh(mesh, devices),
            vocab_limit=vocab_limit,
        )
        given = jax.tree.leaves(nnx.state(decoder))
        self._reference: list[jax.Array] | None = None
        if loss.beta > 0:
            source = given if reference is None else list(reference)
            self._reference = _copied(source, self._compiled.param_shardings)
        self.begin(decoder)

    def begin(self, decoder: Decoder) -> None:
        """Start over from a model of the same shape; what was compiled, and the reference, stay."""
        self.params = _copied(jax.tree.leaves(nnx.state(decoder)), self._compiled.param_shardings)
        self._moments = self._compiled.init_optimizer()
        self._totals = self._compiled.start()
        self.step = 0
        self._optimizer_steps = 0
        self._begin_step()

    @property
    def streams(self) -> bool:
        """Whether `add` computes gradients at once; otherwise it collects, and `update` does all the work."""
        return self._num_iterations == 1 and not self._scale_by_step

    def add(self, groups: Sequence[Group]) -> None:
        """Take groups of the coming step; void ones are ignored. Returns before the devices are done.

        Members without a reward, and without a sampled token, take no part in the loss. With `beta = 0` members with
        advantage 0 are counted in the denominator but not run: they have no gradient, and metrics over tokens (entropy,
        mismatch, clip fraction) do not cover them.

        Raises:
            ConfigError: a row is too long for the configured shapes, or was sampled in a way that cannot be trained.
            ModelError: a row holds an id that is no row of the embedding table.
            NumericsError: an advantage, or a sampler's log-prob of a trained token, is not finite.
        """
        alive = [group for group in groups if group.void is None]
        # Everything is checked before anything is taken: an error leaves the step as it was.
        for group in alive:
            if not np.isfinite(group.advantages).all():
                raise NumericsError(f"slot {group.slot} has advantages {group.advantages.tolist()}; all must be finite")
            for episode in group.episodes:
                for number, row in enumerate(episode.rows):
                    if row.sampled:
                        check_token_ids(row.tokens, self._vocabulary)
                        check_row(self._batch, row, f"slot {group.slot}, attempt {episode.attempt.id}, row {number}")
        if not self.streams:
            self._collected += alive
            return
        for group in alive:
            self._packer.add(self._samples(group, group.advantages))
            for batch in self._packer.full():
                self._accumulate(self._place(batch))

    def update(self) -> dict[str, float]:
        """End the step: what was added since the last call is trained on, and `step` grows by one.

        A step without any gradient (no trained token, or every advantage 0 and `beta = 0`) leaves parameters, momentum
        and schedule as they are: even a zero gradient would move weights through momentum and weight decay.

        Returns:
            Metrics: `loss`, `grad_norm`, `learning_rate`, `tokens` (trained, the denominator's), `entropy`,
            `pg_clipfrac`, `mismatch/kl`, `mismatch/is_ratio_max`, `mismatch/abs_max`, `batch/padding` (fraction of the
            packed rows), and with `beta > 0` `kl`. Means over optimizer steps where there are several.

        Raises:
            NumericsError: a log-prob, the loss or the gradient is not finite. Parameters are those before the step.
        """
        if self.streams:
            for batch in self._packer.rest():
                self._accumulate(self._place(batch))
            reports = [self._apply(self._denominator)] if self._packer.slots else []
        else:
            reports = self._train_collected()
        metrics = self._metrics(reports)
        self.step += 1
        self._begin_step()
        return metrics

    def warm_up(self) -> None:
        """Compile every shape that training can need, and change nothing. Call it before the first `add`."""
        for width, trained in self._batch.shapes:
            self._accumulate(self._place(empty_micro_batch(self._batch.micro_batch_size, width, trained)))
        jax.device_get(self._apply(by=0))

    def copy_params(
        self, dtype: jnp.dtype | type | None = None, device: jax.Device | jax.sharding.Sharding | None = None
    ) -> list[jax.Array]:
        """A copy that no later step donates, in the order of `params`.

        Args:
            dtype: the sampler's; None keeps the parameters'.
            device: where the sampler wants it; None leaves each array where it lies.
        """
        return _copied(self.params, self._compiled.param_shardings if device is None else device, dtype)

    def state_tree(self) -> dict[str, Any]:
        """All that a checkpoint must hold, arrays by name; the next `update` donates them. Also a restore template."""
        return {
            "params": dict(zip(self._compiled.names, self.params, strict=True)),
            "optimizer": dict(self._named_moments()),
            "step": np.asarray(self.step, np.int32),
            "optimizer_steps": np.asarray(self._optimizer_steps, np.int32),
        }

    def load_state_tree(self, tree: dict[str, Any]) -> None:
        """Go on from a checkpoint's arrays; what was added and not yet trained on is dropped.

        Raises:
            CheckpointError: an array is missing, unknown, or of another shape.
        """
        wanted = self.state_tree()
        for part in ("params", "optimizer"):
            given = tree.get(part, {})
            differing = sorted(wanted[part].keys() ^ given.keys())
            differing += [n for n in wanted[part] if n in given and wanted[part][n].shape != given[n].shape]
            if differing:
                raise CheckpointError(
                    f"the checkpoint's {part} do not fit this model and optimizer: {len(differing)} arrays are "
                    f"missing, unknown or of another shape, first {differing[0]!r}; resume with the configuration "
                    "that wrote it"
                )
        params = [tree["params"][name] for name in self._compiled.names]
        self.params = _copied(params, self._compiled.param_shardings)
        moments = [tree["optimizer"][name] for name, _ in self._named_moments()]
        structure = jax.tree.structure(self._moments)
        owned = _copied(moments, jax.tree.leaves(self._compiled.optimizer_shardings))
        self._moments = jax.tree.unflatten(structure, owned)
        self._totals = self._compiled.start()
        self.step = int(tree["step"])
        self._optimizer_steps = int(tree["optimizer_steps"])
        self._begin_step()

    def _named_moments(self) -> list[tuple[str, jax.Array]]:
        leaves = jax.tree_util.tree_leaves_with_path(self._moments)
        return [(jax.tree_util.keystr(path, simple=True, separator="/"), array) for path, array in leaves]

    def _begin_step(self) -> None:
        self._packer = Packer(self._batch)
        self._collected: list[Group] = []
        self._tokens = 0
        self._episodes = 0

    def _samples(self, group: Group, advantages: NDArray[np.float32]) -> list[Sample]:
        """The rows to run, their weights set; counts the group's share of the denominator."""
        samples: list[Sample] = []
        rewarded = scored([episode.reward for episode in group.episodes])
        for episode, advantage, has_reward in zip(group.episodes, advantages, rewarded, strict=True):
            tokens = episode.sampled
            if not has_reward or not tokens:
                continue
            self._tokens += tokens
            self._episodes += 1
            if advantage == 0 and self._loss.beta == 0:
                continue
            weight = token_weight(self._loss, tokens)
            samples += [Sample(row, float(advantage), weight) for row in episode.rows if row.sampled]
        return samples

    def _place(self, batch: MicroBatch) -> tuple[MicroBatch, jax.Array | None, jax.Array | None]:
        """The micro-batch on the devices; with log-probs at step start and of the reference where they are needed."""
        placed = self._compiled.place(batch)
        old = self._compiled.logprobs(self.params, placed) if self._num_iterations > 1 else None
        reference = None if self._reference is None else self._compiled.logprobs(self._reference, placed)
        return placed, old, reference

    def _accumulate(self, placed: tuple[MicroBatch, jax.Array | None, jax.Array | None]) -> None:
        self._totals = self._compiled.accumulate(self.params, self._totals, *placed)

    @property
    def _denominator(self) -> int:
        return denominator(self._loss, self._tokens, self._episodes)

    def _apply(self, by: int) -> StepReport:
        report: StepReport
        self.params, self._moments, self._totals, report = self._compiled.apply(
            self.params, self._moments, self._totals, np.float32(by)
        )
        return report

    def _train_collected(self) -> list[StepReport]:
        scale = 1.0
        if self._scale_by_step:
            scale = step_scale(
                [group.advantages for group in self._collected],
                [scored([episode.reward for episode in group.episodes]) for group in self._collected],
            )
        for group in self._collected:
            self._packer.add(self._samples(group, group.advantages / np.float32(scale)))
        batches = [self._place(batch) for batch in self._packer.rest()]
        reports: list[StepReport] = []
        for _ in range(self._num_iterations if batches else 0):
            for batch in batches:
                self._accumulate(batch)
            reports.append(self._apply(self._denominator))
        return reports

    def _metrics(self, reports: Sequence[StepReport]) -> dict[str, float]:
        rate = float(self._learning_rate(self._optimizer_steps))
        metrics = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate, "tokens": float(self._tokens)}
        if not reports:
            return metrics
        # The one host synchronisation of the step.
        on_host: list[StepReport] = jax.device_get(list(reports))
        taken = sum(int(report.applied) for report in on_host)
        self._optimizer_steps += taken
        if taken < len(on_host):
            bad = next(report for report in on_host if not report.applied)
            self._begin_step()
            raise NumericsError(
                f"step {self.step}: {int(bad.sums.nonfinite)} of {int(bad.sums.tokens)} trained tokens have a log-prob "
                f"that is not finite, loss {float(bad.sums.loss)}, gradient norm {float(bad.grad_norm)}; the optimizer "
                "step was not taken. Look at the learning rate and max_grad_norm, then at compute_dtype"
            )
        sums = [report.sums for report in on_host]
        per_token = float(sums[0].tokens) * len(sums)
        metrics["loss"] = sum(float(s.loss) for s in sums) / (self._denominator * len(sums))
        metrics["grad_norm"] = sum(float(report.grad_norm) for report in on_host) / len(on_host)
        metrics["entropy"] = sum(float(s.entropy) for s in sums) / per_token
        metrics["pg_clipfrac"] = sum(float(s.clipped) for s in sums) / per_token
        metrics["mismatch/kl"] = sum(float(s.mismatch_kl) for s in sums) / per_token
        metrics["mismatch/is_ratio_max"] = max(float(report.maxima.is_ratio) for report in on_host)
        metrics["mismatch/abs_max"] = max(float(report.maxima.mismatch) for report in on_host)
        metrics["batch/padding"] = 1 - self._packer.tokens / self._packer.slots
        if self._loss.beta > 0:
            metrics["kl"] = sum(float(s.kl) for s in sums) / per_token
        return metrics

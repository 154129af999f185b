"""The optimizer, from a configuration to an optax transformation. Knows no model and no mesh."""

from typing import Any, Literal

import jax
import optax
from msgspec import Struct


class OptimizerConfig(Struct, frozen=True, kw_only=True):
    """Optimizer and learning-rate schedule; a step of the schedule is an optimizer step.

    Attributes:
        name: `adamw`, `adam` or plain `sgd`.
        learning_rate: the peak.
        schedule: what happens after the warm-up.
        warmup_steps: the rate rises linearly from 0 over this many steps, and first reaches the peak after them.
        decay_steps: steps from the first one to the end of the decay, warm-up included; needed unless constant.
        end_fraction: the decay ends at this fraction of the peak and stays there.
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: `adamw` only, per unit of learning rate; matrices decay, biases and norms do not.
        max_grad_norm: gradients above this global norm are scaled down to it; 0 leaves them as they are.
    """

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    end_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate = {self.learning_rate}; it must be above 0")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps = {self.warmup_steps}; it must be 0 or more")
        if self.schedule != "constant" and (self.decay_steps is None or self.decay_steps <= self.warmup_steps):
            raise ValueError(
                f'schedule = "{self.schedule}" with decay_steps = {self.decay_steps} and warmup_steps = '
                f"{self.warmup_steps}; decay_steps counts the warm-up and must be greater"
            )
        if not 0 <= self.end_fraction <= 1:
            raise ValueError(f"end_fraction = {self.end_fraction}; it is a fraction of learning_rate, in [0, 1]")
        if self.weight_decay and self.name != "adamw":
            raise ValueError(
                f'weight_decay = {self.weight_decay} with name = "{self.name}"; only adamw decays weights: '
                "use it, or set weight_decay to 0"
            )
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm = {self.max_grad_norm}; it must be 0, which is off, or more")


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """The learning rate as a function of the number of optimizer steps already taken."""
    peak, end = config.learning_rate, config.learning_rate * config.end_fraction
    after: optax.Schedule
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        assert config.decay_steps is not None  # OptimizerConfig refuses to be made without it
        steps = config.decay_steps - config.warmup_steps
        if config.schedule == "linear":
            after = optax.linear_schedule(peak, end, steps)
        else:
            after = optax.cosine_decay_schedule(peak, steps, alpha=config.end_fraction)
    if not config.warmup_steps:
        return after
    rise = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([rise, after], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The transformation: clip by global norm, then the optimizer's rule with its schedule."""

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    schedule = learning_rate(config)
    rule: optax.GradientTransformation
    if config.name == "sgd":
        rule = optax.sgd(schedule)
    elif config.name == "adam":
        rule = optax.adam(schedule, b1=config.b1, b2=config.b2, eps=config.eps)
    else:
        rule = optax.adamw(
            schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay, mask=matrices
        )
    clip = optax.clip_by_global_norm(config.max_grad_norm) if config.max_grad_norm else optax.identity()
    return optax.chain(clip, rule)  # in one form, so that a resumed run may change or drop the limit

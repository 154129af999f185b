"""What follows from a configuration before anything starts: impossible combinations, and derived numbers.

Pure: reads no file, loads no model, counts no devices. Ranges and contradictions are refused with the arithmetic, all
in one message; what is merely odd becomes a remark.
"""

import math
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from trouper.actors.config import RunConfig
from trouper.actors.config_file import flatten
from trouper.actors.memory import (
    EpisodeSize,
    Limits,
    Memory,
    Place,
    count_parameters,
    episode_size,
    limits,
    memory,
    places,
    size_text,
)
from trouper.channels import ConfigError
from trouper.learner.mesh import misfits
from trouper.learner.model_config import ModelConfig

_AT_LEAST = {
    "tasks.epochs": 1,
    "sampling.top_k": 0,
    "sampling.max_prompt_tokens": 1,
    "sampling.max_response_tokens": 1,
    "sampling.max_turns": 1,
    "sampling.max_context_tokens": 2,
    "engine.slots": 1,
    "engine.chunk": 1,
    "engine.prefill_rows": 1,
    "engine.prefill_tokens": 1,
    "rollout.num_generations": 2,
    "rollout.max_concurrency": 1,
    "rollout.max_staleness": 0,
    "rollout.max_attempts": 1,
    "rollout.min_members": 2,
    "rollout.max_redraws": 0,
    "rollout.max_consecutive_lost": 1,
    "environment.max_abandoned_threads": 0,
    "environment.restart_backoff": 0,
    "train.max_steps": 0,
    "train.groups_per_step": 1,
    "train.micro_batch_size": 1,
    "train.row_tokens": 0,
    "train.num_iterations": 1,
    "train.max_empty_steps": 1,
    "sync.weight_sync_steps": 1,
    "evaluation.every_steps": 0,
    "evaluation.count": 1,
    "evaluation.samples": 1,
    "evaluation.temperature": 0,
    "evaluation.max_concurrency": 1,
    "checkpoint.save_interval_steps": 0,
    "checkpoint.max_to_keep": 1,
    "log.episodes_per_step": 0,
}

_WHY = {
    "rollout.num_generations": "an advantage compares a member with the rest of its group",
    "rollout.min_members": "a group of one has nothing to compare with",
}

_ABOVE_ZERO = (
    "sampling.temperature",
    "sampling.top_p",
    "environment.create_timeout",
    "environment.reset_timeout",
    "environment.step_timeout",
    "environment.reward_timeout",
    "environment.close_timeout",
    "environment.restart_backoff_max",
    "rollout.episode_timeout",
    "rollout.max_lost_fraction",
    "sync.drain_timeout",
    "sync.timeout",
)

_AT_MOST_ONE = ("sampling.top_p", "rollout.max_lost_fraction")


class Plan(Struct, frozen=True, kw_only=True):
    """Numbers that follow from a configuration.

    Attributes:
        episodes_per_step: members of all groups of a step.
        max_in_flight: episodes that the pacer admits at the same time, running, waiting or grouped.
        concurrency: episodes that can really run at the same time.
        limited_by: the key that limits `concurrency`.
        staleness_bound: age in steps that no trained token exceeds.
        streaming: gradients of early groups are computed while later ones are still played.
        streaming_reason: why not, where not.
        steps: optimizer steps, where that is known.
        evaluations: how often held-out tasks are tried, where that is known.
        parameters: of the model, where its shape is known.
        episode: the largest one.
        limits: how many of each thing there can be at the same time.
        memory: what is held at worst; of the devices' part nothing where the model's shape is not known.
        places: numbers of the devices, by where memory may be on them.
        remarks: what is allowed but odd.
    """

    episodes_per_step: int
    max_in_flight: int
    concurrency: int
    limited_by: str
    staleness_bound: int
    streaming: bool
    streaming_reason: str
    steps: int | None
    evaluations: int | None
    parameters: int | None
    episode: EpisodeSize
    limits: Limits
    memory: tuple[Memory, ...]
    places: dict[Place, tuple[int, ...]]
    remarks: tuple[str, ...]

    def total_bytes(self, where: Place, *, restart: bool = False) -> int:
        """Sum of the parts of `memory` that lie there: all through a run, or what comes on top after a restart."""
        return sum(part.bytes for part in self.memory if part.where == where and part.restart == restart)

    def render(self) -> str:
        """Readable text, one number a line."""
        lines = [
            f"steps               {'until the data ends' if self.steps is None else f'{self.steps:,}'}",
            f"episodes per step   {self.episodes_per_step:,}",
            f"episodes in flight  at most {self.max_in_flight:,}",
            f"episodes at once    {self.concurrency:,}, limited by {self.limited_by}",
            f"staleness           at most {self.staleness_bound} step{'' if self.staleness_bound == 1 else 's'}",
            f"streaming           {'on' if self.streaming else f'off: {self.streaming_reason}'}",
        ]
        if self.evaluations is not None:
            lines.append(f"evaluations         {self.evaluations:,}")
        if self.parameters is not None:
            lines.append(f"parameters          {self.parameters:,}")
        limit = self.limits
        lines += [
            f"an episode          at most {size_text(self.episode.bytes)}: {self.episode.describe()}",
            f"episodes wait       never more than {limit.episodes:,}: {limit.tasks:,} in tasks, {limit.played:,} in "
            f"slots, {limit.outcomes:,} in episodes, {limit.open_groups:,} open and {limit.ready_groups:,} complete "
            f"groups, {limit.groups:,} in groups, {limit.hand:,} in the trainer's hand",
        ]
        lines += self._render_memory("host", "the process as it starts, JAX and compiled programs")
        if self.parameters is None:
            lines.append("memory on devices   known when the model's config.json is here")
        else:
            for where in self.places:
                lines += self._render_memory(where, "activations")
        lines += [f"note: {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def _render_memory(self, where: Place, besides: str) -> Iterator[str]:
        total = size_text(self.total_bytes(where))
        after = size_text(self.total_bytes(where, restart=True))
        title = "memory " + {"host": "on the host", "device": "on devices"}.get(where, f"for {where}")
        numbers = self.places.get(where, ())
        if numbers and (where, numbers) != ("device", (0,)):
            each = f", {size_text(self.total_bytes(where) // len(numbers))} each," if len(numbers) > 1 else ""
            total += f" on device{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}{each}"
        yield f"{title:<20}at most {total} besides {besides}; {after} more after a restart"
        for part in self.memory:
            if part.where == where:
                name = f"restart: {part.name}" if part.restart else part.name
                yield f"  {name:<41}{size_text(part.bytes):>10}  {part.how}"


def plan(config: RunConfig, model: ModelConfig | None = None, *, devices: int | None = None) -> Plan:
    """Refuse what cannot run, and derive what follows.

    Args:
        config: the whole configuration.
        model: the model's shape, where it is known.
        devices: accelerators there are, where they were counted.

    Raises:
        ConfigError: numbers out of range or combinations that cannot work; all of them, each with the arithmetic.
    """
    problems = [*_out_of_range(config), *_contradictions(config), *_misfits(config, model, devices)]
    if problems:
        raise ConfigError("this configuration cannot run:\n" + "\n".join(f"  {problem}" for problem in problems))
    rollout, train = config.rollout, config.train
    per_step = train.groups_per_step * rollout.num_generations
    limit = limits(config)
    in_flight = limit.episodes
    reasons = [
        *(['train.scale_rewards = "batch"'] if train.scale_rewards == "batch" else []),
        *([f"train.num_iterations = {train.num_iterations}"] if train.num_iterations > 1 else []),
    ]
    every = config.evaluation.every_steps
    return Plan(
        episodes_per_step=per_step,
        max_in_flight=in_flight,
        concurrency=limit.played,
        limited_by=(
            "rollout.max_concurrency"
            if rollout.max_concurrency < in_flight
            else f"rollout.max_staleness: ({rollout.max_staleness} + 1) x {train.groups_per_step} groups "
            f"x {rollout.num_generations}"
        ),
        staleness_bound=rollout.max_staleness,
        streaming=not reasons,
        streaming_reason=f"{' and '.join(reasons)} must see the whole step before the first gradient"
        if reasons
        else "",
        steps=train.max_steps,
        evaluations=train.max_steps // every if every and train.max_steps is not None else None,
        parameters=None if model is None else count_parameters(model),
        episode=episode_size(config),
        limits=limit,
        memory=memory(config, model),
        places=places(config),
        remarks=tuple(_remarks(config, in_flight)),
    )


def scratch_model(config: RunConfig, vocab_size: int) -> ModelConfig:
    """The shape that `[model.scratch]` asks for.

    Args:
        config: with `model.scratch`.
        vocab_size: ids of the chat format.

    Raises:
        ConfigError: sizes that no decoder can have.
    """
    return msgspec.convert({**(config.model.scratch or {}), "vocab_size": vocab_size}, ModelConfig)


def _out_of_range(config: RunConfig) -> Iterator[str]:
    values = {key: value for key, value in flatten(config).items() if isinstance(value, int | float)}
    for key, value in values.items():
        if key in _AT_LEAST and value < _AT_LEAST[key]:
            why = f": {_WHY[key]}" if key in _WHY else ""
            yield f"{key} = {value}, but it must be at least {_AT_LEAST[key]}{why}"
        if key in _ABOVE_ZERO and value <= 0:
            yield f"{key} = {value}, but it must be more than 0"
        if key in _AT_MOST_ONE and value > 1:
            yield f"{key} = {value}, but it must be at most 1"
    for index, weight in enumerate(config.reward.weights):
        if not math.isfinite(weight):
            yield f"reward.weights[{index}] = {weight}, but it must be finite"


def _contradictions(config: RunConfig) -> Iterator[str]:
    """Keys that contradict each other, whatever the model and the machine."""
    yield from _model_contradictions(config)
    sampling, rollout, train, sync = config.sampling, config.rollout, config.train, config.sync
    if (age := sync.weight_sync_steps - 1) > rollout.max_staleness:
        yield (
            f"sync.weight_sync_steps = {sync.weight_sync_steps} lets the samplers' weights grow "
            f"{sync.weight_sync_steps} - 1 = {age} steps old, more than rollout.max_staleness = "
            f"{rollout.max_staleness}: set max_staleness to {age} or more, or weight_sync_steps to "
            f"{rollout.max_staleness + 1} or less"
        )
    tokens = sampling.max_prompt_tokens + sampling.max_response_tokens
    if tokens > sampling.max_context_tokens:
        yield (
            f"sampling.max_prompt_tokens + sampling.max_response_tokens = {sampling.max_prompt_tokens} + "
            f"{sampling.max_response_tokens} = {tokens}, more than sampling.max_context_tokens = "
            f"{sampling.max_context_tokens}: one turn would not fit"
        )
    if 0 < train.row_tokens < sampling.max_context_tokens:
        yield (
            f"train.row_tokens = {train.row_tokens} is less than sampling.max_context_tokens = "
            f"{sampling.max_context_tokens}: a conversation would not fit in a row; raise it, or 0 derives it"
        )
    if rollout.lost_members == "shrink" and rollout.min_members > rollout.num_generations:
        yield (
            f"rollout.min_members = {rollout.min_members} is more than rollout.num_generations = "
            f"{rollout.num_generations}: no group could ever be kept"
        )
    if rollout.dynamic_sampling and rollout.max_redraws == 0:
        yield "rollout.dynamic_sampling = true needs rollout.max_redraws of at least 1: it is 0, so nothing is replaced"
    if (train.advantage_estimator, train.scale_rewards) == ("dr_grpo", "group"):
        yield (
            'train.advantage_estimator = "dr_grpo" is grpo without the division that train.scale_rewards = "group" '
            'asks for: set scale_rewards to "none" or "batch"'
        )
    if sync.mode == "drain" and sync.drain_timeout >= sync.timeout:
        yield (
            f"sync.drain_timeout = {sync.drain_timeout:g} s must be less than sync.timeout = {sync.timeout:g} s, which "
            "a sampler has for draining and attesting together"
        )
    functions, weights = len(config.reward.functions), len(config.reward.weights)
    if weights and weights != functions:
        yield f"reward.weights has {weights} entries and reward.functions {functions}: give one weight per function"
    if config.environment.restart_backoff > config.environment.restart_backoff_max:
        yield (
            f"environment.restart_backoff = {config.environment.restart_backoff} is more than "
            f"environment.restart_backoff_max = {config.environment.restart_backoff_max}"
        )
    yield from _evaluation_contradictions(config)
    steps = config.log.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        yield f"log.profile_steps = {list(steps)}; give the first and the last step to profile, as [3, 4], or []"


def _model_contradictions(config: RunConfig) -> Iterator[str]:
    model, chat = config.model, config.chat
    if (model.source is None) == (model.scratch is None):
        given = "neither" if model.source is None else "both"
        yield f"model.source or [model.scratch] says where the model comes from, and {given} is given: give exactly one"
    if chat.format == "plain":
        if not chat.alphabet:
            yield 'chat.format = "plain" needs chat.alphabet, the characters in id order'
        elif not chat.stop:
            yield 'chat.format = "plain" needs chat.stop, the character of the alphabet that ends a turn'
    else:
        if model.scratch is not None:
            yield (
                f'chat.format = "{chat.format}" needs a tokenizer, and a model from [model.scratch] has none: '
                'set chat.format = "plain" and chat.alphabet'
            )
        for name in ("alphabet", "stop"):
            if getattr(chat, name):
                yield f'chat.{name} belongs to chat.format = "plain", and the format is "{chat.format}"'


def _evaluation_contradictions(config: RunConfig) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation.every_steps > 0 and evaluation.tasks is None:
        yield f"evaluation.every_steps = {evaluation.every_steps} needs [evaluation.tasks]: held-out tasks to try"
    if evaluation.samples > 1 and evaluation.temperature == 0:
        yield (
            f"evaluation.samples = {evaluation.samples} with evaluation.temperature = 0: greedy samples are all the "
            "same; raise the temperature, or set samples = 1"
        )
    narrowed = [
        f"sampling.{name} = {getattr(config.sampling, name)}"
        for name, off in (("top_p", 1.0), ("top_k", 0))
        if getattr(config.sampling, name) != off
    ]
    if narrowed and (evaluation.every_steps == 0 or evaluation.temperature == 0):
        yield (
            f"{' and '.join(narrowed)} would change nothing: training keeps every token, and evaluation is "
            f"{'off' if evaluation.every_steps == 0 else 'greedy'}; leave it out"
        )


def _misfits(config: RunConfig, model: ModelConfig | None, devices: int | None) -> Iterator[str]:
    """What does not fit the mesh, the machine or the model."""
    mesh = config.mesh
    yield from misfits(mesh, config.placement, devices)
    shards = mesh.data * mesh.fsdp
    if config.train.micro_batch_size % shards:
        yield (
            f"train.micro_batch_size = {config.train.micro_batch_size} is not a multiple of mesh.data x mesh.fsdp = "
            f"{mesh.data} x {mesh.fsdp} = {shards}: rows are split evenly over those devices"
        )
    if model is None:
        return
    if config.sampling.max_context_tokens > model.max_position_embeddings:
        yield (
            f"sampling.max_context_tokens = {config.sampling.max_context_tokens} is more than the "
            f"{model.max_position_embeddings} positions the model was made for"
        )
    if config.chat.format == "plain" and len(config.chat.alphabet) > model.vocab_size:
        yield f"chat.alphabet has {len(config.chat.alphabet)} characters and the model {model.vocab_size} ids"
    splits = {f"mesh.tensor = {mesh.tensor}": mesh.tensor}
    if config.placement.apart:
        count = len(config.placement.sampler or ())
        splits[f"the number of placement.sampler's devices, {count},"] = count
    for name in ("num_attention_heads", "num_key_value_heads"):
        for split, parts in splits.items():
            if getattr(model, name) % parts:
                yield f"{split} does not divide the model's {name} = {getattr(model, name)}"


def _remarks(config: RunConfig, in_flight: int) -> Iterator[str]:
    rollout, evaluation, engine = config.rollout, config.evaluation, config.engine
    if rollout.max_concurrency > in_flight:
        yield (
            f"{rollout.max_concurrency - in_flight} of rollout.max_concurrency = {rollout.max_concurrency} episode "
            f"slots stay empty: no more than {in_flight} episodes are admitted"
        )
    talking = min(rollout.max_concurrency, in_flight) + (evaluation.max_concurrency if evaluation.every_steps else 0)
    if engine.slots > talking:
        yield f"{engine.slots - talking} of engine.slots = {engine.slots} stay empty: {talking} conversations at most"
    if (rollout.on_late, rollout.max_staleness) == ("drop", 0):
        yield 'rollout.on_late = "drop" drops nothing with rollout.max_staleness = 0: no group can be overtaken'
    if config.train.max_steps is None and config.tasks.epochs is None:
        yield "neither train.max_steps nor tasks.epochs is set: the run goes on until it is stopped or tasks end"
    if config.checkpoint.save_interval_steps == 0:
        yield "checkpoint.save_interval_steps = 0: a killed run trains every step again"
        if config.train.max_steps is None:
            yield "what a restart reads back grows with the run: all groups since its beginning; set an interval"

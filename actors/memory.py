"""Memory by contract: how many of each thing a run can hold, and their bytes at worst, from its configuration alone.

Two rules bound everything between source and optimizer: the pacer admits `max_staleness + 1` steps beyond the weights
that the samplers hold, and every other container is bounded by what was admitted or by a channel's capacity. So a slow
trainer stops the rollouts; it does not fill the memory.

Pure arithmetic, in bytes beyond the process's base: interpreter, imported modules, JAX and compiled programs. What user
code keeps for itself (environments, agents, task streams) is its own affair.
"""

import math
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from trouper.actors.config import RunConfig
from trouper.learner.model_config import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2}

TOKEN_BYTES = 4 + 1 + 4 + 4
"""Of a row: id, mask, log-prob and version."""

TURN_TOKEN_BYTES = 4 + 4 + 4
"""Of a sampled turn, until the episode's rows are made of it: id, log-prob and version."""

PACKED_TOKEN_BYTES = 4 * 4 + 6 * 4 + 1
"""Of a packed row, where every token may be trained: four numbers of a token, six and a mask of a trained one."""

TEXT_BYTES_PER_TOKEN = 16
"""Of text, where the tokenizer is not known: four characters, which Python stores in four bytes where one needs it."""

ROW_BYTES = 768
"""Python's objects around a row's numbers."""

MESSAGE_BYTES = 192
"""Python's objects around a message's text."""

EPISODE_BYTES = 4096
"""The rest of an episode: its attempt, a task of 1 kB, 16 metrics, timings."""

SLOT_BYTES = 24 * 1024
"""An episode slot with its tasks and scopes."""

THREAD_BYTES = 32 * 1024
"""A thread that calls an environment or a reward function; a slot has up to two, unless all is called inline."""

LONGEST_ROW = 2048
"""Most tokens of a packed row unless the configuration asks for more: attention costs the square of it."""

_FILE_BYTES = 16 * 1024
_POINT_BYTES = 128  # of the reward curve that the closing summary shows


class Limits(Struct, frozen=True, kw_only=True):
    """How many of each thing there can be at the same time.

    Attributes:
        slots: training slots that are admitted and not yet trained.
        episodes: members of those slots, wherever they are: in a channel, played, grouped, in the trainer's hand.
        held: episodes that are alive: those, the step that was trained and is being recorded, and what each slot and
            the grouper had in hand last, which their variables name until the next one comes.
        played: episode slots at work.
        tasks: attempts in the channel `tasks`.
        outcomes: episodes in the channel `episodes`.
        open_groups: groups in the grouper that wait for members.
        ready_groups: complete groups in the grouper that wait for their step.
        groups: groups in the channel `groups`.
        hand: groups that the trainer, and the learner for it, collects for a step.
        requests: requests in the channel of that name.
        weights: copies of the parameters for sampling: the sampler's, and those on the way to it.
        evaluated: outcomes of one evaluation.
        evaluating: episode slots of the evaluation at work.
        read_back: groups that a restart reads back; None where that grows with the run.
    """

    slots: int
    episodes: int
    held: int
    played: int
    tasks: int
    outcomes: int
    open_groups: int
    ready_groups: int
    groups: int
    hand: int
    requests: int
    weights: int
    evaluated: int
    evaluating: int
    read_back: int | None


def limits(config: RunConfig) -> Limits:
    """How many of each thing the configuration allows."""
    rollout, train, sync, evaluation = config.rollout, config.train, config.sync, config.evaluation
    steps_ahead = rollout.max_staleness + 1
    slots = steps_ahead * train.groups_per_step
    per_step = train.groups_per_step * rollout.num_generations
    episodes = slots * rollout.num_generations
    evaluated = evaluation.count * evaluation.samples if evaluation.every_steps else 0
    # The trainer is never further than `steps_ahead` beyond what is attested. One copy each is in the barrier's hand,
    # in the channel and in the trainer's, which waits to send it.
    unattested = min(3, math.ceil(steps_ahead / sync.weight_sync_steps))
    # A checkpoint is complete at the latest when the next one begins, so up to two intervals have to be done again.
    unsaved = 2 * config.checkpoint.save_interval_steps or train.max_steps
    if unsaved is not None and train.max_steps is not None:
        unsaved = min(unsaved, train.max_steps)
    return Limits(
        slots=slots,
        episodes=episodes,
        held=episodes + per_step + 1,
        played=min(rollout.max_concurrency, episodes),
        tasks=rollout.num_generations,
        outcomes=per_step,
        open_groups=slots,
        ready_groups=slots,
        groups=train.groups_per_step,
        hand=train.groups_per_step,
        requests=config.engine.slots,
        weights=1 + unattested,
        evaluated=evaluated,
        evaluating=min(evaluation.max_concurrency, evaluated),
        read_back=None if unsaved is None else (unsaved + steps_ahead) * train.groups_per_step,
    )


class EpisodeSize(Struct, frozen=True):
    """What one episode can hold.

    Attributes:
        rows: token records.
        tokens: of each row.
        messages: of the conversation.
        text: bytes of the messages' text. What the model never saw (an answer that came after the last turn, or did
            not fit) is counted as one more context; agents and environments can make it longer.
    """

    rows: int
    tokens: int
    messages: int
    text: int

    @property
    def bytes(self) -> int:
        """All together."""
        rows = self.rows * (ROW_BYTES + self.tokens * TOKEN_BYTES)
        return EPISODE_BYTES + rows + self.messages * MESSAGE_BYTES + self.text

    def describe(self) -> str:
        """The arithmetic."""
        return (
            f"{_count(self.rows, 'row')} x ({self.tokens:,} tokens x {TOKEN_BYTES} + {ROW_BYTES}) + {self.text:,} of "
            f"text in {self.messages} messages x {MESSAGE_BYTES} + {EPISODE_BYTES:,}"
        )


def episode_size(config: RunConfig) -> EpisodeSize:
    """The largest episode that the configuration allows."""
    sampling = config.sampling
    # A new row begins where the template rewrites earlier turns, or the agent does: those in trouper never do.
    template_forks = not config.chat.alphabet and config.chat.on_rewrite == "fork"
    forks = template_forks or not config.agent.name.startswith("trouper.envs.agents:")
    rows = sampling.max_turns if forks else 1
    text = (rows + 1) * sampling.max_context_tokens * _text_bytes(config.chat.alphabet)
    opening = 2 + len(config.agent.arguments.get("preamble", ()))
    return EpisodeSize(rows, sampling.max_context_tokens, opening + 2 * sampling.max_turns, text)


Place = Literal["host", "device", "trainer", "sampler"]
"""Where memory is: `device` means those that trainer and sampler share, the last two those that they have alone."""


class Memory(Struct, frozen=True):
    """One part of the memory a run needs.

    Attributes:
        name: what is held.
        bytes: how much, at most.
        where: on the host or on devices, all of them together; on the host in any case where JAX runs on its CPU.
        how: the arithmetic.
        restart: needed only after a restart or a resume, until it has caught up.
    """

    name: str
    bytes: int
    where: Place
    how: str
    restart: bool = False


def memory(config: RunConfig, model: ModelConfig | None = None) -> tuple[Memory, ...]:
    """Every part, in the order of printing.

    Args:
        config: the whole configuration.
        model: the model's shape; without it, what depends on it is left out.
    """
    parts = [*_episodes(config), *_buffers(config)]
    if model is not None:
        parts += [*_host_arrays(config, model), *_device_arrays(config, model)]
    return tuple(parts)


def places(config: RunConfig) -> dict[Place, tuple[int, ...]]:
    """The numbers of the devices, by where memory may be on them."""
    trainer, sampler = config.placement.trainer, config.placement.sampler
    if config.placement.apart and trainer is not None and sampler is not None:
        return {"trainer": trainer, "sampler": sampler}
    return {"device": trainer or tuple(range(config.mesh.devices))}


def count_parameters(model: ModelConfig) -> int:
    """Parameters of a decoder of this shape."""
    width, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    query, key = heads * model.head_dim, kv_heads * model.head_dim
    attention = width * (query + 2 * key) + query * width
    attention += (
        (query + 2 * key) * model.attention_bias + width * model.output_bias + 2 * model.head_dim * model.qk_norm
    )
    mlp = 3 * width * model.intermediate_size + (2 * model.intermediate_size + width) * model.mlp_bias
    table = model.vocab_size * width
    tables = table if model.tie_word_embeddings else 2 * table
    return tables + model.num_hidden_layers * (attention + mlp + 2 * width) + width


def row_tokens(config: RunConfig) -> int:
    """The length of a packed row."""
    sampling = config.sampling
    group = sampling.max_prompt_tokens + config.rollout.num_generations * (
        sampling.max_context_tokens - sampling.max_prompt_tokens
    )
    return config.train.row_tokens or max(sampling.max_context_tokens, min(group, LONGEST_ROW))


def size_text(count: int) -> str:
    """Bytes as a reader wants them."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _episodes(config: RunConfig) -> Iterator[Memory]:
    """Whatever holds episodes."""
    limit, episode, members = limits(config), episode_size(config), config.rollout.num_generations
    each = f"x {size_text(episode.bytes)}"
    steps = f"({config.rollout.max_staleness} + 1) x {config.train.groups_per_step} groups x {members}"
    yield Memory("untrained episodes", limit.episodes * episode.bytes, "host", f"{steps} = {limit.episodes:,} {each}")
    trained = limit.held - limit.episodes
    how = f"({limit.outcomes:,} of the last step + {trained - limit.outcomes:,} last in hand) {each}"
    yield Memory("trained episodes", trained * episode.bytes, "host", how)
    # The turns that rows are made of at the end, and the context as it stands in the row and in the request.
    threads = 0 if config.environment.isolation == "inline" else 2
    playing = (
        SLOT_BYTES + threads * THREAD_BYTES + episode.rows * episode.tokens * TURN_TOKEN_BYTES + 2 * episode.tokens * 4
    )
    slots = f"{config.rollout.max_concurrency:,}"
    if limit.evaluating:
        slots = f"({slots} + {limit.evaluating:,} evaluating)"
    yield Memory(
        "episode slots",
        (config.rollout.max_concurrency + limit.evaluating) * playing,
        "host",
        f"{slots} x {size_text(playing)}",
    )
    if limit.evaluated:
        yield Memory(
            "an evaluation's episodes",
            limit.evaluated * episode.bytes,
            "host",
            f"{config.evaluation.count:,} tasks x {config.evaluation.samples} {each}",
        )
    if limit.read_back is not None:
        yield Memory(
            "groups read back from the ledger",
            limit.read_back * members * episode.bytes,
            "host",
            f"{limit.read_back:,} groups x {members} {each}: all since the checkpoint",
            restart=True,
        )


def _buffers(config: RunConfig) -> Iterator[Memory]:
    """What else grows on the host, and how far."""
    episode, members, engine = episode_size(config), config.rollout.num_generations, config.engine
    yield Memory(
        "ledger",
        3 * members * episode.bytes,
        "host",
        f"a group at a time: encoded, framed, and room: 3 x {members} x {size_text(episode.bytes)}",
    )
    line = 8 * episode.text  # as JSON, where a control character takes six, and once more as bytes
    curve = (config.train.max_steps or 0) * _POINT_BYTES
    yield Memory(
        "log files",
        3 * _FILE_BYTES + line + curve,
        "host",
        f"3 x {size_text(_FILE_BYTES)} + a line {size_text(line)}"
        + (f" + curve {size_text(curve)}" if curve else f" + {_POINT_BYTES} a step"),
    )
    context = config.sampling.max_context_tokens
    yield Memory(
        "the engine's token record",
        engine.slots * context * TURN_TOKEN_BYTES,
        "host",
        f"{engine.slots:,} slots x {context:,} tokens x {TURN_TOKEN_BYTES}",
    )
    packed, rows = row_tokens(config), config.train.micro_batch_size
    yield Memory(
        "a micro-batch, on its way",
        2 * rows * packed * PACKED_TOKEN_BYTES,
        "host",
        f"2 x {rows} rows x {packed:,} tokens x {PACKED_TOKEN_BYTES}",
    )


def _host_arrays(config: RunConfig, model: ModelConfig) -> Iterator[Memory]:
    stored = count_parameters(model) * BYTES[config.model.param_dtype]
    state = 1 + _moments(config)
    how = f"parameters and moments: {state} x {size_text(stored)}"
    yield Memory("copy while a checkpoint is saved", state * stored, "host", how)


def _device_arrays(config: RunConfig, model: ModelConfig) -> Iterator[Memory]:
    where = places(config)
    trainer, *_, sampler = [*where, *where]
    parameters, copies, engines = count_parameters(model), config.mesh.data, len(where[sampler])
    replicated = f" x {copies} (mesh.data)" if copies > 1 else ""
    stored = parameters * copies * BYTES[config.model.param_dtype]
    computed = parameters * copies * BYTES[config.model.compute_dtype]
    limit, moments = limits(config), _moments(config)
    yield Memory("parameters", stored, trainer, f"{parameters:,} x {config.model.param_dtype}{replicated}")
    yield Memory("optimizer moments", moments * stored, trainer, f"{moments} x {size_text(stored)}")
    # float32, whatever the parameters are stored in
    yield Memory("gradients", parameters * copies * 4, trainer, f"{parameters:,} x float32{replicated}")
    if config.loss.beta > 0:
        yield Memory("reference model", stored, trainer, size_text(stored))
    if config.placement.apart:
        yield Memory("copy on its way to the sampler", computed, trainer, f"as sampled from: {size_text(computed)}")
        computed //= copies
    how = f"(1 + {limit.weights - 1} on the way) x {size_text(computed)}"
    yield Memory("weights for sampling", limit.weights * computed, sampler, how)
    context, slots = config.sampling.max_context_tokens, config.engine.slots
    width = BYTES[config.engine.kv_dtype]
    kv = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * width * context
    shape = f"{model.num_hidden_layers} x {model.num_key_value_heads} x {model.head_dim} x {width}"
    how = f"{slots:,} slots x {size_text(kv)} (2 x {shape} x {context:,} tokens)"
    how += f" x {engines} devices" if engines > 1 else ""
    yield Memory("keys and values", kv * slots * engines, sampler, how)
    yield _packed_step(config, trainer)
    restored = (1 + moments) + max(1, moments)
    yield Memory(
        "checkpoint read back",
        restored * stored,
        trainer,
        f"the state, and a copy of its parameters or moments: {restored} x {size_text(stored)}",
        restart=True,
    )


def _packed_step(config: RunConfig, where: Place) -> Memory:
    """A step's micro-batches, all of which may be on the devices before the first is used."""
    train, episode = config.train, episode_size(config)
    tokens = train.groups_per_step * config.rollout.num_generations * episode.rows * episode.tokens
    # Any two rows that were packed hold more than one row together, or they would have been one; and the last
    # micro-batch is filled up with empty rows.
    padded = 2 * tokens + train.micro_batch_size * row_tokens(config)
    per_token = PACKED_TOKEN_BYTES + 4 * (train.num_iterations > 1) + 4 * (config.loss.beta > 0)
    per_token *= config.mesh.tensor  # `data` and `fsdp` share the rows, `tensor` does not
    return Memory(
        "a step's packed rows",
        padded * per_token,
        where,
        f"(2 x {tokens:,} + {train.micro_batch_size} x {row_tokens(config):,}) tokens x {per_token}",
    )


def _text_bytes(alphabet: str) -> int:
    """Bytes of a token's text: a character in a plain format, whose width the widest of a text decides."""
    if not alphabet:
        return TEXT_BYTES_PER_TOKEN
    widest = ord(max(alphabet))
    return 1 if widest < 1 << 8 else 2 if widest < 1 << 16 else 4


def _moments(config: RunConfig) -> int:
    return 0 if config.optimizer.name == "sgd" else 2


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

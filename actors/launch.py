"""From a configuration to a run: loads what it names, builds the standard run, attends it to its end, and saves."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import msgspec
import trio
from flax import nnx

from trouper.actors.config import RunConfig
from trouper.actors.metrics import Recorder
from trouper.actors.plan import plan, scratch_model
from trouper.actors.progress import Screen, open_screen
from trouper.actors.run import attend
from trouper.actors.run_directory import RunDirectory
from trouper.actors.standard import StandardRun, World
from trouper.actors.trainer import CheckpointMeta
from trouper.channels import CheckpointError, ConfigError, Weights
from trouper.envs import (
    Chat,
    PlainChat,
    Tasks,
    load_agent,
    load_chat,
    load_rewards,
    load_tasks,
    made,
)
from trouper.learner.batch import BatchConfig
from trouper.learner.checkpoint import Checkpoints
from trouper.learner.checksum import checksum
from trouper.learner.decoder import Decoder
from trouper.learner.engine import Engine
from trouper.learner.learner import Learner
from trouper.learner.model_config import ModelConfig
from trouper.learner.source import resolve_model
from trouper.learner.weights import init_model, load_model, read_config, save_model

STOPPED = 128
"""Exit codes of runs that a signal stopped are this plus the signal's number."""


def model_folder(config: RunConfig) -> Path | None:
    """The HF folder of the configured model; None for one from scratch."""
    return None if config.model.source is None else resolve_model(config.model.source)


def load_world(config: RunConfig, folder: Path | None) -> World:
    """Load what the configuration names.

    Raises:
        ConfigError: a name that cannot be found, or arguments that do not fit.
    """
    if config.chat.format == "plain":
        chat: Chat = PlainChat(config.chat.alphabet, config.chat.stop)
    elif folder is None:
        raise ConfigError('a model from scratch has no chat template; set chat.format = "plain" and chat.alphabet')
    else:
        chat = load_chat(folder, format=config.chat.format)
    held_out = config.evaluation.tasks if config.evaluation.every_steps else None
    return World(
        chat=chat,
        tasks=_tasks(config.tasks, config.run.seed),
        held_out=_tasks(held_out, config.run.seed) if held_out else None,
        make_environment=partial(made, config.environment.name, config.environment.arguments),
        agent=load_agent(config.agent.name, config.agent.arguments),
        rewards=load_rewards(config.reward.functions, config.reward.weights or None),
    )


def _tasks(section: Any, seed: int) -> Tasks:
    arguments = dict(section.arguments)
    if section.source.endswith(".jsonl"):
        arguments |= {"epochs": section.epochs, "shuffle": section.shuffle, "seed": seed}
    return load_tasks(section.source, arguments)


def load_decoder(config: RunConfig, folder: Path | None, chat: Chat) -> Decoder:
    """The model, in the configured dtypes."""
    options: dict[str, Any] = {
        "dtype": jnp.dtype(config.model.compute_dtype),
        "param_dtype": jnp.dtype(config.model.param_dtype),
        "remat": config.model.remat,
    }
    if folder is not None:
        return load_model(folder, **options)
    return init_model(model_config(config, None, chat.vocab_size), config.run.seed, **options)


def model_config(config: RunConfig, folder: Path | None, vocab_size: int) -> ModelConfig:
    """The model's shape, without loading it."""
    return scratch_model(config, vocab_size) if folder is None else read_config(folder)


def _publish(learner: Learner, config: RunConfig) -> tuple[Any, int]:
    params = learner.copy_params(jnp.dtype(config.model.compute_dtype))
    return params, checksum(params)


class EngineMaker:
    """Builds engines for given weights; keeps the decoder's structure, not its arrays."""

    def __init__(self, config: RunConfig, decoder: Decoder, chat: Chat) -> None:
        self._config = config
        self._vocab_limit = chat.vocab_size
        self._graph, state = nnx.split(decoder)
        self._tree = jax.tree.structure(state)

    def __call__(self, weights: Weights) -> Engine:
        """An engine that samples under these weights."""
        engine = self._config.engine
        return Engine(
            nnx.merge(self._graph, jax.tree.unflatten(self._tree, weights.params)),
            slots=engine.slots,
            length=self._config.sampling.max_context_tokens,
            chunk=engine.chunk,
            kv_dtype=jnp.dtype(engine.kv_dtype),
            version=weights.version,
            prefill_rows=engine.prefill_rows,
            prefill_tokens=engine.prefill_tokens,
            vocab_limit=self._vocab_limit,
        )


def make_learner(config: RunConfig, decoder: Decoder, chat: Chat) -> Learner:
    """The learner that a configuration describes; with `beta > 0` the decoder is its reference."""
    sampling, train = config.sampling, config.train
    longest = sampling.max_prompt_tokens + config.rollout.num_generations * (
        sampling.max_context_tokens - sampling.max_prompt_tokens
    )
    return Learner(
        decoder,
        loss=config.loss,
        optimizer=config.optimizer,
        batch=BatchConfig(row_tokens=train.row_tokens or longest, micro_batch_size=train.micro_batch_size),
        mesh=config.mesh,
        num_iterations=train.num_iterations,
        scale_rewards=train.scale_rewards or "none",
        vocab_limit=chat.vocab_size,
    )


def launch(
    config: RunConfig,
    *,
    run_dir: Path,
    resume: bool = False,
    world: World | None = None,
    screen: Screen | None = None,
) -> int:
    """Run a configuration to its end.

    Args:
        config: checked by `plan` before anything starts.
        run_dir: where everything is written.
        resume: go on from the newest checkpoint in it.
        world: in place of what the configuration names.
        screen: shows the progress; by default the terminal.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that stopped the run.

    Raises:
        TrouperError: the run could not start, or failed.
    """
    return trio.run(partial(run, config, run_dir=run_dir, resume=resume, world=world, screen=screen))


async def run(
    config: RunConfig,
    *,
    run_dir: Path,
    resume: bool = False,
    world: World | None = None,
    screen: Screen | None = None,
) -> int:
    """`launch`, inside a running Trio loop."""
    folder = model_folder(config)
    world = world or load_world(config, folder)
    plan(config, model_config(config, folder, world.chat.vocab_size), devices=jax.device_count())
    keep_compilations()
    with RunDirectory(run_dir) as directory, Checkpoints(directory.checkpoints, **_kept(config)) as checkpoints:
        changes: dict[str, tuple[Any, Any]] = {}
        if resume:
            changes = directory.resume(config)
        else:
            directory.create(config)
        decoder = load_decoder(config, folder, world.chat)
        make_engine = EngineMaker(config, decoder, world.chat)
        learner = make_learner(config, decoder, world.chat)
        del decoder  # learner and samplers hold copies of their own
        resumed = _restore(learner, checkpoints) if resume else None
        step, life = (resumed.step, resumed.life + 1) if resumed else (0, 0)
        screen = screen or open_screen(config.train.max_steps, done=step)
        with Recorder(directory, life, screen, episodes_per_step=config.log.episodes_per_step) as recorder:
            for key, (before, after) in changes.items():
                recorder.note(f"{key} was {before!r} and is now {after!r}")
            publish = partial(_publish, learner, config)
            params, checked = publish()
            standard = StandardRun(
                config,
                world,
                learner,
                publish,
                make_engine,
                recorder,
                checkpoints,
                Weights(life=life, step=step, params=params, checksum=checked),
                resumed,
            )
            stopped_by = await attend(standard.graph)
            if stopped_by is not None:
                recorder.note(f"stopped by {stopped_by.name} after step {standard.trainer.step}; --resume goes on")
    return 0 if stopped_by is None else STOPPED + stopped_by


def _kept(config: RunConfig) -> dict[str, Any]:
    return {"max_to_keep": config.checkpoint.max_to_keep}


def _restore(learner: Learner, checkpoints: Checkpoints) -> CheckpointMeta | None:
    if checkpoints.latest() is None:
        return None  # stopped before the first save: begin again
    tree, meta = checkpoints.restore(None, learner.state_tree())
    learner.load_state_tree(tree)
    return msgspec.convert(meta, CheckpointMeta)


def keep_compilations() -> None:
    """Keep compiled programs in the user's cache directory, unless JAX was told another place."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "trouper" / "jax"))  # type: ignore[no-untyped-call]


def draw(config: RunConfig) -> str:
    """The standard run's graph as Mermaid. Loads and starts nothing."""
    nothing: Any = None
    evaluated = object() if config.evaluation.every_steps else nothing
    world = World(
        chat=nothing,
        tasks=nothing,
        held_out=cast(Any, evaluated),
        make_environment=nothing,
        agent=nothing,
        rewards=nothing,
    )
    weights = Weights(life=0, step=0, params=nothing, checksum=0)
    recorder: Any = SimpleNamespace(note=nothing)
    return StandardRun(config, world, nothing, nothing, nothing, recorder, nothing, weights).graph.mermaid()


def export(run_dir: Path, folder: Path, step: int | None = None) -> int:
    """Save a checkpoint's model as an HF folder.

    Args:
        run_dir: a run directory.
        folder: new or empty.
        step: which checkpoint; the newest when None.

    Returns:
        The step that was saved.
    """
    from trouper.actors.config_file import load_config

    directory = RunDirectory(run_dir)
    config = load_config(directory.config, ())
    source = model_folder(config)
    chat = load_world(config, source).chat
    decoder = load_decoder(config, source, chat)
    learner = make_learner(config, decoder, chat)
    with Checkpoints(directory.checkpoints, **_kept(config)) as checkpoints:
        found = checkpoints.latest() if step is None else step
        if found is None:
            raise CheckpointError(f"{run_dir} holds no checkpoint yet")
        tree, _ = checkpoints.restore(found, learner.state_tree())
    learner.load_state_tree(tree)
    save_model((model_config(config, source, chat.vocab_size), learner.params), folder, tokenizer_from=source)
    return found

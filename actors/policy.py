"""The policy: from a configuration to the model, its learner and its generation engines. Knows no actor."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trouper.actors.config import RunConfig
from trouper.actors.memory import row_tokens
from trouper.actors.plan import scratch_model
from trouper.channels import Weights
from trouper.envs import Chat
from trouper.learner.batch import BatchConfig
from trouper.learner.checksum import checksum
from trouper.learner.decoder import Decoder
from trouper.learner.engine import Engine
from trouper.learner.learner import Learner
from trouper.learner.model_config import ModelConfig
from trouper.learner.source import resolve_model
from trouper.learner.weights import init_model, load_model, read_config


def model_folder(config: RunConfig) -> Path | None:
    """The HF folder of the configured model; None for one from scratch."""
    return None if config.model.source is None else resolve_model(config.model.source)


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


def publish(learner: Learner, config: RunConfig) -> tuple[Any, int]:
    """A copy of the parameters for the samplers, and its checksum."""
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
        engine, sampling = self._config.engine, self._config.sampling
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
            # Training keeps every token; an evaluation may not.
            restricted=bool(self._config.evaluation.every_steps) and (sampling.top_p < 1 or sampling.top_k > 0),
        )


def make_learner(config: RunConfig, decoder: Decoder, chat: Chat) -> Learner:
    """The learner that a configuration describes; with `beta > 0` the decoder is its reference."""
    train = config.train
    return Learner(
        decoder,
        loss=config.loss,
        optimizer=config.optimizer,
        batch=BatchConfig(row_tokens=row_tokens(config), micro_batch_size=train.micro_batch_size),
        mesh=config.mesh,
        num_iterations=train.num_iterations,
        scale_rewards=train.scale_rewards or "none",
        vocab_limit=chat.vocab_size,
    )


def keep_compilations() -> None:
    """Keep compiled programs in the user's cache directory, unless JAX was told another place."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "trouper" / "jax"))  # type: ignore[no-untyped-call]

"""The policy: from a configuration to the model, its learner and its generation engines. Knows no actor."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

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
from trouper.learner.mesh import MeshConfig, make_mesh, numbered_devices, param_sharding
from trouper.learner.model_config import ModelConfig
from trouper.learner.source import resolve_model
from trouper.learner.weights import init_model, load_model, read_config


def model_folder(config: RunConfig) -> Path | None:
    """The HF folder of the configured model; None for one from scratch."""
    return None if config.model.source is None else resolve_model(config.model.source)


def load_decoder(config: RunConfig, folder: Path | None, chat: Chat) -> Decoder:
    """The model, in the configured dtypes, on the trainer's first device."""
    options: dict[str, Any] = {
        "dtype": jnp.dtype(config.model.compute_dtype),
        "param_dtype": jnp.dtype(config.model.param_dtype),
        "remat": config.model.remat,
    }
    numbers = config.placement.trainer
    with _made_on(numbers):
        if folder is not None:
            decoder = load_model(folder, **options)
        else:
            decoder = init_model(model_config(config, None, chat.vocab_size), config.run.seed, **options)
    if numbers is not None:  # tied to its device, or the first call that takes it would bring it to JAX's first one
        nnx.update(decoder, jax.device_put(nnx.state(decoder), numbered_devices(numbers)[0]))
    return decoder


def model_config(config: RunConfig, folder: Path | None, vocab_size: int) -> ModelConfig:
    """The model's shape, without loading it."""
    return scratch_model(config, vocab_size) if folder is None else read_config(folder)


def count_devices(config: RunConfig) -> int | None:
    """How many devices JAX sees; None where the first will do, since whoever counts them takes hold of them."""
    needs_one = config.mesh.devices == 1 and config.placement.trainer is None
    return None if needs_one else jax.device_count()


def sampler_shardings(config: RunConfig, learner: Learner) -> list[Sharding] | None:
    """Where samplers with devices of their own hold `learner.params`; None where they share the trainer's."""
    if not config.placement.apart:
        return None
    devices = numbered_devices(config.placement.sampler)
    mesh = make_mesh(MeshConfig(tensor=len(devices)), devices)
    return [param_sharding(mesh, name, array.shape) for name, array in learner.state_tree()["params"].items()]


def publish(learner: Learner, config: RunConfig, to: Sequence[Sharding] | None) -> tuple[Any, int]:
    """A copy of the parameters for the samplers, and its checksum.

    Args:
        learner: has the parameters.
        config: the whole configuration.
        to: from `sampler_shardings`.
    """
    params = learner.copy_params(jnp.dtype(config.model.compute_dtype))
    known = checksum(params)  # before they travel: what the samplers attest is that they arrived
    return params if to is None else jax.device_put(params, list(to)), known


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
        with _made_on(self._config.placement.sampler):
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
        devices=numbered_devices(config.placement.trainer),
        num_iterations=train.num_iterations,
        scale_rewards=train.scale_rewards or "none",
        vocab_limit=chat.vocab_size,
    )


def _made_on(numbers: Sequence[int] | None) -> AbstractContextManager[Any]:
    """Arrays that are made inside, and not told where, lie on the first of these devices."""
    return nullcontext() if numbers is None else jax.default_device(numbered_devices(numbers)[0])


def keep_compilations() -> None:
    """Keep compiled programs in the user's cache directory, unless JAX was told another place."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "trouper" / "jax"))  # type: ignore[no-untyped-call]

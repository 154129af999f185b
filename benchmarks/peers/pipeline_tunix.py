"""Tunix's agentic GRPO learner on the scene of `pipeline.py`; run by it, with a Python that has Tunix.

Reads one JSON object, what `theirs` there asks for, and ends with a line of figures. Two things are changed in Tunix's
favour: every model call asks for the same number of tokens (as shipped, each remaining budget is compiled anew) and has
a seed of its own (as shipped, all members of a group get the same completion, and nothing is learned).
"""

import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
import optax
import pipeline_scenario as scene
from absl import logging
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.agentic.agents.model_agent import ModelAgent
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.rollout import base_rollout, vanilla_rollout
from tunix_text import JoinedChat, SpecialIds

PROMPT, RESPONSE = 16, 64
"""Tokens of the prompt's bucket, and of an episode: four turns and the observations between them."""

WARM_UP = 1 / 3
"""Share of the steps that is left out, as on the other side."""

PATIENCE = 60.0
"""Seconds without a step, the first one's compilation included, after which a run has stalled."""


class Letters(SpecialIds):
    """A tokenizer of one id per letter of the alphabet; what is not in it becomes its first letter."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        return [3 + max(0, scene.ALPHABET.find(letter)) for letter in text]

    def decode(self, ids: Any, **_: Any) -> str:
        """Text of ids."""
        return "".join(scene.ALPHABET[int(id) - 3] for id in ids if int(id) > 2)


def room(law: str, mean: float) -> type[BaseTaskEnv]:
    """The environment: a tool that sleeps, and a score of what was said."""
    random = Random(0)

    class Room(BaseTaskEnv):
        def _initial_observation(self) -> dict[str, str]:
            return {"prompts": scene.FIRST}

        def _step_impl(self, action: Any) -> EnvStepResult:
            if seconds := scene.LAWS[law](random, mean):
                time.sleep(seconds)
            text = action.action if hasattr(action, "action") else str(action)
            return EnvStepResult(scene.OBSERVATION, scene.score(text), self.step_count >= scene.TURNS, {})

    return Room


def constant_shapes() -> None:
    """Every model call asks for as many tokens, under a seed of its own."""
    seeds, generate = itertools.count(1), vanilla_rollout.VanillaRollout.generate

    def seeded(self: Any, prompts: Any, rollout_config: Any, **options: Any) -> Any:
        changed = dataclasses.replace(rollout_config, max_tokens_to_generate=scene.TOKENS, seed=next(seeds))
        return generate(self, prompts, changed, **options)

    vanilla_rollout.VanillaRollout.generate = seeded


def cluster(*, apart: bool, steps: int) -> rl_cluster.RLCluster:
    """The model of `pipeline.py` with trainer and rollout."""
    shape = llama.ModelConfig(
        num_layers=scene.LAYERS,
        vocab_size=3 + len(scene.ALPHABET),
        embed_dim=scene.WIDTH,
        hidden_dim=scene.MLP_WIDTH,
        num_heads=scene.HEADS,
        head_dim=scene.WIDTH // scene.HEADS,
        num_kv_heads=scene.HEADS,
        rope_theta=10000,
        norm_eps=1e-5,
        weight_tying=True,
    )
    trainer, rollout = (
        jax.sharding.Mesh(np.array([jax.devices()[index]]).reshape(1, 1), ("fsdp", "tp")) for index in (0, int(apart))
    )
    roles = rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh={roles.ACTOR: trainer, roles.REFERENCE: trainer, roles.ROLLOUT: rollout},
        rollout_engine="vanilla",
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(scene.LEARNING_RATE),
            eval_every_n_steps=10**9,
            max_steps=steps,
            mini_batch_size=scene.GROUPS,
            train_micro_batch_size=scene.GROUPS,
            rollout_micro_batch_size=1,
            compute_logps_micro_batch_size=1,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_prompt_length=PROMPT,
            max_tokens_to_generate=RESPONSE,
            temperature=1.0,
            return_logprobs=True,
            kv_cache_size=PROMPT + RESPONSE,
        ),
    )
    model = llama.Llama3(shape, rngs=nnx.Rngs(0))
    return rl_cluster.RLCluster(actor=model, reference=None, tokenizer=Letters(), cluster_config=config)


def train(asked: dict[str, Any]) -> list[float]:
    """Times at which the steps were done."""
    steps, off_policy = asked["steps"], asked["off_policy"]
    constant_shapes()
    made = cluster(apart=off_policy > 0, steps=steps)
    learner = GRPOLearner(
        rl_cluster=made,
        reward_fns=None,
        chat_parser=JoinedChat(),
        agent_class=ModelAgent,
        env_class=room(asked["law"], asked["mean"]),
        env_kwargs={"max_steps": scene.TURNS},
        algo_config=GRPOConfig(
            num_generations=scene.MEMBERS,
            max_response_length=RESPONSE,
            beta=0.0,
            max_concurrency=64,
            off_policy_steps=off_policy,
            episode_timeout=120.0,
        ),
    )
    ends: list[float] = []
    update = made.update_actor

    def timed(*given: Any, **options: Any) -> None:
        update(*given, **options)
        jax.block_until_ready(jax.tree.leaves(nnx.state(made.actor_trainer.model)))
        ends.append(time.perf_counter())

    made.update_actor = timed

    def batches() -> Iterator[dict[str, list[str]]]:
        for number in range(steps + off_policy + 2):
            yield {"prompts": [f"a{number}-{index}" for index in range(scene.GROUPS)]}

    trains = threading.Thread(target=learner.train, args=[batches()], daemon=True)
    trains.start()
    moved = time.perf_counter()
    while trains.is_alive() and time.perf_counter() - moved < PATIENCE:
        trains.join(0.5)
        moved = ends[-1] if ends else moved
    return ends


def main() -> None:
    logging.set_verbosity(logging.ERROR)
    asked = json.loads(sys.stdin.readline())
    ends = train(asked)
    first = max(1, int(len(ends) * WARM_UP))
    # The median step: single ones still compile. There is none where the run stalled too early.
    took = [later - earlier for earlier, later in itertools.pairwise(ends[first - 1 :])]
    step = statistics.median(took) if len(took) > 1 else math.nan
    print(json.dumps({"episodes/s": scene.GROUPS * scene.MEMBERS / step, "steps": len(ends)}), flush=True)
    os._exit(0)  # threads of rollouts that hang would keep the process


if __name__ == "__main__":
    main()

"""Tunix's orchestrator on the scenario of `orchestration.py`; run by it, with a Python that has Tunix.

Reads one JSON object a line, `{"concurrency": 64, "episodes": 2000, "law": "none"}`, and answers each with a line of
figures. The process stays, so that its imports are paid once and the two sides can take turns.
"""

import asyncio
import gc
import json
import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from absl import logging as absl_logging
from scenario import ANSWER, FIRST, GROUP, OBSERVATION, STEP_REWARD, SYSTEM, TURNS, ToolTime, latency
from tunix.rl.agentic import utils
from tunix.rl.agentic.agents.model_agent import ModelAgent
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.agentic.pipeline.rollout_orchestrator import RolloutOrchestrator
from tunix.rl.rollout.base_rollout import RolloutOutput
from tunix_text import JoinedChat, SpecialIds


class Characters(SpecialIds):
    """A tokenizer of one id per byte."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        return list(text.encode())

    def decode(self, ids: Any, **_: Any) -> str:
        """Text of ids."""
        return bytes(int(id) for id in ids).decode()


def play(concurrency: int, episodes: int, law: str) -> dict[str, float]:
    """As `ours` in `orchestration.py`."""
    draw, tools, tokenizer = latency(law), ToolTime(), Characters()
    answer = RolloutOutput(
        text=[ANSWER],
        logits=None,
        tokens=[np.array(tokenizer.encode(ANSWER), np.int32)],
        left_padded_prompt_tokens=None,
        logprobs=[np.full(len(ANSWER), -1.0, np.float32)],
    )

    class Room(BaseTaskEnv):
        def _initial_observation(self) -> dict[str, str]:
            return {"prompts": FIRST}

        def _step_impl(self, action: Any) -> EnvStepResult:
            seconds = draw()
            if seconds:
                tools.add(time.perf_counter(), seconds)
                time.sleep(seconds)
            return EnvStepResult(OBSERVATION, STEP_REWARD, self.step_count >= TURNS, {})

    def pairs() -> Iterator[tuple[ModelAgent, Room]]:
        for number in range(episodes):
            extra = {"group_id": number // GROUP, "pair_index": number}
            yield ModelAgent(SYSTEM), Room({"policy_version": 0}, max_steps=TURNS, **extra)

    def sample(messages: Any, env: Any, max_generation_steps: int | None = None, **_: Any) -> RolloutOutput:
        return answer

    async def run() -> tuple[float, list[float]]:
        # As Tunix's learner does; the default pool would allow a few environments at a time.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=concurrency + 1))
        orchestrator = RolloutOrchestrator(
            rollout_sync_lock=utils.RolloutSyncLock(),
            max_concurrency=concurrency,
            engine_kwargs={"model_call": sample, "tokenizer": tokenizer, "chat_parser": JoinedChat(), "timeout": 600.0},
        )
        began = time.perf_counter()
        producer = asyncio.create_task(
            orchestrator.run_producers_from_stream(
                pairs(),
                group_size=GROUP,
                group_key_fn=lambda index, env, trajectory: env.extra_kwargs["group_id"],
                collect_mode="Token",
            )
        )
        await asyncio.sleep(0)
        over: list[float] = []
        async for group in orchestrator.yield_batches(batch_size=GROUP):
            over += [time.perf_counter()] * len(group)
        await producer
        return began, over

    gc.collect()
    cpu = time.process_time()
    began, over = asyncio.run(run())
    cpu = time.process_time() - cpu
    if len(over) != episodes:
        raise RuntimeError(f"{episodes} episodes were asked for and {len(over)} came")
    until = over[-min(concurrency, episodes // 2)]
    return {
        "episodes_per_second": episodes / (over[-1] - began),
        "cpu_microseconds_per_turn": cpu / (episodes * TURNS) * 1e6,
        "share": tools.share(concurrency, began, until),
    }


def main() -> None:
    absl_logging.set_verbosity(absl_logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    play(8, 64, "none")
    for line in sys.stdin:
        print(json.dumps(play(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

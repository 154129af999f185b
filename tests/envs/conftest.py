"""Toy tokenizers and models' folders, a sampler that answers from a script, and a world without actors."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from trouper.channels import Sampling, Task, Turn
from trouper.envs import (
    Conversation,
    ToolResult,
    call_tool,
    checked_observation,
    checked_score,
    checked_step,
    inline,
    load_chat,
    tools_of,
)

CORPUS = ["What is 34 times 57? It is 1938.", "user assistant system tool think", "Be brief. Add 2 and 3, the result."]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture
def letters() -> Callable[..., Tokenizer]:
    """A tokenizer of single characters with ids of one's choice; `special` are control tokens."""

    def make(ids: dict[str, int], special: dict[str, int] | None = None, plain: dict[str, int] | None = None):
        special, plain = special or {}, plain or {}
        tokenizer = Tokenizer(models.WordLevel({**ids, **special, **plain, "?": 999}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
        tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
        return tokenizer

    return make


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model's folder; keyword arguments are the contents of its other JSON files."""

    def write(tokenizer: Tokenizer, template: str | None = None, **files: dict[str, Any]) -> Path:
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = files.setdefault("tokenizer_config", {})
        if template is not None:
            settings["chat_template"] = template
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def chatml_tokenizer() -> Tokenizer:
    """A small byte-level BPE with ChatML's control tokens and two ordinary added ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("<think>", special=False)])
    return tokenizer


@pytest.fixture
def chatml(model_folder, chatml_tokenizer):
    """A ChatML chat over that tokenizer."""
    return load_chat(model_folder(chatml_tokenizer, generation_config={"eos_token_id": 0}), format="chatml")


class Script:
    """A sampler that gives prepared turns and notes what it was asked."""

    def __init__(self, *turns: Turn) -> None:
        self.turns = list(turns)
        self.asked: list[list[int]] = []
        self.limits: list[int] = []

    async def __call__(self, tokens, *, max_tokens: int, stop: tuple[int, ...], sampling: Sampling) -> Turn:
        assert tokens.dtype == np.int32
        self.asked.append(tokens.tolist())
        self.limits.append(max_tokens)
        return self.turns.pop(0)


def turn(ids: Sequence[int], finish: str = "stop", logprobs: Sequence[float] | None = None, version: int = 0) -> Turn:
    return Turn(
        tokens=np.array(ids, np.int32),
        logprobs=np.array([-0.5] * len(ids) if logprobs is None else logprobs, np.float32),
        versions=np.full(len(ids), version, np.int32),
        finish=finish,
        kv_version=version,
    )


@pytest.fixture
def sampled() -> Callable[..., Turn]:
    """Makes a turn from ids."""
    return turn


@pytest.fixture
def script() -> type[Script]:
    """The scripted sampler."""
    return Script


@pytest.fixture
def speak(chatml) -> Callable[..., Script]:
    """A scripted sampler over the ChatML chat that says these texts; a text that ends with `...` was cut off."""

    def make(*texts: str) -> Script:
        end = chatml.stop_ids[-1]
        turns = []
        for text in texts:
            cut = text.endswith("...")
            ids = chatml._encode(text.removesuffix("..."), []).tolist()
            turns.append(turn(ids, "length") if cut else turn([*ids, end]))
        return Script(*turns)

    return make


@pytest.fixture
def conversation() -> Callable[..., Conversation]:
    """A conversation with wide limits."""

    def make(chat, sample, **limits: Any) -> Conversation:
        limits = {"max_context": 4096, "max_response_tokens": 64, "max_turns": 20, "sampling": Sampling(), **limits}
        return Conversation(chat, sample, **limits)

    return make


class LocalWorld:
    """An environment played right here."""

    def __init__(self, environment: Any, task: Task) -> None:
        self.environment = environment
        self.task = task
        self.tools = tools_of(environment)
        self.done = False
        self.steps = 0
        self.rewards = 0.0
        self.metrics: dict[str, float] = {}

    async def reset(self) -> str:
        return checked_observation(self.environment, await inline(lambda: self.environment.reset(self.task)), 0)

    async def step(self, action: str) -> str:
        self.steps += 1
        value = await inline(lambda: self.environment.step(action))
        result = checked_step(self.environment, value, self.steps)
        self.done = result.done or result.truncated
        self.rewards += result.reward
        self.metrics.update(result.metrics)
        return result.observation

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return await call_tool(self.environment, name, arguments, inline)

    def score(self) -> float | None:
        if hasattr(self.environment, "reward"):
            return checked_score(self.environment, self.environment.reward(), self.steps)
        return self.rewards


@pytest.fixture
def local_world() -> type[LocalWorld]:
    """The world without actors."""
    return LocalWorld

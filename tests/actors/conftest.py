"""A whole standard run on a simulated device, and the pieces to build parts of one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from trouper.actors.config import RunConfig
from trouper.actors.config_file import parse_config
from trouper.actors.ledger import Ledger
from trouper.actors.metrics import Recorder, read_metrics
from trouper.actors.redo import begin
from trouper.actors.run_directory import RunDirectory
from trouper.actors.simulation import MemoryCheckpoints, SimulatedAccelerator, SimulatedEngine, SimulatedLearner
from trouper.actors.standard import Cast, StandardRun
from trouper.channels import Attempt, Episode, Group, Message, Row, Task
from trouper.envs import PlainChat, Rewards, StepResult, model_agent

ALPHABET = "abcdefghijklmno;"


class Screen:
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def step(self, step: int, elapsed: float, metrics: Any) -> None:
        pass

    def update(self, elapsed: float, metrics: Any) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self, summary: str) -> None:
        pass


class Record(Recorder):
    """Keeps the groups of every step, void ones too; where a later life did a step again, the later ones."""

    def __init__(self, *args: Any) -> None:
        self.groups: list[tuple[int, Group]] = []
        self.of_life: dict[int, int] = {}
        super().__init__(*args)

    def episodes(self, step: int, group: Group) -> None:
        super().episodes(step, group)
        if self.of_life.get(step) != self.life:
            self.of_life[step] = self.life
            self.groups[:] = [each for each in self.groups if each[0] < step - 1]
        self.groups.append((step - 1, group))


class Letters:
    """Three steps of a second each; the score is a function of what the model said."""

    steps = 3

    async def reset(self, task: Task) -> str:
        self.said = ""
        self.left = self.steps
        return "a"

    async def step(self, action: str) -> StepResult:
        await trio.sleep(1.0)
        self.said += action
        self.left -= 1
        return StepResult("b", done=self.left == 0)

    def reward(self) -> float:
        return sum(map(ord, self.said)) % 7 / 7


class Stream:
    """Numbered tasks, `count` of them."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count

    def task(self, draw: int) -> Task | None:
        return Task(str(draw), {"draw": draw}) if self.count is None or draw < self.count else None


def configured(**sections: dict[str, Any]) -> RunConfig:
    """A small run: 4 steps of 2 groups of 2; keyword arguments are sections."""
    small = {
        "model": {"source": "simulated"},
        "tasks": {"source": "tests:tasks"},
        "chat": {"format": "plain", "alphabet": ALPHABET, "stop": ";"},
        "environment": {"isolation": "inline"},
        "sampling": {"max_response_tokens": 6, "max_turns": 4, "max_prompt_tokens": 4, "max_context_tokens": 64},
        "engine": {"slots": 4},
        "rollout": {"num_generations": 2, "max_concurrency": 8},
        "train": {"max_steps": 4, "groups_per_step": 2},
        "checkpoint": {"save_interval_steps": 2},
    }
    for name, keys in sections.items():
        small[name] = {**small.get(name, {}), **keys}
    return parse_config(small)


@dataclass
class Play:
    """One life of a run on a simulated device, and what came of it."""

    config: RunConfig
    directory: Path
    tasks: Any = field(default_factory=Stream)
    held_out: Any = None
    make_environment: Callable[[], Any] = Letters
    agent: Any = model_agent
    rewards: Rewards = field(default_factory=lambda: Rewards({}, ()))
    make_engine: Callable[..., Any] = SimulatedEngine
    learner: SimulatedLearner = field(default_factory=SimulatedLearner)
    checkpoints: MemoryCheckpoints = field(default_factory=MemoryCheckpoints)
    make_accelerator: Callable[[str], Any] = SimulatedAccelerator
    life: int = 1
    redo: bool = True
    stop_at: float | None = None
    kill_at: float | None = None
    screen: Screen = field(default_factory=Screen)
    run: Any = field(default=None, init=False)
    groups: list[tuple[int, Group]] = field(default_factory=list, init=False)
    seconds: float = field(default=0.0, init=False)

    async def __call__(self) -> "Play":
        """Play it to its end, in virtual time."""
        directory = RunDirectory(self.directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        saved = self.learner.rewind(self.checkpoints)
        step = saved.step if saved else 0
        ledger = Ledger(directory.ledger)
        with Record(directory, self.life, self.screen) as recorder:
            self.groups = recorder.groups
            cast = Cast(
                chat=PlainChat(ALPHABET, ";"),
                tasks=self.tasks,
                held_out=self.held_out,
                make_environment=self.make_environment,
                agent=self.agent,
                rewards=self.rewards,
            )
            self.run = StandardRun(
                self.config,
                cast,
                self.learner,
                self.learner.publish,
                partial(self.learner.rewind, self.checkpoints),
                partial(self.make_engine, slots=self.config.engine.slots, chunk=self.config.engine.chunk, length=64),
                recorder,
                self.checkpoints,
                ledger,
                self.learner.weights(life=self.life, step=step),
                begin(ledger, saved.source if saved else None, self.config, life=self.life, step=step, redo=self.redo),
                make_accelerator=self.make_accelerator,
            )
            started = trio.current_time()
            error: Exception | None = None
            async with trio.open_nursery() as nursery:
                if self.kill_at is not None:  # at once and unsaved: nothing of the process is left but its files
                    nursery.cancel_scope.deadline = started + self.kill_at
                if self.stop_at is not None:
                    nursery.start_soon(self._stop, self.stop_at)
                try:
                    await self.run.graph.run()
                except Exception as failure:
                    error = failure  # raised below: the nursery would wrap it
                nursery.cancel_scope.cancel()
            _end(ledger, killed=self.kill_at is not None)
            if error is not None:
                raise error
            self.seconds = trio.current_time() - started
        return self

    async def _stop(self, at: float) -> None:
        await trio.sleep(at)
        self.run.graph.stop()

    @property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """What was recorded, by step."""
        return read_metrics(self.directory / "metrics.jsonl")

    def total(self, name: str) -> float:
        """The sum of a metric over the steps."""
        return sum(record.get(name, 0.0) for record in self.metrics.values())

    @property
    def draws(self) -> list[tuple[int, int, int]]:
        """(step, slot, draw) of every group, in the order of training."""
        return [(step, group.slot, group.draw) for step, group in self.groups]

    @property
    def log(self) -> list[Any]:
        """Everything that can be seen from outside, with times."""
        rows = [
            (step, group.slot, episode.attempt.id, row.tokens.tolist(), row.versions.tolist(), episode.reward)
            for step, group in self.groups
            for episode in group.episodes
            for row in episode.rows
        ]
        return [rows, self.screen.notes, (self.directory / "metrics.jsonl").read_text(), self.seconds]


def _end(ledger: Ledger, *, killed: bool) -> None:
    """Close a ledger; one that was killed loses what it had not written."""
    written = {path: path.read_bytes() for path in ledger.folder.iterdir()}
    ledger.close()
    for path, content in written.items():
        if killed:
            path.write_bytes(content)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Play]:
    """Makes a run on a simulated device: `await play(make_environment=..., rollout={...})()`."""
    made = 0

    def make(*, resume: Play | None = None, **given: Any) -> Play:
        nonlocal made
        made += 1
        parts = {each.name for each in fields(Play) if each.init}
        own = {name: given.pop(name) for name in parts & given.keys()}
        directory = tmp_path / str(made)
        if resume is not None:
            begun = getattr(resume.run, "life", None)  # it may have been stopped before its trainer was up
            number = resume.life if begun is None else begun.number
            own = {"checkpoints": resume.checkpoints, "life": number + 1, **own}
            directory = resume.directory
        own.setdefault("config", configured(**given))
        return Play(directory=directory, **own)

    return make


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A ledger whose first life has begun."""
    ledger = Ledger(tmp_path / "ledger")
    ledger.begin(1, 0)
    yield ledger
    ledger.close()


@pytest.fixture
def letters() -> type[Letters]:
    """The small environment."""
    return Letters


@pytest.fixture
def stream() -> type[Stream]:
    """The stream of numbered tasks."""
    return Stream


@pytest.fixture
def episode() -> Callable[..., Episode]:
    """Makes a finished member of a slot."""

    def make(slot: int, member: int, reward: float | None, *, draw: int | None = None, **given: Any) -> Episode:
        attempt = Attempt(slot, slot if draw is None else draw, member, 0, 0, Task(str(slot)))
        row = Row(
            tokens=np.array([1, 2], np.int32),
            loss_mask=np.array([False, True]),
            logprobs=np.array([0.0, -1.0], np.float32),
            versions=np.array([-1, 0], np.int32),
        )
        given = {"rows": (row,), "status": "done", "turns": 1, "messages": (Message("user", "a"),), **given}
        return Episode(attempt=attempt, reward=reward, **given)

    return make


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock that a test moves."""
    return Clock()

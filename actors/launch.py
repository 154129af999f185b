"""From a configuration to a run: loads what it names, builds the standard run, attends it to its end, and saves."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import trio

from trouper.actors.aside import stuck
from trouper.actors.cli import report
from trouper.actors.config import RunConfig
from trouper.actors.config_file import load_config, parse_config
from trouper.actors.garbage import collecting_rarely
from trouper.actors.graph import Graph
from trouper.actors.ledger import Ledger
from trouper.actors.log_lines import LogLines
from trouper.actors.metrics import Recorder, read_metrics
from trouper.actors.naming import held_out, load_cast, load_format, task_stream
from trouper.actors.plan import plan
from trouper.actors.policy import (
    EngineMaker,
    count_devices,
    keep_compilations,
    load_decoder,
    make_learner,
    model_config,
    model_folder,
    publish,
    sampler_shardings,
)
from trouper.actors.process import process_factory
from trouper.actors.progress import Screen, open_screen
from trouper.actors.redo import NOTHING, begin
from trouper.actors.run import attend
from trouper.actors.run_directory import RunDirectory, changes_learning
from trouper.actors.standard import Cast, StandardRun, standard_graph
from trouper.actors.trace import NO_TRACE
from trouper.actors.trainer import CheckpointMeta, rate_checkpoints
from trouper.channels import CheckpointError, ConfigError, Task, Weights
from trouper.envs import (
    Agent,
    SingleTurn,
    TaskList,
    Tasks,
    load_agent,
    load_factory,
    load_rewards,
    model_agent,
)
from trouper.learner.checkpoint import Checkpoints
from trouper.learner.learner import Learner
from trouper.learner.mesh import MeshConfig, PlacementConfig
from trouper.learner.profile import StepProfile
from trouper.learner.weights import save_model

STUCK_GRACE = 3.0
"""Seconds at the end of a run for user code that was cancelled long ago."""

STOPPED = 128
"""Exit codes of runs that a signal stopped are this plus the signal's number."""


def train(
    *,
    model: str | dict[str, Any],
    tasks: "str | Tasks | Iterable[Task | dict[str, Any]] | dict[str, Any]",
    reward: "Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | dict[str, Any]" = (),
    environment: Callable[[], Any] | str | dict[str, Any] = SingleTurn,
    agent: "Agent | str | dict[str, Any]" = model_agent,
    run_dir: str | Path | None = None,
    resume: bool = False,
    **sections: dict[str, Any],
) -> int:
    """Train from Python: what a configuration file names by dotted name may be given as objects.

    Each of the first five may also be its whole section as a dict, in which the object stands in place of the name:
    `environment={"name": Guess, "step_timeout": 5.0}`.

    Args:
        model: what `[model] source` may be.
        tasks: what `[tasks] source` may be, an object with `task(draw)`, or tasks (a dict is a payload) to be drawn
            in seeded order again and again.
        reward: one function `fn(task, messages, text) -> float | None`, or several, or their dotted names.
        environment: makes an environment object.
        agent: plays.
        run_dir: where everything is written; `run.directory/run.name` when None.
        resume: go on from the newest checkpoint in it.
        **sections: further sections of a configuration, as dicts: `train={"max_steps": 10}`.

    Returns:
        The exit code, as `launch`.

    Raises:
        ConfigError: what was given cannot be used.
    """
    given = {
        "model": _section(model, "source", None),
        "tasks": _section(tasks, "source", ()),
        "environment": _section(environment, "name", SingleTurn),
        "agent": _section(agent, "name", model_agent),
        "reward": _section(reward, "functions", ()),
    }
    stream, make, player = given["tasks"]["source"], given["environment"]["name"], given["agent"]["name"]
    functions = given["reward"]["functions"]
    functions = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
    described = {
        "tasks": given["tasks"] | {"source": _described(stream)},
        "environment": given["environment"] | {"name": _described(make)},
        "agent": given["agent"] | {"name": _described(player)},
        "reward": given["reward"] | {"functions": [_described(function) for function in functions]},
    }
    config = parse_config(given | described | sections)
    folder = model_folder(config)
    arguments = config.environment.arguments
    cast = Cast(
        chat=load_format(config, folder),
        tasks=task_stream(config.tasks, config.run.seed) if isinstance(stream, str) else _stream(stream, config),
        held_out=held_out(config),
        make_environment=(
            process_factory(config.environment, make)
            if config.environment.isolation == "process"
            else partial(load_factory(make, arguments), **arguments)
        ),
        agent=load_agent(player, config.agent.arguments) if isinstance(player, str) else _agent(player, config),
        rewards=load_rewards(functions, config.reward.weights or None),
    )
    run_dir = run_dir or Path(config.run.directory) / config.run.name
    return launch(config, run_dir=Path(run_dir), resume=resume, cast=cast)


def _section(given: Any, key: str, default: Any) -> dict[str, Any]:
    """A section of which the whole was given, or only what stands under one key."""
    return {key: default, **given} if isinstance(given, dict) else {key: given}


def _agent(given: Any, config: RunConfig) -> Agent:
    if not callable(given):
        raise ConfigError(f"agent = {given!r}; give an async function of a conversation and a world, or its name")
    if config.agent.arguments:
        raise ConfigError(f"an agent given as an object takes no arguments, but was given {config.agent.arguments}")
    agent: Agent = given
    return agent


def _described(given: Any) -> str:
    """How the configuration that is written into the run directory calls an object that was given from Python."""
    if isinstance(given, str):
        return given
    return f"{getattr(given, '__module__', 'python')}:{getattr(given, '__qualname__', type(given).__qualname__)}"


def _stream(tasks: Any, config: RunConfig) -> Tasks:
    if callable(getattr(tasks, "task", None)):
        stream: Tasks = tasks
        return stream
    if not isinstance(tasks, Iterable):
        raise ConfigError(f"tasks = {tasks!r}; give a list of dicts, an object with task(draw), or a .jsonl file")
    found = [task if isinstance(task, Task) else Task(str(number), task) for number, task in enumerate(tasks)]
    if wrong := next((task for task in found if not isinstance(task.payload, dict)), None):
        raise ConfigError(f"tasks[{wrong.id}] is {wrong.payload!r}; a task is a dict, its payload, or a Task")
    return TaskList(found, seed=config.run.seed, shuffle=config.tasks.shuffle, epochs=config.tasks.epochs)


def launch(
    config: RunConfig,
    *,
    run_dir: Path,
    resume: bool = False,
    cast: Cast | None = None,
    wire: Callable[[StandardRun], Graph] = standard_graph,
    screen: Screen | None = None,
) -> int:
    """Run a configuration to its end.

    Args:
        config: checked by `plan` before anything starts.
        run_dir: where everything is written.
        resume: go on from the newest checkpoint in it.
        cast: in place of what the configuration names.
        wire: puts the run's actors into a graph; give your own to add actors.
        screen: shows the progress; by default the terminal.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that stopped the run.

    Raises:
        TrouperError: the run could not start, or failed.
    """
    with _exit_on_sigterm(), collecting_rarely():
        begin_run = partial(run, config, run_dir=run_dir, resume=resume, cast=cast, wire=wire, screen=screen)
        return trio.run(_to_the_end, begin_run)


async def _to_the_end(begin_run: Callable[[], Awaitable[int]]) -> int:
    """A run's exit code. Where user code is left behind that does not end, the process ends here: all else has."""
    try:
        code = await begin_run()
    except BaseException as error:
        if not await stuck(STUCK_GRACE):
            raise
        code = report(error)  # nobody else could: the loop would wait for what is left
    if left := await stuck(STUCK_GRACE):
        print(f"trouper: leaving behind what does not end: {'; '.join(left)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(code)
    return code


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """While a model loads and the graph does not listen yet, SIGTERM ends the process as SIGINT does: cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(STOPPED + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


async def run(
    config: RunConfig,
    *,
    run_dir: Path,
    resume: bool = False,
    cast: Cast | None = None,
    wire: Callable[[StandardRun], Graph] = standard_graph,
    screen: Screen | None = None,
) -> int:
    """`launch`, inside a running Trio loop."""
    folder = model_folder(config)
    cast = cast or load_cast(config, folder)
    plan(config, model_config(config, folder, cast.chat.vocab_size), devices=count_devices(config))
    keep_compilations()
    _blank(config, wire, evaluated=cast.held_out is not None).graph.check()  # before anything is made
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs at length what it raises
    with ExitStack() as held:
        directory = held.enter_context(RunDirectory(run_dir))
        changes: dict[str, tuple[Any, Any]] = {}
        if resume:
            changes = directory.resume(config)
        else:
            directory.create(config)
        notes: list[str] = []  # of what is found before anybody can be told
        checkpoints = held.enter_context(
            Checkpoints(
                directory.checkpoints,
                max_to_keep=config.checkpoint.max_to_keep,
                keep_best=config.checkpoint.keep_best,
                note=notes.append,
            )
        )
        decoder = load_decoder(config, folder, cast.chat)
        make_engine = EngineMaker(config, decoder, cast.chat)
        learner = make_learner(config, decoder, cast.chat)
        del decoder  # learner and samplers hold copies of their own
        resumed = _restore(learner, checkpoints)
        ledger = held.enter_context(closing(Ledger(directory.ledger)))
        # The log may be gone, the checkpoint may be of an earlier life than the log tells of.
        step, life = (resumed.step, max(directory.lives(), resumed.life + 1)) if resumed else (0, directory.lives())
        if resumed is None and directory.metrics.exists() and (told := read_metrics(directory.metrics)):
            notes.append(
                f"no checkpoint was found in {directory.checkpoints}: the run begins again at step 0, and its "
                f"{max(told)} steps are done again; stop it now if the checkpoints only lie elsewhere"
            )
        redo = not any(changes_learning(key) for key in changes)
        left = begin(ledger, resumed.source if resumed else None, config, life=life, step=step, redo=redo)
        if changes:  # and the checkpoint fits them
            directory.keep(config)
        screen = screen or open_screen(config.train.max_steps, done=step)
        recorder = held.enter_context(Recorder(directory, life, screen, episodes_per_step=config.log.episodes_per_step))
        held.enter_context(LogLines(recorder.note, recorder.log))
        for note in (
            *notes,
            *(f"{key} was {before!r} and is now {after!r}" for key, (before, after) in changes.items()),
        ):
            recorder.note(note)
        if config.train.max_steps is not None and step >= config.train.max_steps:
            recorder.note(
                f"{step} steps are done and train.max_steps = {config.train.max_steps}: nothing is left to train; "
                "raise it to go on"
            )
        copy = partial(publish, learner, config, sampler_shardings(config, learner))
        params, checked = copy()
        first = Weights(life=life, step=step, params=params, checksum=checked)

        def rewind() -> CheckpointMeta | None:
            if checkpoints.latest() is None:
                learner.begin(load_decoder(config, folder, cast.chat))
            return _restore(learner, checkpoints)

        standard = StandardRun(
            config,
            cast,
            learner,
            copy,
            rewind,
            make_engine,
            recorder,
            checkpoints,
            ledger,
            first,
            left,
            profile=StepProfile(directory.path / "profile", *chosen) if (chosen := config.log.profile_steps) else None,
            wire=wire,
        )
        del params, first, left  # else the first weights would stay in memory to the end
        stopped_by = await attend(standard.graph)
        rate_checkpoints(checkpoints, recorder, config.checkpoint.best_metric)  # the last evaluation ends last
        if stopped_by is not None:
            recorder.note(f"stopped by {stopped_by.name} after step {standard.step}; --resume goes on")
    return 0 if stopped_by is None else STOPPED + stopped_by


def _restore(learner: Learner, checkpoints: Checkpoints) -> CheckpointMeta | None:
    if checkpoints.latest() is None:
        return None  # a new run, or one that was stopped before its first save
    tree, meta = checkpoints.restore(None, learner.state_tree())
    learner.load_state_tree(tree)
    return msgspec.convert(meta, CheckpointMeta)


def draw(config: RunConfig) -> str:
    """The standard run's graph as Mermaid. Loads and starts nothing."""
    return _blank(config, standard_graph, evaluated=bool(config.evaluation.every_steps)).graph.mermaid()


def _blank(config: RunConfig, wire: Callable[[StandardRun], Graph], *, evaluated: bool) -> StandardRun:
    """A run whose graph can be looked at, and that has nothing to run with."""
    nothing: Any = None
    some: Any = object()
    cast = Cast(
        chat=nothing,
        tasks=nothing,
        held_out=some if evaluated else None,
        make_environment=nothing,
        agent=nothing,
        rewards=nothing,
    )
    weights = Weights(life=0, step=0, params=nothing, checksum=0)
    recorder: Any = SimpleNamespace(log=nothing, trace=NO_TRACE)
    return StandardRun(
        config, cast, nothing, nothing, nothing, nothing, recorder, nothing, nothing, weights, NOTHING, wire=wire
    )


def export(run_dir: Path, folder: Path, step: int | None = None) -> int:
    """Save a checkpoint's model as an HF folder.

    Args:
        run_dir: a run directory.
        folder: new or empty.
        step: which checkpoint; the newest when None.

    Returns:
        The step that was saved.
    """
    directory = RunDirectory(run_dir)
    if not directory.config.is_file():
        raise ConfigError(f"there is no run in {run_dir}; give the directory that a run was kept in")
    # Whatever devices it was trained on, one is enough to copy from.
    config = msgspec.structs.replace(load_config(directory.config, ()), mesh=MeshConfig(), placement=PlacementConfig())
    source = model_folder(config)
    chat = load_format(config, source)
    decoder = load_decoder(config, source, chat)
    learner = make_learner(config, decoder, chat)
    with Checkpoints(directory.checkpoints) as checkpoints:
        found = checkpoints.latest() if step is None else step
        if found is None:
            raise CheckpointError(f"{run_dir} holds no checkpoint yet")
        tree, _ = checkpoints.restore(found, learner.state_tree())
    learner.load_state_tree(tree)
    save_model((model_config(config, source, chat.vocab_size), learner.params), folder, tokenizer_from=source)
    return found

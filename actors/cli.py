"""The command line: `trouper train`, `graph`, `convert`, `export`. Arguments in, one clear message or text out.

Knows what to call and how errors end a process, not how a run works. What needs JAX is imported when it is called for.
"""

import argparse
import importlib.metadata
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trouper.channels import ConfigError, TrouperError, causes

if TYPE_CHECKING:
    from trouper.actors.config import RunConfig
    from trouper.learner.model_config import ModelConfig

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments; those of the process when None.

    Returns:
        The exit code: 0 done, 1 failed, 2 bad configuration, 130 or 143 stopped by a signal.
    """
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse gives up on overrides that follow an option.
    if rest and not (hasattr(arguments, "overrides") and all("=" in each and each[0] != "-" for each in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    try:
        code: int = arguments.command(arguments)
    except SystemExit:
        raise
    # The last line of defence: whatever ends a command becomes an exit code, and nothing is swallowed.
    except BaseException as error:
        return report(error)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trouper", description="Agentic reinforcement learning for LLMs on JAX.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"trouper {importlib.metadata.version('trouper')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model", description="Train a model.", allow_abbrev=False)
    _add_config(train)
    train.add_argument("--run-dir", type=Path, help="where the run is kept; run.directory/run.name when left out")
    train.add_argument("--resume", action="store_true", help="go on with the run in that directory")
    train.add_argument(
        "--dry-run", action="store_true", help="print the whole configuration, what follows from it, and the graph"
    )
    train.set_defaults(command=_train)

    graph = commands.add_parser("graph", help="draw a run's actors and channels", description="Print a Mermaid graph.")
    _add_config(graph)
    graph.set_defaults(command=_graph)

    convert = commands.add_parser(
        "convert", help="turn a .gguf file into a Hugging Face folder", description="Make a Hugging Face folder."
    )
    convert.add_argument("source", help="a .gguf file, by path or as package://PACKAGE/FILE.gguf")
    convert.add_argument("folder", type=Path, help="the folder to make")
    convert.set_defaults(command=_convert)

    export = commands.add_parser(
        "export", help="save a checkpoint as a Hugging Face folder", description="Make a Hugging Face folder."
    )
    export.add_argument("run_dir", type=Path, help="the run directory")
    export.add_argument("folder", type=Path, help="the folder to make")
    export.add_argument("--step", type=int, help="which checkpoint; the newest when left out")
    export.set_defaults(command=_export)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG.toml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a value of the file")


def _train(arguments: argparse.Namespace) -> int:
    with _interruptible():
        from trouper.actors.config_file import dump_config, load_config
        from trouper.actors.plan import plan

        config = load_config(arguments.config, arguments.overrides)
        shape = _shape(config)
        planned = plan(config, shape)
        run_dir = arguments.run_dir or Path(config.run.directory) / config.run.name
        from trouper.actors import launch, naming
        from trouper.actors.policy import count_devices

    if arguments.dry_run:
        naming.look_up(config)
        print(dump_config(config), planned.render(), "", launch.draw(config), sep="\n")
        plan(config, shape, devices=count_devices(config))  # last: the run may be meant for another machine
        return 0
    return launch.launch(config, run_dir=run_dir, resume=arguments.resume)


@contextmanager
def _interruptible() -> Iterator[None]:
    """While modules are imported, a signal ends the process where it stands: nothing has begun that could be lost.

    An exception would not do: raised in the middle of an import it may be swallowed, and the run would start.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda number, _: os._exit(128 + number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _graph(arguments: argparse.Namespace) -> int:
    from trouper.actors.config_file import load_config
    from trouper.actors.plan import plan

    config = load_config(arguments.config, arguments.overrides)
    plan(config)
    from trouper.actors import launch

    print(launch.draw(config))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from trouper.learner.gguf import convert
    from trouper.learner.source import gguf_file

    file = gguf_file(arguments.source)
    if file is None:
        raise ConfigError(f"{arguments.source!r} is no .gguf file; give its path or package://PACKAGE/FILE.gguf")
    convert(file, arguments.folder)
    print(f"{arguments.folder} is ready: set model.source to it")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from trouper.actors import launch

    step = launch.export(arguments.run_dir, arguments.folder, arguments.step)
    print(f"{arguments.folder} holds the model of step {step}")
    return 0


def _shape(config: "RunConfig") -> "ModelConfig | None":
    """The model's shape, where it is known without loading or fetching anything."""
    from trouper.actors.plan import scratch_model
    from trouper.learner.source import model_shape

    if config.model.scratch is not None:
        return scratch_model(config, len(config.chat.alphabet)) if config.chat.alphabet else None
    return None if config.model.source is None else model_shape(config.model.source)


# Errors


def report(error: BaseException) -> int:
    """Say on stderr what ended a command, and return the exit code for it.

    Of a group the first error of trouper's own counts; anything else is a bug and comes with its traceback, as does
    everything where `TROUPER_DEBUG` is set.
    """
    leaves = list(_leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        return _INTERRUPTED
    ours = next((leaf for leaf in leaves if isinstance(leaf, TrouperError)), None)
    if ours is None or os.environ.get("TROUPER_DEBUG"):
        traceback.print_exception(error)
    if ours is None:
        return 1
    print(f"trouper: {ours}", file=sys.stderr)
    # A configuration says all there is to say; why a run ended often stands in what it ended from.
    if not isinstance(ours, ConfigError):
        for cause in islice(causes(ours), 1, None):
            print(f"  because of {type(cause).__name__}: {cause}", file=sys.stderr)
    return ours.exit_code


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error

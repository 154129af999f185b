"""Environments in processes of their own: the run's side.

An environment has two processes: a keeper (`trouper.envs.keeper`), which in the end kills whatever descends from it,
and the worker (`trouper.envs.worker`), which runs the environment. Whatever happens to the worker, a call to it ends at
once; whatever happens to the run, SIGKILL included, the keeper's lifeline closes and nothing is left behind.

Does not know deadlines or retries: a call that is cancelled leaves processes in a state that nobody knows, and `close`
kills them.
"""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import trio

from trouper.actors.config import Environment as Section
from trouper.channels import ConfigError, EnvironmentFailure, RunError, Task
from trouper.envs import StepResult, Tool, ToolResult, keeper, load_factory, load_object
from trouper.envs.worker import ANSWERS, HEADER, Made, Raised, size_problem

KILL_GRACE = 5.0
"""Seconds that a keeper is waited for while it kills; one that needs longer goes on without us."""

_DECODERS = {what: msgspec.msgpack.Decoder(answer) for what, answer in ANSWERS.items()}


class ChildTraceback(Exception):
    """The traceback of an error in another process, as text: the cause of the `EnvironmentFailure` that tells of it."""


class ProcessEnvironment:
    """An environment that runs in a process of its own; its methods are those of `CheckedEnvironment`.

    They raise `EnvironmentFailure`, with kind `env_died` when the process is gone, and `RunError` when the environment
    raised one. One call at a time; when one was cancelled or the process is gone, only `close` is left.
    """

    name: str
    """What messages call it."""
    tools: tuple[Tool, ...]
    """What `call_tool` accepts."""
    judges = True
    """`score` has to ask there."""

    def __init__(self, section: Section, process: trio.Process, talk: socket.socket, lifeline: socket.socket) -> None:
        self.name = section.name
        self.tools = ()
        self._process = process
        self._talk = trio.SocketStream(trio.socket.from_stdlib_socket(talk))
        self._lifeline = trio.SocketStream(trio.socket.from_stdlib_socket(lifeline))
        self._last_words = b""
        self._answers = True  # whether a call would be answered: none is on its way, and none was given up
        self._steps = 0

    @classmethod
    async def start(cls, section: Section) -> "ProcessEnvironment":
        """Start the processes and make the environment there.

        They see our environment variables and `sys.path`. JAX stays off the accelerator, which is the run's, and
        `OMP_NUM_THREADS` is 1 unless it is set, since many of them share the cores.

        Args:
            section: the `[environment]` section: what to make, for which async library, within which limits.
        """
        with contextlib.ExitStack() as far, contextlib.ExitStack() as near:
            (talk, far_talk), (lifeline, far_lifeline) = socket.socketpair(), socket.socketpair()
            for mine, theirs in ((talk, far_talk), (lifeline, far_lifeline)):
                near.callback(mine.close)
                far.callback(theirs.close)
            order = {
                "talk": far_talk.fileno(),
                "lifeline": far_lifeline.fileno(),
                "parent": os.getpid(),
                "path": [entry or os.getcwd() for entry in sys.path],
                "async_library": section.async_library,
                "max_memory_mib": section.max_memory_mib,
                "max_cpu_seconds": section.max_cpu_seconds,
                "max_processes": section.max_processes,
            }
            process = await trio.lowlevel.open_process(
                [sys.executable, "-P", keeper.__file__, json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(far_talk.fileno(), far_lifeline.fileno()),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, "JAX_PLATFORMS": "cpu"},
            )
            environment = cls(section, process, talk, lifeline)
            near.pop_all()
        try:
            made: Made = await environment._ask("create", section.name, section.arguments)
        except BaseException:
            await environment._end()
            raise
        environment.name, environment.tools = made.name, made.tools
        return environment

    async def reset(self, task: Task, seed: int) -> str:
        """Begin; returns the first observation."""
        self._steps = 0
        observation: str = await self._ask("reset", task, seed)
        return observation

    async def step(self, action: str) -> StepResult:
        """Act."""
        self._steps += 1
        result: StepResult = await self._ask("step", action)
        return result

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool; a call that does not fit is a result for the model."""
        result: ToolResult = await self._ask("call_tool", name, arguments)
        return result

    async def score(self, rewards: float) -> float | None:
        """What its `reward` method gives; `rewards`, the sum of the steps', where it has none."""
        score: float | None = await self._ask("score", rewards)
        return score

    async def close(self) -> None:
        """Have the environment closed and its process end, if it still answers; then kill what is left.

        When this is cancelled, everything is killed at once.
        """
        try:
            if self._answers:
                await self._ask("close")
                await self._listen()
        finally:
            await self._end()

    async def _ask(self, what: str, *arguments: Any) -> Any:
        frame = self._frame(what, arguments)
        self._answers = False
        try:
            await self._talk.send_all(frame)
            (size,) = HEADER.unpack(await self._exactly(HEADER.size))
            if problem := size_problem(size):
                raise EnvironmentFailure("env_died", f"{self.name} was killed in {what}: what it sent {problem}")
            answer = _DECODERS[what].decode(await self._exactly(size))
        except (trio.BrokenResourceError, EOFError):
            raise await self._death(f"step {self._steps}" if what == "step" else what) from None
        except msgspec.DecodeError as error:
            raise EnvironmentFailure(
                "env_died", f"{self.name} was killed in {what}: it sent no answer: {error}"
            ) from None
        self._answers = True
        if answer.raised is not None:
            raise _failure(answer.raised)
        return answer.value

    def _frame(self, what: str, arguments: tuple[Any, ...]) -> bytes:
        try:
            data = what.encode() + b"\n" + pickle.dumps(arguments)
        except Exception as error:  # whatever a payload's own code raises
            problem: str | None = f"cannot be sent to a process: {type(error).__name__}: {error}"
        else:
            problem = size_problem(len(data))
        if problem is not None:
            raise EnvironmentFailure("env_error", f"{what}: what the environment is given {problem}", retry=False)
        return HEADER.pack(len(data)) + data

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = await self._talk.receive_some(min(size - len(data), 1 << 16))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    async def _death(self, doing: str) -> EnvironmentFailure:
        """What is known of the worker's end, once nothing is left of it."""
        with trio.move_on_after(KILL_GRACE, shield=True):
            await self._listen()
        await self._end()
        reason, _, output = self._last_words.decode(errors="replace").partition("\n")
        shown = f"; last output: {output.strip()}" if output.strip() else ""
        return EnvironmentFailure("env_died", f"{self.name} died in {doing}: {reason or 'it hung up'}{shown}")

    async def _listen(self) -> None:
        """Wait for the keeper to end; it first says how the worker ended."""
        with contextlib.suppress(trio.BrokenResourceError):
            while part := await self._lifeline.receive_some():
                self._last_words += part
        await self._process.wait()

    async def _end(self) -> None:
        """Let go of the lifeline, and wait until the keeper has killed what there is."""
        self._answers = False
        with trio.move_on_after(KILL_GRACE, shield=True):
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self._lifeline.send_eof()
                await self._listen()
            await self._process.wait()
        self._talk.socket.close()
        self._lifeline.socket.close()


def process_factory(section: Section, make: str | Callable[..., Any]) -> Callable[[], Awaitable[ProcessEnvironment]]:
    """What makes environments in processes of their own, once it is known that they can be made there.

    Args:
        section: the `[environment]` section.
        make: what `section.name` stands for: this name, or an object given from Python.

    Raises:
        ConfigError: it cannot be found or called, another process could not find it, or not be sent its arguments.
    """
    load_factory(make, section.arguments)
    advice = 'with environment.isolation = "process" it is made in another process'
    module = section.name.partition(":")[0]
    try:
        found = load_object(section.name)
    except ConfigError:
        found = None
    if module == "__main__" or (found != make and not isinstance(make, str)):
        raise ConfigError(
            f"environment {section.name!r} cannot be found by its name; {advice}: put it at the top of a module that "
            "can be imported"
        )
    try:
        pickle.dumps(section.arguments)
    except Exception as error:  # whatever the arguments' own code raises
        raise ConfigError(f"environment.arguments cannot be pickled ({error}); {advice}: give plain values") from error
    return partial(ProcessEnvironment.start, section)


def _failure(raised: Raised) -> EnvironmentFailure | RunError:
    if raised.kind is None:
        return RunError(raised.message)
    failure = EnvironmentFailure(raised.kind, raised.message, retry=raised.retry)
    if raised.traceback:
        failure.__cause__ = ChildTraceback(raised.traceback)
    return failure

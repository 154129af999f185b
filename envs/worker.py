"""The inner of an environment's two processes: makes the environment and answers one call after another.

Plain methods run in the main thread, where signal handlers and other event loops work; async ones on one event loop
in a thread of its own, which the first of them starts and which goes on between calls.

Calls come pickled, so that a payload is exactly what it is in the run's process. Answers go back as msgpack of known
types: the run takes data from an environment, never code. Knows neither deadlines nor who sends.
"""

import inspect
import math
import os
import pickle
import resource
import socket
import struct
import traceback
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, Generic, Literal, TypeVar

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal
from msgspec import Struct

from trouper.channels import EnvironmentFailure, RunError, TrouperError, causes, first_leaf
from trouper.envs.async_library import wrong_loop
from trouper.envs.checked import CheckedEnvironment
from trouper.envs.dotted import made
from trouper.envs.protocols import StepResult
from trouper.envs.tools import Tool, ToolResult

T = TypeVar("T")

HEADER = struct.Struct(">I")
"""A frame's length, before the frame."""

LONGEST_FRAME = 16 << 20
"""Most bytes of one call or answer."""

LONGEST_TRACEBACK = 20_000


class Made(Struct, frozen=True):
    """What is known of an environment once it is there."""

    name: str
    tools: tuple[Tool, ...]


class Raised(Struct, frozen=True):
    """What became of a call that raised.

    Attributes:
        kind: of the `EnvironmentFailure` that it is for the run; None for a `RunError`.
        message: the failure's.
        retry: the failure's.
        traceback: of code that is not ours, as text.
    """

    kind: str | None
    message: str
    retry: bool = True
    traceback: str = ""


class Answer(Struct, Generic[T], frozen=True):
    """What a call gave: `value`, unless it `raised`."""

    value: T | None = None
    raised: Raised | None = None


ANSWERS: dict[str, Any] = {
    "create": Answer[Made],
    "reset": Answer[str],
    "step": Answer[StepResult],
    "call_tool": Answer[ToolResult],
    "score": Answer[float],
    "close": Answer[None],
}
"""The calls, and the type of each one's answer."""


def size_problem(size: int) -> str | None:
    """Why a frame of so many bytes cannot be sent, if it cannot."""
    return None if size <= LONGEST_FRAME else f"has {size} bytes; at most {LONGEST_FRAME} pass between processes"


def work(
    talk: socket.socket, async_library: Literal["trio", "asyncio"], max_memory_mib: int, max_cpu_seconds: float
) -> None:
    """Answer calls until the environment is closed or nobody is there to call.

    Args:
        talk: where calls come from and answers go.
        async_library: what async methods are written for.
        max_memory_mib: address space; 0 is no limit.
        max_cpu_seconds: CPU time; 0 is no limit.
    """
    if max_memory_mib:
        _limit(resource.RLIMIT_AS, max_memory_mib << 20, 0)
    if max_cpu_seconds:
        _limit(resource.RLIMIT_CPU, math.ceil(max_cpu_seconds), 5)  # seconds between SIGXCPU and SIGKILL
    process = os.getpid()
    with ExitStack() as stack:
        worker = _Worker(async_library, stack)
        while (frame := _receive(talk)) is not None:
            name, _, arguments = frame.partition(b"\n")
            what = name.decode()
            try:
                data = _packed(worker.answer(what, pickle.loads(arguments)))
            # What `sys.exit`, asyncio's CancelledError and panics of Rust extensions raise are outcomes, too.
            except BaseException as error:
                raised = _raised(what, error, async_library, max_memory_mib)
                data = msgspec.msgpack.encode(Answer[None](raised=raised))
            if os.getpid() != process:  # a child that the environment forked has come back out of its code
                os._exit(0)
            talk.sendall(HEADER.pack(len(data)) + data)
            if what == "close":
                return


class _Worker:
    def __init__(self, async_library: str, stack: ExitStack) -> None:
        self._async_library = async_library
        self._stack = stack
        self._portal: BlockingPortal | None = None
        self._environment: CheckedEnvironment | None = None

    def answer(self, what: str, arguments: tuple[Any, ...]) -> Any:
        if what == "create":
            name, given = arguments
            self._environment = CheckedEnvironment(self._call(lambda: made(name, given)), self._invoke)
            return Made(self._environment.name, self._environment.tools)
        return _settled(getattr(self._environment, what)(*arguments))

    async def _invoke(self, function: Callable[[], Any]) -> Any:
        return self._call(function)

    def _call(self, function: Callable[[], Any]) -> Any:
        value = function()
        if not inspect.isawaitable(value):
            return value
        if self._portal is None:
            self._portal = self._stack.enter_context(start_blocking_portal(self._async_library))
        return self._portal.call(lambda: value)


def _settled(coroutine: Coroutine[Any, Any, T]) -> T:
    """The value of a coroutine that never waits: the checks are async only for those who call across threads."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("a check waited")


def _packed(value: Any) -> bytes:
    data = msgspec.msgpack.encode(Answer(value=value))
    problem = size_problem(len(data))
    if problem is not None:
        raise EnvironmentFailure("env_error", f"the answer {problem}; a model cannot read so much")
    return data


def _raised(what: str, error: BaseException, async_library: str, max_memory_mib: int) -> Raised:
    error = first_leaf(error)
    *_, root = causes(error)
    trace = "" if isinstance(root, TrouperError) else "".join(traceback.format_exception(root))[-LONGEST_TRACEBACK:]
    if isinstance(error, EnvironmentFailure):
        return Raised(error.kind, str(error), error.retry, trace)
    if isinstance(error, RunError):
        return Raised(None, str(error))
    text = f"{what}: {type(error).__name__}: {error}"
    if not isinstance(error, Exception):
        text = f"{what}: RuntimeError: {type(error).__name__}: {error}"
    if hint := wrong_loop(error, async_library):
        text = f"{text}. {hint}"
    if isinstance(error, MemoryError) and max_memory_mib:
        return Raised("env_died", f"{text}; environment.max_memory_mib = {max_memory_mib}", traceback=trace)
    return Raised("env_error", text, traceback=trace)


def _limit(kind: int, amount: int, beyond: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        amount, beyond = min(amount, hard), min(beyond, hard - min(amount, hard))
    resource.setrlimit(kind, (amount, amount + beyond))


def _receive(talk: socket.socket) -> bytes | None:
    header = _exactly(talk, HEADER.size)
    return None if header is None else _exactly(talk, *HEADER.unpack(header))


def _exactly(talk: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = talk.recv(min(size - len(data), 1 << 16))
        if not part:
            return None
        data += part
    return bytes(data)

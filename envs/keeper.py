"""The outer of an environment's two processes: it lets nothing outlive the environment, or the run.

Run as a script by `trouper.actors.process`. It forks at once: the inner process becomes the environment's worker, this
one stays small, waits, and in the end kills every process that descends from it. Orphans come to it rather than to
init (Linux: `PR_SET_CHILD_SUBREAPER`), so daemons that left their session are found as well. Where there is no
`/proc` (macOS), only the worker's process group is killed and processes are not counted.

Only the standard library is imported before the fork. This is no sandbox: code that means harm can kill its keeper.
"""

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

TAIL = 2000
"""Bytes of the environment's last output that are kept."""

LOOK = 0.25
"""Seconds between two counts of processes, and between two looks at whether the parent is still there."""

CALM = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are the parent's to act on: it closes the lifeline."""


class Descendants:
    """The processes below this one.

    A process read once is not read again: nothing joins or leaves a family, since orphans stay with the keeper.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        self._keeper = os.getpid()
        self._others = {0}

    def look(self) -> set[int]:
        """Look for new ones and return them."""
        listed = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self.found &= listed
        self._others &= listed | {0}
        fresh = {pid: _parent(pid) for pid in listed - self.found - self._others - {self._keeper}}
        new: set[int] = set()
        for family, heads in ((new, self.found | {self._keeper}), (self._others, self._others.copy())):
            while heads:
                heads = {pid for pid, parent in fresh.items() if parent in heads}
                family |= heads
        # What is in neither lost its parent while we looked: the next look tells whose it is.
        self.found |= new
        return new


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


class Keeper:
    """Watches over the worker.

    Args:
        worker: its process id.
        lifeline: closed by the parent, or by its death; takes the last words.
        output: what the environment prints.
        max_processes: more than this are the end of all.
    """

    def __init__(self, worker: int, lifeline: socket.socket, output: int, max_processes: int) -> None:
        self._worker = worker
        self._lifeline = lifeline
        self._output = output
        self._max_processes = max_processes
        self._tail = b""
        self._end: str | None = None
        self._groups = {worker}
        self._family = Descendants() if os.path.exists("/proc/self/stat") else None

    def keep(self, parent: int) -> None:
        """Wait for the end, kill what is left, and say how it ended."""
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.set_blocking(self._output, False)
        poll = select.poll()
        for descriptor in (self._lifeline.fileno(), self._output, wake):
            poll.register(descriptor, select.POLLIN)
        self._reap()  # whoever ended before the signal was wired
        next_look = 0.0
        while self._end is None:
            ready = {descriptor for descriptor, _ in poll.poll(1000 * LOOK)}
            if self._lifeline.fileno() in ready or os.getppid() != parent:
                self._end = "it was told to end"
            if self._output in ready and not self._drain():
                poll.unregister(self._output)
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._end is None and self._family is not None and time.monotonic() >= next_look:
                self._count(self._family)
                next_look = time.monotonic() + LOOK
        self._kill()
        while self._drain():
            pass
        with contextlib.suppress(OSError):  # nobody may be there to hear it
            self._lifeline.sendall(self._end.encode() + b"\n" + self._tail)

    def _drain(self) -> bool:
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        self._tail = (self._tail + data)[-TAIL:]
        return bool(data)

    def _count(self, family: Descendants) -> None:
        family.look()
        if len(family.found) > self._max_processes:
            self._end = f"it had {len(family.found)} processes; environment.max_processes = {self._max_processes}"

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._bury(*ended)

    def _bury(self, pid: int, status: int) -> None:
        if pid == self._worker and self._end is None:
            self._end = _how_it_ended(os.waitstatus_to_exitcode(status))

    def _kill(self) -> None:
        """Kill all descendants: until this process has no child there may be more."""
        with contextlib.suppress(ChildProcessError):
            while True:
                self._kill_known()
                self._bury(*os.waitpid(-1, 0))
                self._reap()

    def _kill_known(self) -> None:
        known = {self._worker}
        if self._family is not None:
            new = self._family.found | self._family.look()
            while new:  # what is stopped forks no more, so this ends
                self._groups |= {group for pid in new if (group := _group(pid))} - {os.getpgrp()}
                self._signal(new, signal.SIGSTOP)
                new = self._family.look()
            known = self._family.found
        self._signal(known, signal.SIGKILL)

    def _signal(self, processes: set[int], number: signal.Signals) -> None:
        """To each process, and to whole groups: nothing slips out of a group by forking while it is signalled."""
        for target in (*(-group for group in self._groups), *processes):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(target, number)


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGXCPU:
        return "signal SIGXCPU: it used the CPU time that environment.max_cpu_seconds allows"
    return f"signal {signal.Signals(-code).name}"


def main() -> None:
    """Fork; be the keeper in one process and the worker in the other."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    talk, lifeline = (socket.socket(fileno=order[name]) for name in ("talk", "lifeline"))
    for end in (talk, lifeline):
        end.set_inheritable(False)
    keeper, linux = os.getpid(), sys.platform == "linux"
    if linux:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in CALM:
        signal.signal(number, signal.SIG_IGN)
    output, printed = os.pipe()
    worker = os.fork()
    if worker:
        talk.close()
        os.close(printed)
        with contextlib.suppress(PermissionError):  # as root: else a crowd of processes could starve it
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        Keeper(worker, lifeline, output, order["max_processes"]).keep(order["parent"])
        return
    if linux:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)
    os.setsid()  # so that killing its own group leaves the keeper alive
    for number in CALM:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    lifeline.close()
    os.close(output)
    for descriptor in (1, 2):
        os.dup2(printed, descriptor)
    os.close(printed)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that a crash loses no line
    faulthandler.enable()
    sys.path[:] = order["path"]

    from trouper.envs.worker import work

    work(talk, order["async_library"], order["max_memory_mib"], order["max_cpu_seconds"])


if __name__ == "__main__":
    main()

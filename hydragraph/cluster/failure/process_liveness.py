"""Whether a process of this host lives, seen from outside: it need not answer, and its interpreter may be busy.

A rank that computes for a minute without letting go of the interpreter lock beats no heart, and is well; one that was
stopped (SIGSTOP, a debugger) or has ended is not, and the system knows.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_PROC = Path("/proc")
_STOPPED = frozenset("Tt")  # by a signal; by a debugger
_ENDED = frozenset("ZXx")  # a zombie has ended, though nobody has asked how


class ProcessState(Enum):
    """What the system says of a process."""

    RUNNING = "running"  # or sleeping, or waiting for a disk
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True)
class WatchedProcess:
    """A process of this machine.

    Attributes:
        pid: the system's number for it.
        started: when it began, in the system's own ticks, because numbers are used again; 0 where that is not known.
    """

    pid: int
    started: int = 0

    @staticmethod
    def own() -> WatchedProcess:
        """Return this process."""
        return WatchedProcess.of(os.getpid())

    @staticmethod
    def of(pid: int) -> WatchedProcess:
        """Return the process that has a number now."""
        status = _status(pid)
        return WatchedProcess(pid, 0 if status is None else status[1])

    def state(self) -> ProcessState:
        """Ask the system; about 20 us. Where it has no /proc, a stopped process cannot be told from a running one."""
        return self.look()[0]

    def look(self) -> tuple[ProcessState, int]:
        """Return its state, and what it has computed since it began, in the system's ticks (0: that is not known)."""
        if sys.platform != "linux":
            return _exists(self.pid), 0
        status = _status(self.pid)
        if status is None or (self.started and status[1] != self.started) or status[0] in _ENDED:
            return ProcessState.ENDED, 0
        return (ProcessState.STOPPED if status[0] in _STOPPED else ProcessState.RUNNING), status[2]


def _status(pid: int) -> tuple[str, int, int] | None:
    """Return the letter of a process's state, when it began, and its CPU time in ticks; None where there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # its name, in parentheses, may hold anything
    return fields[0], int(fields[19]), int(fields[11]) + int(fields[12])


def _exists(pid: int) -> ProcessState:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ProcessState.ENDED
    except PermissionError:
        pass
    return ProcessState.RUNNING


def machine() -> str:
    """Name what processes share that can see each other and use one network: a host, or a container of it."""
    parts = [socket.gethostname()]
    for place in (_PROC / "sys/kernel/random/boot_id", _PROC / "self/ns/pid", _PROC / "self/ns/net"):
        try:
            parts.append(os.readlink(place) if place.is_symlink() else place.read_text().strip())
        except OSError:
            continue
    return "|".join(parts)

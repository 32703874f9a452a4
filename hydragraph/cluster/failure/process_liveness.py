"""Liveness of processes on this host."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_PROC = Path("/proc")
# T: stopped by a signal; t: stopped by a debugger
_STOPPED = frozenset("Tt")
# Z: zombie, which has ended; X, x: dead
_ENDED = frozenset("ZXx")


class ProcessState(Enum):
    """State of a process; without /proc, stopped processes appear to run."""

    # Also asleep or waiting for a disk
    RUNNING = "running"
    STOPPED = "stopped"
    ENDED = "ended"


@dataclass(frozen=True)
class WatchedProcess:
    """A process of this machine.

    Attributes:
        started: start time in system ticks, which distinguishes reused ids; 0 if unknown.
    """

    pid: int
    started: int = 0

    @staticmethod
    def own() -> WatchedProcess:
        return WatchedProcess.of(os.getpid())

    @staticmethod
    def of(pid: int) -> WatchedProcess:
        status = _status(pid)
        return WatchedProcess(pid, 0 if status is None else status[1])

    def state(self) -> ProcessState:
        return self.look()[0]

    def look(self) -> tuple[ProcessState, int]:
        """Return the state and, for a stopped process, its context switches (else 0)."""
        if sys.platform != "linux":
            return _exists(self.pid), 0
        status = _status(self.pid)
        if status is None or (self.started and status[1] != self.started) or status[0] in _ENDED:
            return ProcessState.ENDED, 0
        return (ProcessState.STOPPED, _switches(self.pid)) if status[0] in _STOPPED else (ProcessState.RUNNING, 0)


def _status(pid: int) -> tuple[str, int] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name, in parentheses, may contain any character
    # /proc/PID/stat from field 3 on: fields[0] is the state, fields[19] the start time
    return fields[0], int(fields[19])


def _switches(pid: int) -> int:
    with suppress(OSError):
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return 0


def _exists(pid: int) -> ProcessState:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ProcessState.ENDED
    except PermissionError:
        pass
    return ProcessState.RUNNING


def machine() -> str:
    """Return an identifier of the host or container and its namespaces."""
    parts = [socket.gethostname()]
    for place in (_PROC / "sys/kernel/random/boot_id", _PROC / "self/ns/pid", _PROC / "self/ns/net"):
        try:
            parts.append(os.readlink(place) if place.is_symlink() else place.read_text().strip())
        except OSError:
            continue
    return "|".join(parts)

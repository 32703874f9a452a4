"""Board in shared memory with the progress of one host's ranks."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydragraph.cluster.failure.time_limits import PROGRESS_S


@dataclass(frozen=True)
class RankProgress:
    """Progress of one rank.

    Attributes:
        moves: number of position updates.
        instruction: index of the current instruction; None outside a step.
        call: current call outside a step; "" in other code.
    """

    moves: int
    step: int
    instruction: int | None
    call: str
    waiting: bool
    left: bool


class _Line(ctypes.Structure):
    # 256 bytes, a multiple of a cache line
    _fields_ = (
        ("moves", ctypes.c_int64),
        ("step", ctypes.c_int64),
        # index of the current instruction + 1, or 0 outside a step
        ("index", ctypes.c_int64),
        ("progress_s", ctypes.c_double),
        ("waiting", ctypes.c_bool),
        ("left", ctypes.c_bool),
        # Whether the rank has closed its watch, also after a fault
        ("finished", ctypes.c_bool),
        ("call", ctypes.c_char * 221),
    )


class HeartbeatBoard:
    """Shared memory of one host, with a line for each rank, and a last line for `progress_s`.

    Args:
        descriptor: open file of the board's size, which the board closes.

    Attributes:
        lines: each rank's line; a rank writes only its own.
    """

    def __init__(self, descriptor: int, ranks: int, address: str, remove: Callable[[], None] | None = None) -> None:
        self.ranks = ranks
        self.address = address
        self._descriptor = descriptor
        self._remove = remove
        self.lines = (_Line * (ranks + 1)).from_buffer(mmap.mmap(descriptor, self._size(ranks)))
        self._moves = 0

    @classmethod
    def _size(cls, ranks: int) -> int:
        return (ranks + 1) * ctypes.sizeof(_Line)

    @classmethod
    def make(cls, ranks: int) -> HeartbeatBoard:
        remove: Callable[[], None] | None = None
        if sys.platform == "linux":
            descriptor = os.memfd_create("hydragraph-board", os.MFD_CLOEXEC)
            address = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            folder = Path(tempfile.mkdtemp(prefix="hydragraph-"))
            address = str(folder / "board")
            remove = partial(shutil.rmtree, folder, ignore_errors=True)
            descriptor = os.open(address, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, cls._size(ranks))
        board = cls(descriptor, ranks, address, remove)
        board.progress_s = PROGRESS_S
        return board

    @classmethod
    def open(cls, address: str, ranks: int) -> HeartbeatBoard:
        """Open another process's board; raise an OSError if the board is not this user's."""
        descriptor = os.open(address, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size == cls._size(ranks)
        if not ours:
            os.close(descriptor)
            raise OSError(f"{address} is not a progress board of this user for {ranks} ranks")
        return cls(descriptor, ranks, address)

    def place(self, rank: int, step: int, instruction: int | None) -> None:
        line = self.lines[rank]
        self._moves += 1
        line.moves = self._moves
        line.step = step
        line.index = 0 if instruction is None else instruction + 1

    def call(self, rank: int, what: str) -> None:
        self.lines[rank].call = what.encode()[: _Line.call.size - 1]

    def read(self, rank: int) -> RankProgress:
        line = self.lines[rank]
        index = line.index
        call = line.call.decode(errors="replace")
        return RankProgress(line.moves, line.step, index - 1 if index else None, call, line.waiting, line.left)

    @property
    def progress_s(self) -> float:
        return float(self.lines[self.ranks].progress_s)

    @progress_s.setter
    def progress_s(self, seconds: float) -> None:
        self.lines[self.ranks].progress_s = seconds

    def close(self) -> None:
        # Unmaps the memory
        del self.lines
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        if self._remove is not None:
            self._remove()

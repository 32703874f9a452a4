"""Progress of the ranks of one host, in shared memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import stat
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hydragraph.cluster.failure.time_limits import PROGRESS_S


@dataclass(frozen=True)
class RankProgress:
    """One rank's line of the board.

    Attributes:
        moves: number of position updates.
        instruction: None outside a step.
        call: current call outside a step; "" in other code.
    """

    moves: int
    step: int
    instruction: int | None
    call: str
    waiting: bool
    left: bool


class Board:
    """Memory shared by the ranks of one host: a line for each rank (`RankProgress`), then one for `progress_s`.

    Args:
        descriptor: file of exactly the board's size; the board takes ownership.
    """

    _LINE = 256  # bytes: a multiple of a cache line
    _PLACE = struct.Struct("qqq")  # moves, the step, the instruction's index + 1
    _SECONDS = struct.Struct("d")
    # Offsets within a line, after _PLACE.
    _WAITING = 24  # flag: the rank waits for others
    _LEFT = 25  # flag: it no longer needs the others
    _FINISHED = 26  # flag: its watch is closed, even after a fault
    _CALL = 27  # one byte of length, then the current call

    def __init__(self, descriptor: int, ranks: int, address: str, remove: Callable[[], None] | None = None) -> None:
        self.ranks = ranks
        self.address = address
        self._descriptor = descriptor
        self._remove = remove
        self._memory = mmap.mmap(descriptor, self._size(ranks))
        self._moves = 0

    @classmethod
    def _size(cls, ranks: int) -> int:
        return (ranks + 1) * cls._LINE

    @classmethod
    def make(cls, ranks: int) -> Board:
        """Create a board that exists as long as a process has it open."""
        remove: Callable[[], None] | None = None
        if sys.platform == "linux":
            descriptor = os.memfd_create("hydragraph-board", os.MFD_CLOEXEC)
            address = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            folder = Path(tempfile.mkdtemp(prefix="hydragraph-"))  # accessible only by this user
            address = str(folder / "board")
            remove = partial(shutil.rmtree, folder, ignore_errors=True)
            descriptor = os.open(address, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, cls._size(ranks))
        board = cls(descriptor, ranks, address, remove)
        board.progress_s = PROGRESS_S
        return board

    @classmethod
    def open(cls, address: str, ranks: int) -> Board:
        """Open a board that another process created.

        Raises:
            OSError: it does not exist, or is not a board of this user.
        """
        descriptor = os.open(address, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size == cls._size(ranks)
        if not ours:
            os.close(descriptor)
            raise OSError(f"{address} is not a board of this user with {ranks} lines")
        return cls(descriptor, ranks, address)

    def place(self, rank: int, step: int, instruction: int | None) -> None:
        """Record a rank's new position in about a microsecond; only that rank may call it."""
        self._moves += 1
        index = 0 if instruction is None else instruction + 1
        self._PLACE.pack_into(self._memory, rank * self._LINE, self._moves, step, index)

    def call(self, rank: int, what: str) -> None:
        """Record what a rank does outside a step."""
        text = what.encode()[: self._LINE - self._CALL - 1]
        start = rank * self._LINE + self._CALL
        self._memory[start : start + 1 + len(text)] = bytes((len(text),)) + text

    def waits(self, rank: int, waiting: bool) -> None:
        """Record whether a rank waits for others."""
        self._memory[rank * self._LINE + self._WAITING] = waiting

    def leave(self, rank: int) -> None:
        """Record that a rank no longer needs the others."""
        self._memory[rank * self._LINE + self._LEFT] = True

    def finish(self, rank: int) -> None:
        """Record that a rank has closed its watch."""
        self._memory[rank * self._LINE + self._FINISHED] = True

    def finished(self, rank: int) -> bool:
        """Return whether a rank has closed its watch."""
        return bool(self._memory[rank * self._LINE + self._FINISHED])

    def read(self, rank: int) -> RankProgress:
        """Return a rank's line."""
        start = rank * self._LINE
        moves, step, index = self._PLACE.unpack_from(self._memory, start)
        length = self._memory[start + self._CALL]
        text = self._memory[start + self._CALL + 1 : start + self._CALL + 1 + length].decode(errors="replace")
        flags = bool(self._memory[start + self._WAITING]), bool(self._memory[start + self._LEFT])
        return RankProgress(moves, step, index - 1 if index else None, text, *flags)

    @property
    def progress_s(self) -> float:
        """Limit in seconds for a run without progress of any rank."""
        (seconds,) = self._SECONDS.unpack_from(self._memory, self.ranks * self._LINE)
        return float(seconds)

    @progress_s.setter
    def progress_s(self, seconds: float) -> None:
        self._SECONDS.pack_into(self._memory, self.ranks * self._LINE, seconds)

    def close(self) -> None:
        """Close the board."""
        self._memory.close()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        if self._remove is not None:
            self._remove()

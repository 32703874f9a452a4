"""What the ranks of one host are doing, in memory that they share."""

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
from pathlib import Path

PROGRESS_S = 600.0  # without progress of any rank: longer than what one instruction takes anywhere


@dataclass(frozen=True)
class Progress:
    """One rank's line of the board.

    Attributes:
        moves: how often it has moved on; a rank that stands still writes the same number.
        step: the step it is in, or was in last.
        instruction: the index of the instruction it is at; None outside a step.
        call: what it is doing outside a step, in words; "" in code that is not ours.
        waiting: whether it waits for other ranks.
        left: whether it has said that it needs the others no more.
    """

    moves: int
    step: int
    instruction: int | None
    call: str
    waiting: bool
    left: bool


class Board:
    """Memory shared by the ranks of one host, with a line for each; it has no name in any folder where that can be.

    After the lines of all ranks comes one for what holds for all: `progress_s`.

    Args:
        descriptor: of a file that is as long as its lines; taken over.
        ranks: how many ranks write on it, a line each.
        address: where another process of the same user opens it.
        remove: called when the process that made it lets go of it.
    """

    _LINE = 256  # bytes: a multiple of a cache line, so that ranks do not disturb each other
    _PLACE = struct.Struct("qqq")  # moves, the step, the instruction's index + 1
    _SECONDS = struct.Struct("d")
    # Bytes from the start of a line, behind the three numbers of _PLACE.
    _WAITING = 24  # a flag: it waits for other ranks
    _LEFT = 25  # a flag: it needs the others no more
    _FINISHED = 26  # a flag: its watch is closed, after a fault too
    _CALL = 27  # the length of a text, one byte, and the text: the call that it is in

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
        """Make one, which lasts as long as a process has it open."""
        if sys.platform == "linux":
            descriptor = os.memfd_create("hydragraph-board", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, cls._size(ranks))
            board = cls(descriptor, ranks, f"/proc/{os.getpid()}/fd/{descriptor}")
            board.progress_s = PROGRESS_S
            return board
        folder = Path(tempfile.mkdtemp(prefix="hydragraph-"))  # for this user's eyes only
        path = folder / "board"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, cls._size(ranks))
        board = cls(descriptor, ranks, str(path), lambda: shutil.rmtree(folder, ignore_errors=True))
        board.progress_s = PROGRESS_S
        return board

    @classmethod
    def open(cls, address: str, ranks: int) -> Board:
        """Open what another process made.

        Raises:
            OSError: it is not there (that process has ended), or is no board of this user's.
        """
        descriptor = os.open(address, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_size == cls._size(ranks)
        if not ours:
            os.close(descriptor)
            raise OSError(f"{address} is no board of this user's with {ranks} lines")
        return cls(descriptor, ranks, address)

    def place(self, rank: int, step: int, instruction: int | None) -> None:
        """Note where a rank is, which has moved on; only that rank may call it; takes about a microsecond."""
        self._moves += 1
        index = 0 if instruction is None else instruction + 1
        self._PLACE.pack_into(self._memory, rank * self._LINE, self._moves, step, index)

    def call(self, rank: int, what: str) -> None:
        """Note what a rank does outside a step."""
        text = what.encode()[: self._LINE - self._CALL - 1]
        start = rank * self._LINE + self._CALL
        self._memory[start : start + 1 + len(text)] = bytes((len(text),)) + text

    def waits(self, rank: int, waiting: bool) -> None:
        """Note whether a rank waits for others."""
        self._memory[rank * self._LINE + self._WAITING] = waiting

    def leave(self, rank: int) -> None:
        """Note that a rank needs the others no more."""
        self._memory[rank * self._LINE + self._LEFT] = True

    def finish(self, rank: int) -> None:
        """Note that a rank has closed its watch."""
        self._memory[rank * self._LINE + self._FINISHED] = True

    def finished(self, rank: int) -> bool:
        """Return whether a rank has closed its watch, whether or not there was a fault."""
        return bool(self._memory[rank * self._LINE + self._FINISHED])

    def read(self, rank: int) -> Progress:
        """Return what a rank has written."""
        start = rank * self._LINE
        moves, step, index = self._PLACE.unpack_from(self._memory, start)
        length = self._memory[start + self._CALL]
        text = self._memory[start + self._CALL + 1 : start + self._CALL + 1 + length].decode(errors="replace")
        flags = bool(self._memory[start + self._WAITING]), bool(self._memory[start + self._LEFT])
        return Progress(moves, step, index - 1 if index else None, text, *flags)

    @property
    def progress_s(self) -> float:
        """After how long without progress of any rank the run has failed, in seconds."""
        (seconds,) = self._SECONDS.unpack_from(self._memory, self.ranks * self._LINE)
        return float(seconds)

    @progress_s.setter
    def progress_s(self, seconds: float) -> None:
        self._SECONDS.pack_into(self._memory, self.ranks * self._LINE, seconds)

    def close(self) -> None:
        """Let go of it; reading and writing end."""
        self._memory.close()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        if self._remove is not None:
            self._remove()

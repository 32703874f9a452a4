"""What the ranks of one host are doing, in memory that they share, and for how long each has been silent."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path


@dataclass(frozen=True)
class Progress:
    """One rank's line of the board.

    Attributes:
        beats: heartbeats so far; 0 where the rank does not write on this board.
        step: the step it is in, or was in last.
        instruction: the index of the instruction it is at; None outside a step.
    """

    beats: int
    step: int
    instruction: int | None


class Board:
    """A small file in memory, shared by the ranks of one host, where each writes what it is doing.

    Args:
        path: the file; made where it does not exist.
        ranks: how many lines it has.
    """

    _BEATS = struct.Struct("q")
    _PLACE = struct.Struct("qq")  # the step, and the instruction's index + 1
    _LINE = 64  # bytes: a cache line, so that ranks do not disturb each other

    def __init__(self, path: Path, ranks: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, ranks * self._LINE)
            self._memory = mmap.mmap(descriptor, ranks * self._LINE)
        finally:
            os.close(descriptor)

    def beat(self, rank: int) -> None:
        """Adds one to a rank's heartbeat; only that rank may call it."""
        (beats,) = self._BEATS.unpack_from(self._memory, rank * self._LINE)
        self._BEATS.pack_into(self._memory, rank * self._LINE, beats + 1)

    def place(self, rank: int, step: int, instruction: int | None) -> None:
        """Notes where a rank is; takes less than a microsecond."""
        index = 0 if instruction is None else instruction + 1
        self._PLACE.pack_into(self._memory, rank * self._LINE + self._BEATS.size, step, index)

    def read(self, rank: int) -> Progress:
        """What a rank has written."""
        (beats,) = self._BEATS.unpack_from(self._memory, rank * self._LINE)
        step, index = self._PLACE.unpack_from(self._memory, rank * self._LINE + self._BEATS.size)
        return Progress(beats, step, index - 1 if index else None)

    def close(self) -> None:
        """Unmaps the file."""
        self._memory.close()


class Pulse:
    """For how long each rank of this host has not beaten, counted in this process's own polls.

    Own polls and not the clock: when the whole job is suspended and resumed, nobody has missed a beat.

    Args:
        board: where they beat.
        ranks: of this host.
        interval: between two polls, and two beats.
    """

    def __init__(self, board: Board, ranks: tuple[int, ...], interval: timedelta) -> None:
        self._board, self._interval = board, interval
        self._beats = dict.fromkeys(ranks, 0)
        self._missed = dict.fromkeys(ranks, 0)

    def poll(self) -> None:
        """Looks which ranks have beaten since the last time."""
        for rank, before in self._beats.items():
            beats = self._board.read(rank).beats
            # A rank that never beat writes on another board (or has none yet): nothing is known of it.
            self._missed[rank] = self._missed[rank] + 1 if beats == before and beats > 0 else 0
            self._beats[rank] = beats

    def stopped(self, duration: timedelta) -> int | None:
        """The rank that has been silent longest, if for so long at least."""
        rank = max(self._missed, key=self._missed.__getitem__, default=None)
        return rank if rank is not None and self._missed[rank] * self._interval >= duration else None

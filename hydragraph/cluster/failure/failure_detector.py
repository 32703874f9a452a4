"""Failure detector: decides from observations which rank has failed.

A rank is accused when
- its process has ended without announcing that it leaves;
- its process has been stopped for `stopped_s` while another process ran (`FailureDetector`);
- no rank has made progress for `progress_s` while some wait (`Stall`): a rank that does not wait is accused, or the
  last rank if all wait.

At most half a second counts between observations, because the detector's process may have been stopped.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from hydragraph.cluster.failure.heartbeat_board import RankProgress
from hydragraph.cluster.failure.process_liveness import ProcessState, WatchedProcess
from hydragraph.cluster.failure.time_limits import ENDED_S, STOPPED_S

PAUSE_S = 0.5
ENDED = "its process has ended"


class Stopwatch:
    def __init__(self) -> None:
        self._before = time.monotonic()

    def elapsed(self) -> float:
        now = time.monotonic()
        elapsed = min(now - self._before, PAUSE_S)
        self._before = now
        return elapsed


@dataclass(frozen=True)
class RankObservation:
    state: ProcessState
    progress: RankProgress
    switches: int = 0


def seen_of(process: WatchedProcess, progress: RankProgress) -> RankObservation:
    state, switches = process.look()
    return RankObservation(state, progress, switches)


@dataclass(frozen=True)
class Accusation:
    rank: int
    error: str
    stalled: bool = False


class FailureDetector:
    def __init__(self, stopped_s: float = STOPPED_S) -> None:
        self._limit_s = stopped_s
        # _ended, _stopped: rank -> seconds for which it was seen ended or stopped
        # _switches: rank -> context switches last seen; _left: ranks that ended
        #   regularly
        self._ended: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._switches: dict[int, int] = {}
        self._left: set[int] = set()

    def look(
        self, elapsed: float, seen: Mapping[int, RankObservation], *, others_run: bool = False
    ) -> Accusation | None:
        """Add observations after `elapsed` seconds; return an accusation, or None.

        Args:
            others_run: whether any process outside `seen` runs.
        """
        elapsed = min(elapsed, PAUSE_S)
        running = others_run or any(sighting.state is ProcessState.RUNNING for sighting in seen.values())
        for rank, sighting in seen.items():
            ended = sighting.state is ProcessState.ENDED
            # If all processes are stopped, the job was suspended, and no rank is at fault.
            stopped = sighting.state is ProcessState.STOPPED and running
            # A process stopped for 95 of every 100 ms may always look stopped, but context switches grow.
            still = self._switches.get(rank, sighting.switches) == sighting.switches
            self._switches[rank] = sighting.switches
            if ended and sighting.progress.left:
                self._left.add(rank)
            self._ended[rank] = self._ended.get(rank, 0.0) + elapsed if ended and not sighting.progress.left else 0.0
            self._stopped[rank] = self._stopped.get(rank, 0.0) + elapsed if stopped and still else 0.0
        for rank, seconds in self._ended.items():
            # The launcher may first report how the process ended
            if seconds >= ENDED_S:
                return Accusation(rank, ENDED)
        return self._longest(self._limit_s)

    def suspect(self, stopped_s: float) -> Accusation | None:
        """Return the likely cause of a communication error."""
        for rank, seconds in list(self._ended.items()):
            if seconds > 0:
                return Accusation(rank, ENDED)
        if self._left:
            return Accusation(min(self._left), "its process ended by itself while other ranks continued")
        return self._longest(stopped_s)

    def _longest(self, limit_s: float) -> Accusation | None:
        stopped = dict(self._stopped)
        rank = max(stopped, key=stopped.__getitem__, default=None)
        if rank is None or not stopped[rank] or stopped[rank] < limit_s:
            return None
        return Accusation(rank, f"its process has been stopped for {stopped[rank]:.1f} s (by a signal or a debugger)")


class Stall:
    def __init__(self) -> None:
        self._moves: dict[int, int] = {}
        self._still_s = 0.0

    def look(self, elapsed: float, seen: Mapping[int, RankObservation], progress_s: float) -> Accusation | None:
        moves = {rank: sighting.progress.moves for rank, sighting in seen.items()}
        waits = [rank for rank, sighting in seen.items() if sighting.progress.waiting]
        # `FailureDetector` handles stopped processes. If no rank waits, all may
        # be computing.
        awake = all(sighting.state is not ProcessState.STOPPED for sighting in seen.values())
        still = moves == self._moves and waits and awake
        self._moves = moves
        self._still_s = self._still_s + min(elapsed, PAUSE_S) if still else 0.0
        if self._still_s < progress_s:
            return None
        busy = [rank for rank, sighting in seen.items() if not sighting.progress.waiting and not sighting.progress.left]
        how = "the others wait for this rank" if busy else "all ranks wait"
        error = f"no rank has made progress for {progress_s:g} s (progress_s), and {how}"
        # If all wait, a link may be down. Rank 0 may still reach all others, so accuse the last rank.
        return Accusation(min(busy) if busy else max(waits), error, stalled=True)

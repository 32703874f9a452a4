"""Failure detector: decides from observations which rank has failed.

A rank is accused when
- its process has ended without announcing that it leaves;
- its process has been stopped for `stopped_s` while another process was running (`FailureDetector`);
- no rank has made progress for `progress_s` while some ranks wait (`Stall`): a rank that does not wait is accused, or
  the last rank if all ranks wait.

Between two observations, the detector counts at most half a second, because its process may have been stopped.
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
    """Clock that returns the seconds since the previous observation, but at most `PAUSE_S`."""

    def __init__(self) -> None:
        self._before = time.monotonic()

    def elapsed(self) -> float:
        now = time.monotonic()
        elapsed = min(now - self._before, PAUSE_S)
        self._before = now
        return elapsed


@dataclass(frozen=True)
class RankObservation:
    """Observation of a rank; `switches` counts the context switches of a stopped process."""

    state: ProcessState
    progress: RankProgress
    switches: int = 0


def seen_of(process: WatchedProcess, progress: RankProgress) -> RankObservation:
    state, switches = process.look()
    return RankObservation(state, progress, switches)


@dataclass(frozen=True)
class Accusation:
    """An accused rank, and the reason. `stalled` is true if the rank's process is alive but makes no progress."""

    rank: int
    error: str
    stalled: bool = False


class FailureDetector:
    def __init__(self, stopped_s: float = STOPPED_S) -> None:
        self._limit_s = stopped_s
        # _ended, _stopped: rank -> seconds for which it has been observed to be ended or stopped
        # _switches: rank -> context switches at the last observation; _left:
        #   ranks that ended regularly
        self._ended: dict[int, float] = {}
        self._stopped: dict[int, float] = {}
        self._switches: dict[int, int] = {}
        self._left: set[int] = set()

    def look(
        self, elapsed: float, seen: Mapping[int, RankObservation], *, others_run: bool = False
    ) -> Accusation | None:
        """Add observations made `elapsed` seconds after the previous ones; return an accusation, or None.

        Args:
            others_run: whether any process that is not in `seen` is running.
        """
        elapsed = min(elapsed, PAUSE_S)
        running = others_run or any(sighting.state is ProcessState.RUNNING for sighting in seen.values())
        for rank, sighting in seen.items():
            ended = sighting.state is ProcessState.ENDED
            # If every process is stopped, the whole job was suspended, and no rank is at fault.
            stopped = sighting.state is ProcessState.STOPPED and running
            # A process stopped for 95 of every 100 ms may always look stopped, but its context switches increase.
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
        """Return the likely cause of a communication error: a rank that ended, left or stopped."""
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
        # Stopped processes are the concern of `FailureDetector`. If no rank
        # waits, all may be computing.
        awake = all(sighting.state is not ProcessState.STOPPED for sighting in seen.values())
        still = moves == self._moves and waits and awake
        self._moves = moves
        self._still_s = self._still_s + min(elapsed, PAUSE_S) if still else 0.0
        if self._still_s < progress_s:
            return None
        busy = [rank for rank, sighting in seen.items() if not sighting.progress.waiting and not sighting.progress.left]
        how = "the others wait for this rank" if busy else "all ranks wait"
        error = f"no rank has made progress for {progress_s:g} s (progress_s), and {how}"
        # If all ranks wait, a link may be down. Rank 0 may still reach all other ranks, so the last rank is accused.
        return Accusation(min(busy) if busy else max(waits), error, stalled=True)

"""Who has failed, from what is seen of ranks: pure counting, in time during which the judge itself was awake.

A rank is accused when
- its process has ended, and it had not said that it leaves;
- its process has been stopped for `stopped_s` while some other was running: in a debugger's stop of all nobody is late
  (`Judge`); one that computes between stops is slow, however often it is seen stopped;
- no rank has moved on for `progress_s` while some wait for others; then it is one that does not wait (`Stall`).

Time is the judge's own: of a pause between two looks (the judge was stopped, or its machine busy) half a second counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydragraph.cluster.failure.heartbeat_board import Progress
from hydragraph.cluster.failure.process_liveness import ProcessState, WatchedProcess

STOPPED_S = 6.0  # a stop of so long is no pause; all ranks raise well within 10 s of it
PAUSE_S = 0.5
ENDED = "its process has ended"
_ENDED_S = 0.5  # for the launcher, which knows how a process ended, to say so first


@dataclass(frozen=True)
class Seen:
    """What is seen of a rank: its process, what it wrote on its board, and what it has computed, in system ticks."""

    state: ProcessState
    progress: Progress
    ticks: int = 0


def seen_of(process: WatchedProcess, progress: Progress) -> Seen:
    """Look at a rank's process."""
    state, ticks = process.look()
    return Seen(state, progress, ticks)


@dataclass(frozen=True)
class Accusation:
    """Who failed, and how; `stalled` where it lives and stands still."""

    rank: int
    error: str
    stalled: bool = False


class Judge:
    """Looks again and again at the processes of ranks.

    Args:
        stopped_s: after how long a stopped process has failed.
    """

    def __init__(self, stopped_s: float = STOPPED_S) -> None:
        self._limit_s = stopped_s
        self._ended: dict[int, float] = {}  # for how long, by rank
        self._stopped: dict[int, float] = {}
        self._ticks: dict[int, int] = {}
        self._left: set[int] = set()

    def look(self, elapsed: float, seen: Mapping[int, Seen], *, others_run: bool = False) -> Accusation | None:
        """Count what is seen now, and return whom it accuses.

        Args:
            elapsed: seconds since the last look.
            seen: what is seen of each rank that is watched from here, by rank.
            others_run: whether some rank that is not among them was running.
        """
        # A judge that was itself stopped for a minute has not seen anybody stand still for a minute.
        elapsed = min(elapsed, PAUSE_S)
        running = others_run or any(sighting.state is ProcessState.RUNNING for sighting in seen.values())
        for rank, sighting in seen.items():
            # Counts go back to 0 with the first look at which it is not so any more: only an unbroken time counts.
            ended = sighting.state is ProcessState.ENDED
            stopped = sighting.state is ProcessState.STOPPED and running
            # What is stopped for 95 of every 100 ms is seen stopped nearly always, and computes all the same.
            still = self._ticks.get(rank, sighting.ticks) == sighting.ticks
            self._ticks[rank] = sighting.ticks
            if ended and sighting.progress.left:
                self._left.add(rank)
            self._ended[rank] = self._ended.get(rank, 0.0) + elapsed if ended and not sighting.progress.left else 0.0
            self._stopped[rank] = self._stopped.get(rank, 0.0) + elapsed if stopped and still else 0.0
        for rank, seconds in self._ended.items():
            if seconds >= _ENDED_S:
                return Accusation(rank, ENDED)
        return self._longest(self._limit_s)

    def suspect(self, stopped_s: float) -> Accusation | None:
        """Return who may have caused an error of communication: who ended, left, or has been stopped for a while."""
        for rank, seconds in list(self._ended.items()):
            if seconds > 0:
                return Accusation(rank, ENDED)
        # To leave is no failure, unless somebody still waited for it: then its leaving is the cause.
        for rank in sorted(self._left):
            return Accusation(rank, "its process ended by itself while other ranks went on")
        return self._longest(stopped_s)

    def _longest(self, limit_s: float) -> Accusation | None:
        stopped = dict(self._stopped)
        rank = max(stopped, key=stopped.__getitem__, default=None)
        if rank is None or not stopped[rank] or stopped[rank] < limit_s:
            return None
        return Accusation(rank, f"its process has been stopped for {stopped[rank]:.1f} s (by a signal or a debugger)")


class Stall:
    """Looks again and again at how far all ranks are."""

    def __init__(self) -> None:
        self._moves: dict[int, int] = {}
        self._still_s = 0.0

    def look(self, elapsed: float, seen: Mapping[int, Seen], progress_s: float) -> Accusation | None:
        """Count what is seen of all ranks now, and return whom it accuses.

        Args:
            elapsed: seconds since the last look.
            seen: what is seen of each rank, by rank; all of them must be there.
            progress_s: after how long without progress of anybody the run has failed.
        """
        # Some wait, nobody moves, and none is stopped (which is `Judge`'s matter). As long as nobody waits, ranks that
        # stand still may as well compute.
        moves = {rank: sighting.progress.moves for rank, sighting in seen.items()}
        waits = [rank for rank, sighting in seen.items() if sighting.progress.waiting]
        awake = all(sighting.state is not ProcessState.STOPPED for sighting in seen.values())
        still = moves == self._moves and waits and awake
        self._moves = moves
        self._still_s = self._still_s + min(elapsed, PAUSE_S) if still else 0.0
        if self._still_s < progress_s:
            return None
        busy = [rank for rank, sighting in seen.items() if not sighting.progress.waiting and not sighting.progress.left]
        how = "the others wait for this one" if busy else "all of them wait"
        return Accusation(
            min(busy or waits), f"no rank has moved on for {progress_s:g} s (progress_s), and {how}", True
        )

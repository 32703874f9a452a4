"""Sentinel: a process on each of several machines, which reports on its machine's ranks and monitors other machines.

Because a healthy rank may hold the interpreter lock for a minute, the sentinel writes heartbeats to the store; without
them, the machine or its link is lost.

A sentinel exits when the store has a fault, or 3 s after its last rank has ended or closed its watch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hydragraph.cluster.failure.failure_detector import (
    PAUSE_S,
    FailureDetector,
    RankObservation,
    Stall,
    Stopwatch,
    seen_of,
)
from hydragraph.cluster.failure.fault_record import Fault, FaultRecord
from hydragraph.cluster.failure.heartbeat_board import HeartbeatBoard, RankProgress
from hydragraph.cluster.failure.process_liveness import ProcessState, WatchedProcess
from hydragraph.cluster.failure.rank_registry import RankEntry, RankRegistry
from hydragraph.cluster.failure.time_limits import SILENT_S
from hydragraph.cluster.module_process import start_module

_BEAT_S = 0.25
_ROLL_S = 1.0
# Timeouts of the store; PyTorch retries for twice as long
_PATIENCE, _LITTLE = timedelta(seconds=10), timedelta(seconds=2)
# A sentinel exits after this time without ranks
_IDLE_S = 3.0
_LOOK_S = 0.5
# Maximum attempts to start; a machine without a sentinel counts as lost
_STARTS = 3


@dataclass(frozen=True)
class SentinelSettings:
    address: str
    port: int
    namespace: str
    machine: str
    board: str
    ranks: int


class Sentinel:
    def __init__(self, post: SentinelSettings) -> None:
        self._post = post
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.keep_up()

    def keep_up(self) -> None:
        if self._starts < _STARTS and (self._process is None or self._process.poll() is not None):
            self._starts += 1
            arguments = (json.dumps(asdict(argument)) for argument in (self._post, WatchedProcess.own()))
            self._process = start_module(
                "hydragraph.cluster.failure.node_sentinel",
                *arguments,
                stdin=subprocess.DEVNULL,
                # Ctrl-C must not end the sentinel
                start_new_session=True,
            )


@dataclass(eq=False)
class _Observer:
    store: Store
    namespace: str
    board: HeartbeatBoard
    beats: dict[str, dict[str, Any]] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)
    detector: FailureDetector = field(default_factory=FailureDetector)
    stall: Stall = field(default_factory=Stall)

    def listen(self, machines: list[str], elapsed: float) -> None:
        for machine in machines:
            if not self.store.check([self.key(machine)]):
                continue
            # beat: {"beats": count, "host": name, "ranks": {rank: [state, moves, waiting, left]}}
            beat = json.loads(self.store.get(self.key(machine)))
            news = machine not in self.beats or beat["beats"] != self.beats[machine]["beats"]
            self.silent[machine] = 0.0 if news else self.silent[machine] + elapsed
            self.beats[machine] = beat

    def fault(self, elapsed: float, own: Mapping[int, RankObservation], members: Iterable[RankEntry]) -> Fault | None:
        theirs: dict[int, RankObservation] = {}
        for beat in self.beats.values():
            for rank, (state, moves, waiting, left) in beat["ranks"].items():
                theirs[int(rank)] = RankObservation(
                    ProcessState(state), RankProgress(moves, 0, None, "", waiting, left)
                )
        others_run = any(sighting.state is ProcessState.RUNNING for sighting in theirs.values())
        # A sentinel accuses only its machine's ranks of being stopped or ended. A stall needs all
        # machines' ranks.
        accused = self.detector.look(elapsed, own, others_run=others_run)
        every = {**theirs, **own}
        if accused is None and len(own) + len(theirs) == self.board.ranks:
            accused = self.stall.look(elapsed, every, self.board.progress_s)
        if accused is None:
            return self._lost()
        host = next((m.host for m in members if m.rank == accused.rank), "")
        place = every[accused.rank].progress
        return Fault(accused.rank, place.step, place.call, accused.error, host, accused.stalled, place.instruction)

    def _lost(self) -> Fault | None:
        for machine, silent_s in self.silent.items():
            beat = self.beats[machine]
            stayed = [int(rank) for rank, (*_, left) in beat["ranks"].items() if not left]
            if silent_s >= SILENT_S and stayed:
                error = f"its machine has been silent for {SILENT_S:g} s: it is lost, or the link to it is down"
                return Fault(min(stayed), 0, "", error, beat["host"])
        return None

    def key(self, machine: str) -> str:
        return f"{self.namespace}/beat/{machine}"


class IdleTime:
    def __init__(self) -> None:
        self._idle_s = 0.0

    def look(self, elapsed: float, watching: Iterable[bool]) -> bool:
        """Return whether to exit; `watching` says for each live rank whether its watch is open."""
        self._idle_s = 0.0 if any(watching) else self._idle_s + min(elapsed, PAUSE_S)
        return self._idle_s >= _IDLE_S


class _Guard(threading.Thread):
    """Thread that ends this process when no rank remains, even while a request blocks."""

    def __init__(self, starter: WatchedProcess, board: HeartbeatBoard) -> None:
        super().__init__(name="hydragraph-guard", daemon=True)
        self.members: tuple[RankEntry, ...] = ()
        self._starter = starter
        self._board = board

    def run(self) -> None:
        idle = IdleTime()
        stopwatch = Stopwatch()
        while True:
            time.sleep(_LOOK_S)
            if idle.look(stopwatch.elapsed(), self._watching()):
                os._exit(1)

    def _watching(self) -> list[bool]:
        members = self.members
        if not members:
            return [self._starter.state() is not ProcessState.ENDED]
        alive = [member.rank for member in members if member.process.state() is not ProcessState.ENDED]
        return [not self._board.lines[rank].finished for rank in alive]


def stand(post: SentinelSettings, starter: WatchedProcess) -> None:
    board = HeartbeatBoard.open(post.board, post.ranks)
    guard = _Guard(starter, board)
    guard.start()
    # If the starting rank has ended, the store may be gone.
    patience = _LITTLE if starter.state() is ProcessState.ENDED else _PATIENCE
    store = dist.TCPStore(post.address, post.port, None, False, timeout=patience, wait_for_workers=False)
    roll = RankRegistry(store, post.namespace, post.machine)
    ledger = FaultRecord(store, post.namespace)
    observer = _Observer(store, post.namespace, board)
    stopwatch = Stopwatch()
    asked = 0.0
    beats = 0
    members: tuple[RankEntry, ...] = ()
    while True:
        elapsed = stopwatch.elapsed()
        if time.monotonic() - asked > _ROLL_S:
            guard.members = members = roll.members()
            asked = time.monotonic()
        own = {m.rank: seen_of(m.process, board.read(m.rank)) for m in members}
        beats += 1
        ranks = {r: [s.state.value, s.progress.moves, s.progress.waiting, s.progress.left] for r, s in own.items()}
        beat = {"beats": beats, "host": members[0].host, "ranks": ranks}
        store.set(observer.key(post.machine), json.dumps(beat))
        observer.listen([m for m in roll.machines() if m != post.machine], elapsed)
        fault = observer.fault(elapsed, own, members)
        if fault is not None:
            ledger.write(fault)
        if ledger.read() is not None or all(s.progress.left for s in own.values()):
            return
        time.sleep(_BEAT_S)


if __name__ == "__main__":
    try:
        stand(SentinelSettings(**json.loads(sys.argv[1])), WatchedProcess(**json.loads(sys.argv[2])))
    except (RuntimeError, OSError, KeyboardInterrupt):
        sys.exit(1)

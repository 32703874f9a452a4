"""Sentinel: a process on each of several machines, which reports on its machine's ranks and monitors other machines.

A healthy rank may hold the interpreter lock for a minute, so a separate process observes the ranks and writes
heartbeats to the store. If heartbeats stop, the machine or its link is lost.

A sentinel exits as soon as the store has a fault, or 3 s after its last rank has ended or closed its watch.
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
from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.cluster.failure.failure_detector import PAUSE_S, Accusation, Judge, Seen, Stall, seen_of
from hydragraph.cluster.failure.fault_record import Fault, Ledger
from hydragraph.cluster.failure.heartbeat_board import Board, RankProgress
from hydragraph.cluster.failure.process_liveness import ProcessState, WatchedProcess
from hydragraph.cluster.failure.rank_registry import Roll, RollEntry
from hydragraph.cluster.failure.time_limits import SILENT_S
from hydragraph.cluster.module_process import start_module

_BEAT_S = 0.25
_ROLL_S = 1.0
# Timeouts of the store; PyTorch retries for twice as long.
_PATIENCE, _LITTLE = timedelta(seconds=10), timedelta(seconds=2)
_IDLE_S = 3.0  # a sentinel exits after this time without ranks
_LOOK_S = 0.5
_STARTS = 3  # maximum starts; a machine without a sentinel counts as lost


@dataclass(frozen=True)
class Post:
    address: str
    port: int
    namespace: str
    machine: str
    board: str
    ranks: int


class Sentinel:
    """Sentinel process, as seen by the rank that starts it."""

    def __init__(self, post: Post) -> None:
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
                start_new_session=True,  # Ctrl-C must not end the sentinel
            )


def post_of(store: Store, namespace: str, machine: str, board: str, ranks: int) -> Post | None:
    """Return a sentinel's parameters; None if other processes cannot reach the store."""
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    return Post(store.host, store.port, namespace, machine, board, ranks)


@dataclass(eq=False)
class _Others:
    store: Store
    namespace: str
    beats: dict[str, dict[str, Any]] = field(default_factory=dict)
    silent: dict[str, float] = field(default_factory=dict)

    def listen(self, machines: list[str], elapsed: float) -> None:
        for machine in machines:
            if not self.store.check([self.key(machine)]):
                continue
            beat = json.loads(self.store.get(self.key(machine)))
            news = machine not in self.beats or beat["beats"] != self.beats[machine]["beats"]
            self.silent[machine] = 0.0 if news else self.silent[machine] + min(elapsed, PAUSE_S)
            self.beats[machine] = beat

    def seen(self) -> dict[int, Seen]:
        sightings: dict[int, Seen] = {}
        for beat in self.beats.values():
            for rank, (state, moves, waiting, left) in beat["ranks"].items():
                sightings[int(rank)] = Seen(ProcessState(state), RankProgress(moves, 0, None, "", waiting, left))
        return sightings

    def lost(self) -> tuple[Accusation, str] | None:
        for machine, silent_s in self.silent.items():
            beat = self.beats[machine]
            stayed = [int(rank) for rank, (*_, left) in beat["ranks"].items() if not left]
            if silent_s >= SILENT_S and stayed:
                error = f"its machine has been silent for {SILENT_S:g} s: it is lost, or the link to it is down"
                return Accusation(min(stayed), error), beat["host"]
        return None

    def key(self, machine: str) -> str:
        return f"{self.namespace}/beat/{machine}"


class IdleTime:
    def __init__(self) -> None:
        self._idle_s = 0.0

    def look(self, elapsed: float, watching: Iterable[bool]) -> bool:
        """Return whether the sentinel must exit; `watching` is true for each live rank with an open watch."""
        self._idle_s = 0.0 if any(watching) else self._idle_s + min(elapsed, PAUSE_S)
        return self._idle_s >= _IDLE_S


class _Guard(threading.Thread):
    """Thread that ends this process when no rank remains, even while a request to the store blocks."""

    def __init__(self, starter: WatchedProcess, board: Board) -> None:
        super().__init__(name="hydragraph-guard", daemon=True)
        self.members: tuple[RollEntry, ...] = ()
        self._starter = starter
        self._board = board

    def run(self) -> None:
        idle = IdleTime()
        before = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            now = time.monotonic()
            if idle.look(now - before, self._watching()):
                os._exit(1)
            before = now

    def _watching(self) -> list[bool]:
        members = self.members
        if not members:
            return [self._starter.state() is not ProcessState.ENDED]
        return [
            member.process.state() is not ProcessState.ENDED and not self._board.lines[member.rank].finished
            for member in members
        ]


def stand(post: Post, starter: WatchedProcess) -> None:
    board = Board.open(post.board, post.ranks)
    guard = _Guard(starter, board)
    guard.start()
    # If the rank that started this sentinel has ended, the store may be gone.
    patience = _LITTLE if starter.state() is ProcessState.ENDED else _PATIENCE
    store = dist.TCPStore(  # type: ignore[attr-defined]
        post.address, post.port, None, False, timeout=patience, wait_for_workers=False
    )
    roll = Roll(store, post.namespace, post.machine)
    ledger = Ledger(store, post.namespace)
    others = _Others(store, post.namespace)
    judge = Judge()
    stall = Stall()
    before = time.monotonic()
    asked = 0.0
    beats = 0
    members: tuple[RollEntry, ...] = ()
    while True:
        now = time.monotonic()
        elapsed = now - before
        before = now
        if now - asked > _ROLL_S:
            guard.members = members = roll.members()
            asked = now
        own = {m.rank: seen_of(m.process, board.read(m.rank)) for m in members}
        beats += 1
        ranks = {r: [s.state.value, s.progress.moves, s.progress.waiting, s.progress.left] for r, s in own.items()}
        beat = {"beats": beats, "host": members[0].host, "ranks": ranks}
        store.set(others.key(post.machine), json.dumps(beat))
        others.listen([m for m in roll.machines() if m != post.machine], elapsed)
        fault = _fault(elapsed, own, others, judge, stall, members, board)
        if fault is not None:
            ledger.write(fault)
        if ledger.read() is not None or all(s.progress.left for s in own.values()):
            return
        time.sleep(_BEAT_S)


def _fault(
    elapsed: float,
    own: Mapping[int, Seen],
    others: _Others,
    judge: Judge,
    stall: Stall,
    members: tuple[RollEntry, ...],
    board: Board,
) -> Fault | None:
    theirs = others.seen()
    accused = judge.look(elapsed, own, others_run=any(s.state is ProcessState.RUNNING for s in theirs.values()))
    if accused is None and len(own) + len(theirs) == board.ranks:
        accused = stall.look(elapsed, {**own, **theirs}, board.progress_s)
    if accused is None:
        lost = others.lost()
        return None if lost is None else Fault(lost[0].rank, 0, "", lost[0].error, lost[1])
    host = next((m.host for m in members if m.rank == accused.rank), "")
    progress = own[accused.rank].progress if accused.rank in own else theirs[accused.rank].progress
    return Fault(accused.rank, progress.step, progress.call, accused.error, host, accused.stalled, progress.instruction)


if __name__ == "__main__":
    try:
        stand(Post(**json.loads(sys.argv[1])), WatchedProcess(**json.loads(sys.argv[2])))
    except (RuntimeError, OSError, KeyboardInterrupt):  # the store or the board is gone
        sys.exit(1)

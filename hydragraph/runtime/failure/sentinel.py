"""One process per machine, where ranks are on several: it speaks for the machine's ranks, and listens for the others'.

A rank cannot always speak for itself: one that computes for a minute without letting go of its interpreter is well, and
silent; one that is stopped is silent, and is not. Here a process of its own looks at theirs, and says in the store what
it sees, twice a second: so much of a machine that this stops, it is lost, or the link to it. No rank waits for its
sentinel; it ends when the ranks of its machine have left or ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store  # type: ignore[attr-defined]

from hydragraph.runtime.failure.board import Board, Progress
from hydragraph.runtime.failure.judge import PAUSE_S, Accusation, Judge, Seen, Stall, seen_of
from hydragraph.runtime.failure.ledger import Fault, Ledger
from hydragraph.runtime.failure.processes import ProcessState
from hydragraph.runtime.failure.roll import Roll, RollEntry

SILENT_S = (
    8.0  # a machine that was cut off for 3 s is heard again after up to 7 s: TCP tries at 0.2, 0.6, 1.4, 3.0, 6.2 s
)
_BEAT_S = 0.25
_ROLL_S = 1.0
_PATIENCE, _LITTLE = timedelta(seconds=10), timedelta(seconds=2)  # for the store; PyTorch tries twice as long
_STARTS = 3  # if something ends it again and again, its machine is taken for lost


@dataclass(frozen=True)
class Post:
    """Where a sentinel stands.

    Attributes:
        address, port: where the store listens.
        namespace: what the keys of its ranks begin with in the store.
        machine, board: whose ranks it speaks for, and where they write.
        ranks: how many there are on all machines.
    """

    address: str
    port: int
    namespace: str
    machine: str
    board: str
    ranks: int


class Sentinel:
    """The rank that started a sentinel, and starts it again should it end."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self.keep_up()

    def keep_up(self) -> None:
        """Start it where it does not run."""
        if self._starts < _STARTS and (self._process is None or self._process.poll() is not None):
            self._starts += 1
            package = str(Path(__file__).parents[3])
            paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "hydragraph.runtime.failure.sentinel",
                    json.dumps(asdict(self._post)),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # an interrupt that is meant for the ranks must not silence their machine
            )


def post_of(store: Store, namespace: str, machine: str, board: str, ranks: int) -> Post | None:
    """Return where a sentinel stands; None where the store is none that another process can reach."""
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    return Post(store.host, store.port, namespace, machine, board, ranks)


class _Others:
    """What the sentinels of other machines say, and since when they have said nothing new."""

    def __init__(self, store: Store, namespace: str) -> None:
        self._store = store
        self._namespace = namespace
        self._beats: dict[str, dict[str, Any]] = {}
        self._silent: dict[str, float] = {}

    def say(self, machine: str, beat: Mapping[str, Any]) -> None:
        self._store.set(self._key(machine), json.dumps(beat))

    def listen(self, machines: list[str], elapsed: float) -> None:
        for machine in machines:
            if not self._store.check([self._key(machine)]):
                continue  # its sentinel has yet to start
            beat = json.loads(self._store.get(self._key(machine)))
            news = machine not in self._beats or beat["beats"] != self._beats[machine]["beats"]
            self._silent[machine] = 0.0 if news else self._silent[machine] + min(elapsed, PAUSE_S)
            self._beats[machine] = beat

    def seen(self) -> dict[int, Seen]:
        """Return what they say of their ranks."""
        sightings: dict[int, Seen] = {}
        for beat in self._beats.values():
            for rank, (state, moves, waiting, left) in beat["ranks"].items():
                sightings[int(rank)] = Seen(ProcessState(state), Progress(moves, 0, None, "", waiting, left))
        return sightings

    def lost(self) -> tuple[Accusation, str] | None:
        """Return the first rank of a machine that is heard no more, and its host."""
        for machine, silent_s in self._silent.items():
            beat = self._beats[machine]
            stayed = [int(rank) for rank, (*_, left) in beat["ranks"].items() if not left]
            if silent_s >= SILENT_S and stayed:
                error = (
                    f"nothing has been heard of its machine for {SILENT_S:g} s: it is lost, or the link to it is down"
                )
                return Accusation(min(stayed), error), beat["host"]
        return None

    def _key(self, machine: str) -> str:
        return f"{self._namespace}/beat/{machine}"


def stand(post: Post, starter: int) -> None:
    """Be a sentinel, until the ranks of this machine have left, or have ended and all know, or the store is gone.

    Args:
        starter: the process that started it.
    """
    # Where a run ends as its sentinel begins, the store may be gone with it: then it is not looked for so long.
    patience = _PATIENCE if os.getppid() == starter else _LITTLE
    store = dist.TCPStore(  # type: ignore[attr-defined]
        post.address, post.port, None, False, timeout=patience, wait_for_workers=False
    )
    roll = Roll(store, post.namespace, post.machine)
    ledger = Ledger(store, post.namespace)
    board = Board.open(post.board, post.ranks)
    others = _Others(store, post.namespace)
    judge = Judge()
    stall = Stall()
    before = time.monotonic()
    asked = 0.0
    beats = 0
    members: tuple[RollEntry, ...] = ()
    written = False
    while True:
        now = time.monotonic()
        elapsed = now - before
        before = now
        if now - asked > _ROLL_S:
            members = roll.members()
            asked = now
        own = {m.rank: seen_of(m.process, board.read(m.rank)) for m in members}
        beats += 1
        ranks = {r: [s.state.value, s.progress.moves, s.progress.waiting, s.progress.left] for r, s in own.items()}
        others.say(post.machine, {"beats": beats, "host": members[0].host, "ranks": ranks})
        others.listen([m for m in roll.machines() if m != post.machine], elapsed)
        if not written:
            fault = _fault(elapsed, own, others, judge, stall, members, board)
            written = fault is not None and bool(ledger.write(fault))
        if all(s.progress.left or (written and s.state is ProcessState.ENDED) for s in own.values()):
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
    """Return the fault that is seen from here, if any; of ranks elsewhere, their own sentinels see more."""
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
        stand(Post(**json.loads(sys.argv[1])), int(sys.argv[2]))
    except (RuntimeError, OSError, KeyboardInterrupt):  # the store or the board is gone, and with it whom to tell
        sys.exit(1)

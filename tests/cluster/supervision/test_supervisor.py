"""The supervisor of a launch, with processes that are fakes; `tests/engine/test_recovery.py` has real ones."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hydragraph.cluster.processes.launched_ranks import AbsentProcess, NotStarted, RankHandle
from hydragraph.cluster.processes.rank_process import Returned, raised
from hydragraph.cluster.supervision import supervisor as supervisors
from hydragraph.cluster.supervision.supervisor import Supervisor
from hydragraph.errors import RankFailure
from hydragraph.spec.elastic import Elastic

LIMIT_S = 120.0  # against a hang
FAILED = BlockingIOError(11, "Resource temporarily unavailable")


class Starts:
    """Starts fakes in seats, and counts how often.

    Args:
        broken: the seat where no process can be started.
        fails: how many starts fail there before one succeeds.
        returns: after how many starts there the process of seat 0 returns.
    """

    def __init__(self, broken: int, fails: int, returns: int) -> None:
        self.counts: dict[int, int] = {}
        self._broken, self._fails, self._returns = broken, fails, returns
        self._ends: dict[int, Connection] = {}

    def __call__(self, number: int, seat: int, late: bool) -> RankHandle:
        self.counts[seat] = self.counts.get(seat, 0) + 1
        ours, theirs = multiprocessing.Pipe()
        process = AbsentProcess()
        if seat == self._broken and self.counts[seat] <= self._fails:
            theirs.close()
            process = NotStarted(FAILED)
        else:
            self._ends[number] = theirs
        if seat == self._broken and self.counts[seat] == self._returns:
            self._ends[0].send(Returned(b"done"))
        return RankHandle(number, process, ours)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(supervisors, "_REJOIN_S", 0.01)
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.mark.parametrize("fails", [1, 2])
def test_a_start_that_fails_is_repeated_in_its_own_seat(store: Any, fails: int) -> None:
    starts = Starts(broken=1, fails=fails, returns=fails + 1)
    supervisor = Supervisor(starts, store, 2, Elastic(min_ranks=1))
    supervisor.run(LIMIT_S)
    assert supervisor.results() == [b"done"]
    assert starts.counts == {0: 1, 1: fails + 1}


def test_starts_that_fail_again_and_again_leave_the_seat_empty(store: Any) -> None:
    starts = Starts(broken=1, fails=100, returns=3)
    supervisor = Supervisor(starts, store, 2, Elastic(min_ranks=1))
    supervisor.run(LIMIT_S)
    assert supervisor.results() == [b"done"]
    assert starts.counts == {0: 1, 1: 3}


def test_a_launch_none_of_whose_processes_can_be_started_says_why(store: Any) -> None:
    starts = Starts(broken=0, fails=100, returns=0)
    supervisor = Supervisor(starts, store, 1, Elastic(min_ranks=1))
    supervisor.run(LIMIT_S)
    with pytest.raises(RankFailure, match=r"could not be started: .*Resource temporarily unavailable"):
        supervisor.results()
    assert starts.counts == {0: 3}


@pytest.mark.parametrize(("current", "held", "ends"), [((0,), True, False), ((0, 1), True, True), ((), False, True)])
def test_an_error_that_would_recur_ends_the_run_only_if_its_rank_holds_state(
    store: Any, current: tuple[int, ...], held: bool, ends: bool
) -> None:
    supervisor = Supervisor(Starts(broken=-1, fails=0, returns=0), store, 2, Elastic(min_ranks=1))
    supervisor._start(0, late=False)
    supervisor._start(1, late=True)
    supervisor._record = replace(supervisor._record, formed={0: current})
    supervisor._held = held
    supervisor.crew[1].outcome = raised(ValueError("the data changed"))
    supervisor._ended(supervisor.crew[1])
    assert (supervisor._fatal_at is not None) == ends
    assert supervisor._empty == (set() if ends else {1})
    assert not supervisor._waiting


def test_a_new_leader_saves_its_record_although_the_newest_member_is_lost(store: Any) -> None:
    supervisor = Supervisor(Starts(broken=-1, fails=0, returns=0), store, 2, Elastic(min_ranks=1))
    saved: list[str] = []
    supervisor._election = SimpleNamespace(write=lambda record: saved.append(record))  # pyrefly: ignore[bad-assignment]
    supervisor._next = 4  # member 3 was on the previous leader's machine
    supervisor._save()
    assert json.loads(saved[0])["nodes"] == []
    assert json.loads(saved[0])["ranks"] == 2

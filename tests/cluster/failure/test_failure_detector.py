"""Whom the judge accuses, on clocks that the tests drive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cluster.failure.failure_detector import ENDED, Accusation, FailureDetector, RankObservation, Stall
from hydragraph.cluster.failure.heartbeat_board import RankProgress
from hydragraph.cluster.failure.process_liveness import ProcessState

RUNNING, STOPPED, GONE = ProcessState.RUNNING, ProcessState.STOPPED, ProcessState.ENDED


def seen(
    state: ProcessState = RUNNING, moves: int = 0, *, waiting: bool = False, left: bool = False
) -> RankObservation:
    return RankObservation(state, RankProgress(moves, 0, None, "", waiting, left))


def looks(
    detector: FailureDetector, ranks: Mapping[int, RankObservation], times: int, elapsed: float = 0.1
) -> Accusation | None:
    found = None
    for _ in range(times):
        found = detector.look(elapsed, ranks)
    return found


def test_a_process_that_ended_is_accused_unless_it_had_left() -> None:
    detector = FailureDetector()
    assert looks(detector, {0: seen(), 1: seen(GONE), 2: seen(GONE, left=True)}, 4) is None
    assert detector.suspect(1.5) == Accusation(1, ENDED)
    assert looks(detector, {0: seen(), 1: seen(GONE)}, 2) == Accusation(1, ENDED)
    left = FailureDetector()
    assert looks(left, {0: seen(), 2: seen(GONE, left=True)}, 100) is None
    blamed = left.suspect(1.5)
    assert blamed is not None
    assert (blamed.rank, "while other ranks continued" in blamed.error) == (2, True)


def test_a_stopped_process_is_accused_after_its_time_and_a_pause_is_none() -> None:
    detector = FailureDetector(stopped_s=6.0)
    one = {0: seen(), 1: seen(STOPPED)}
    assert looks(detector, one, 59) is None
    suspect = detector.suspect(1.5)
    assert suspect is not None
    assert suspect.rank == 1
    assert looks(detector, {0: seen(), 1: seen()}, 1) is None
    assert detector.suspect(0.0) is None
    assert looks(detector, one, 59) is None, "it counts anew"
    accused = looks(detector, one, 2)
    assert accused is not None
    assert accused.rank == 1
    assert "stopped for 6." in accused.error


def test_a_process_that_computes_between_stops_is_slow_and_not_stopped() -> None:
    detector = FailureDetector(stopped_s=6.0)
    for switches in range(100):  # it is seen stopped every time, and has computed a little each second
        assert looks(detector, {0: seen(), 1: replace(seen(STOPPED), switches=switches)}, 10) is None
    accused = looks(detector, {0: seen(), 1: replace(seen(STOPPED), switches=99)}, 60)
    assert accused is not None
    assert accused.rank == 1


def test_a_debuggers_stop_of_all_is_no_failure() -> None:
    launcher = FailureDetector()  # which is not stopped
    assert looks(launcher, {0: seen(STOPPED), 1: seen(STOPPED)}, 1000) is None
    assert looks(launcher, {0: seen(), 1: seen(STOPPED)}, 10) is None, "a debugger resumes them one after the other"
    rank = FailureDetector()  # which was stopped with the others: of its pause half a second counts
    assert rank.look(30.0, {0: seen(), 1: seen(STOPPED)}) is None
    elsewhere = FailureDetector()
    assert [elsewhere.look(0.5, {3: seen(STOPPED)}, others_run=True) for _ in range(12)][-1] is not None


def test_a_rank_that_holds_the_others_up_is_named() -> None:
    stall = Stall()
    ranks = {0: seen(moves=5, waiting=True), 1: seen(moves=4), 2: seen(moves=9, waiting=True)}
    found = [stall.look(0.5, ranks, 10.0) for _ in range(21)]
    assert found[:20] == [None] * 20
    accused = found[20]
    assert accused is not None
    assert (accused.rank, accused.stalled) == (1, True)
    assert "no rank has made progress for 10 s (progress_s), and the others wait for this rank" in accused.error


@pytest.mark.parametrize("kind", ["moves", "nobody waits", "stopped"])
def test_what_is_no_stall(kind: str) -> None:
    stall = Stall()
    for look in range(1000):
        waiting = kind != "nobody waits"
        state = STOPPED if kind == "stopped" else RUNNING
        ranks = {0: seen(moves=look if kind == "moves" else 1, waiting=waiting), 1: seen(state, moves=1)}
        assert stall.look(0.5, ranks, 10.0) is None


def test_ranks_that_wait_for_each_other_are_a_stall_too() -> None:
    stall = Stall()
    ranks = {0: seen(waiting=True), 1: seen(waiting=True)}
    accused = [stall.look(0.5, ranks, 2.0) for _ in range(6)][-1]
    assert accused is not None
    assert "all ranks wait" in accused.error
    assert accused.rank == 1, "the first rank may reach all others"


@given(st.lists(st.lists(st.sampled_from([RUNNING, STOPPED]), min_size=3, max_size=3), max_size=60))
def test_only_a_rank_that_was_stopped_all_the_time_is_accused(history: list[list[ProcessState]]) -> None:
    detector, limit = FailureDetector(stopped_s=2.0), 4  # looks of half a second
    for i, states in enumerate(history):
        accused = detector.look(0.5, {rank: seen(state) for rank, state in enumerate(states)})
        late = [
            rank
            for rank in range(3)
            if i + 1 >= limit and all(h[rank] is STOPPED and RUNNING in h for h in history[i + 1 - limit : i + 1])
        ]
        assert (accused is not None) == bool(late)
        assert accused is None or accused.rank in late

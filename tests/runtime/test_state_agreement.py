"""Ranks that meet agree on one state, wherever a step or a move was cut off."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hydragraph.runtime.state_agreement import (
    AgreedState,
    HeldState,
    ProgressLog,
    RankStates,
    StatePlace,
    StateProgress,
    meet,
)
from hydragraph.spec.home import Home

TWICE = Home(copies=2, nodes=(0, 1, 2))


def standing(rank: int, progress: StateProgress, generation: int = 0) -> RankStates:
    return RankStates(HeldState(StatePlace(generation, rank, 3, TWICE), progress))


BEFORE = StateProgress(7, 1.5)
READY = StateProgress(7, 1.5, gathered=True)
DONE = StateProgress(8, 2.5)
TORN = StateProgress(7, 1.5, gathered=True, torn=True)


def test_a_log_goes_through_a_step() -> None:
    log = ProgressLog()
    seen = [log.progress]
    for note in (log.begin, log.gathered, log.updating, lambda: log.updated(2.5), log.begin):
        note()
        seen.append(log.progress)
    gathered = StateProgress(gathered=True)
    assert seen == [
        StateProgress(),
        StateProgress(),
        gathered,
        replace(gathered, torn=True),
        StateProgress(1, 2.5),
        StateProgress(1, 2.5),
    ]
    log.restored(40)
    assert log.progress == StateProgress(40)


@pytest.mark.parametrize("each", itertools.product([BEFORE, READY, DONE, TORN], repeat=3))
def test_ranks_agree_on_the_newest_update_that_all_who_count_can_have(each: tuple[StateProgress, ...]) -> None:
    """Whoever has updated did so after all had their gradients: others are ready, done or torn, or something is odd."""
    found = meet([standing(rank, progress) for rank, progress in enumerate(each)], range(3))
    whole = [rank for rank in range(3) if not each[rank].torn]
    if not whole:
        assert found == AgreedState(-1, 3, Home(), (None,) * 3, 0, 0.0, None)
        return
    updates = max(each[rank].updates for rank in whole)
    counts = [rank for rank in whole if each[rank].updates == updates or each[rank].gathered]
    assert found.updates == updates
    assert found.before == tuple(rank if rank in counts else None for rank in range(3))
    assert found.leader == next(rank for rank in whole if each[rank].updates == updates)
    assert found.norm == (2.5 if updates == 8 else 1.5)
    assert (found.generation, found.ranks, found.home) == (0, 3, TWICE)


def test_who_missed_the_end_of_a_move_takes_what_it_brought() -> None:
    """Ranks 0 and 1 had everything; 0 has taken it; 2, which was thought lost then, is still in the old world."""
    new = StatePlace(1, 0, 2, Home())
    took = RankStates(HeldState(new, DONE))
    missed = RankStates(HeldState(StatePlace(0, 2, 3, TWICE), DONE), HeldState(replace(new, rank=1), DONE), called=(1,))
    late = standing(1, BEFORE)
    found = meet([missed, late, took, None], [1, None, 0, None])
    assert found == AgreedState(1, 2, Home(), (1, None, 0, None), 8, 2.5, 0)


def test_a_move_that_nobody_has_ended_counts_for_nothing() -> None:
    arrived = HeldState(StatePlace(1, 0, 3, Home()), DONE)
    found = meet([replace(standing(rank, BEFORE), arrived=arrived, called=(2 - rank,)) for rank in range(3)], range(3))
    assert (found.generation, found.before, found.updates) == (0, (0, 1, 2), 7)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ([0, 1], "has 2 numbers for 3 ranks"),
        ([0, 0, None], "two ranks cannot both have been rank 0"),
        ([0, 2, None], r"rank 1 was rank 2, but its numbers were \[1\]"),
        ([0, 1, 2], "rank 2 was rank 2, but rank 2 is new"),
    ],
)
def test_who_was_who_is_checked(before: list[int | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        meet([standing(0, DONE), standing(1, DONE), None], before)

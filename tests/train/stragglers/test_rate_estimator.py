"""Rates from synthetic traces whose rates are known: found in time, exactly enough, and nobody else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.train.stragglers.rate_estimator import Change, Estimator

RANKS = 4
BEFORE = 12  # iterations in which all are healthy
NOISE = 0.05

Rate = Callable[[int, int], float]  # of a rank in an iteration


def healthy(rank: int, iteration: int) -> float:
    return 1.0


def trace(
    seed: int, iterations: int, rate: Rate, noise: float = NOISE, busy: float = 0.3, estimator: Estimator | None = None
) -> list[tuple[Change, ...]]:
    """Feed an estimator what ranks would take: lengths vary, the machine is busy, and the cost model is wrong."""
    draw = random.Random(seed)
    estimator = estimator or Estimator()
    wrong = {kind: math.exp(draw.uniform(-2, 2)) for kind in ("layer", "embed", "head")}
    found = []
    for iteration in range(iterations):
        common = math.exp(draw.gauss(0, busy))
        work = {}
        for rank in range(RANKS):
            # Ranks 0 and 2 are first stages, 1 and 3 last ones; sequences are as long as it happens.
            kinds = {"layer": draw.uniform(0.5, 2), ("head" if rank % 2 else "embed"): draw.uniform(0.05, 0.3)}
            slower = common * rate(rank, iteration) * math.exp(draw.gauss(0, noise))
            work[rank] = {kind: (slower * wrong[kind] * seconds, seconds) for kind, seconds in kinds.items()}
        found.append(estimator.observe(work))
    return found


def stepping(rank: int, level: float, begin: int = BEFORE, end: int = 10**9) -> Rate:
    """Return rates of one rank that becomes slow in the middle of an iteration, and well in the middle of another."""

    def rate(who: int, iteration: int) -> float:
        if who != rank or not begin <= iteration <= end:
            return 1.0
        return (1 + level) / 2 if iteration in (begin, end) else level

    return rate


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, RANKS - 1), st.floats(2.0, 15.0))
def test_a_straggler_is_named_within_three_iterations_at_its_rate(seed: int, rank: int, level: float) -> None:
    found = trace(seed, BEFORE + 4, stepping(rank, level))
    assert not any(found[:BEFORE])
    changes = [change for each in found for change in each]
    assert [(change.rank, change.before) for change in changes] == [(rank, 1.0)]
    assert changes[0].rate == pytest.approx(level, rel=0.15)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, RANKS - 1), st.floats(2.0, 15.0))
def test_who_is_well_again_is_let_go(seed: int, rank: int, level: float) -> None:
    estimator = Estimator()
    trace(seed, BEFORE + 20, stepping(rank, level, BEFORE, BEFORE + 8), estimator=estimator)
    assert estimator.rates == {}


def test_what_a_slow_rank_with_little_work_takes_besides_is_no_rate() -> None:
    estimator = Estimator()
    trace(3, BEFORE + 6, stepping(1, 8.0), estimator=estimator)
    held = estimator.rates[1]
    assert held == pytest.approx(8, rel=0.15)
    draw = random.Random(5)

    def observe(work: float, slower: float) -> tuple[Change, ...]:
        kinds = {rank: {"own": (math.exp(draw.gauss(0, NOISE)), 1.0)} for rank in (0, 2, 3)}
        return estimator.observe({**kinds, 1: {"own": (slower * work * math.exp(draw.gauss(0, NOISE)), work)}})

    for _ in range(8):  # a new kind of work is learned first
        observe(1.0, held)
    assert not any(observe(0.05, 3 * held) for _ in range(12))
    assert estimator.rates == {1: held}
    changes = [change for _ in range(6) for change in observe(0.05, held / 3)]  # but that it is faster counts
    assert changes[-1].rate == pytest.approx(held / 3, rel=0.15)
    changes = [change for _ in range(6) for change in observe(0.5, held)]  # and with more work, whatever it is
    assert changes[-1].rate == pytest.approx(held, rel=0.15)
    assert [change.rate for _ in range(6) for change in observe(0.05, 1.0)] == [1.0], "it is well again"


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_nobody_is_named_where_nobody_is_slow(noise: float) -> None:
    found = trace(1, 500, healthy, noise=noise, busy=0.6)
    assert not any(found)


def test_a_rate_that_changes_is_told_again() -> None:
    def rate(rank: int, iteration: int) -> float:
        return 1.0 if rank != 1 or iteration < BEFORE else 2.57 if iteration < BEFORE + 10 else 5.42

    changes = [change for each in trace(3, BEFORE + 20, rate) for change in each]
    assert [change.rank for change in changes] == [1, 1]
    assert changes[0].rate == pytest.approx(2.57, rel=0.15)
    assert changes[1].before == changes[0].rate
    assert changes[1].rate == pytest.approx(5.42, rel=0.15)


def test_two_of_four_are_told_apart() -> None:
    def rate(rank: int, iteration: int) -> float:
        return 1.0 if iteration < BEFORE else {1: 2.57, 2: 5.42}.get(rank, 1.0)

    estimator = Estimator()
    trace(4, BEFORE + 6, rate, estimator=estimator)
    assert estimator.rates == {1: pytest.approx(2.57, rel=0.15), 2: pytest.approx(5.42, rel=0.15)}


def test_a_rank_that_is_slow_from_the_beginning_is_named_once_anything_is_known() -> None:
    estimator = Estimator()
    trace(5, BEFORE + 2, stepping(3, 5.42, -1), estimator=estimator)
    assert list(estimator.rates) == [3]
    assert estimator.rates[3] == pytest.approx(5.42, rel=0.2)


def test_what_slows_all_is_no_straggling() -> None:
    found = trace(6, BEFORE + 20, lambda rank, iteration: 1.0 if iteration < BEFORE else 4.0)
    assert not any(found)


def test_a_single_slow_iteration_names_nobody() -> None:
    found = trace(7, BEFORE + 8, lambda rank, iteration: 20.0 if (rank, iteration) == (2, BEFORE) else 1.0)
    assert not any(found)


def test_other_kinds_of_work_after_a_switch_name_nobody_and_keep_rates() -> None:
    estimator = Estimator()
    trace(8, BEFORE + 4, stepping(2, 2.57), estimator=estimator)
    rates: Mapping[int, float] = estimator.rates
    # The same straggler under another strategy, whose kinds of work were priced 3 times too low.
    for _ in range(12):
        work = {rank: {"layer tp2": (3.0 * rates.get(rank, 1.0), 1.0)} for rank in range(RANKS)}
        assert estimator.observe(work) == ()
    assert estimator.rates == rates


def test_ranks_that_stay_are_known_by_their_new_numbers_and_others_are_found_without_learning_anew() -> None:
    before = Estimator()
    trace(3, 24, stepping(1, 5.42), estimator=before)
    numbers = {1: 3, 2: 0, 3: 1}  # rank 0 is lost, rank 2 is new
    after = before.among(numbers)
    assert after.rates == {3: before.rates[1]}
    assert after.scatter > 0

    def rate(who: int, iteration: int) -> float:
        return {3: 5.42, 0: 2.57 if iteration else 1.0}.get(who, 1.0)

    named = [[change.rank for change in each] for each in trace(3, 5, rate, estimator=after)]
    assert [rank for each in named for rank in each] == [0], "rank 3 is as slow as it is known to be"
    assert after.rates[0] == pytest.approx(2.57, rel=0.15)
    assert before.rates.keys() == {1}, "it is as it was: ranks may have to meet once more"


def test_idle_ranks_go_by_probes() -> None:
    estimator = Estimator()
    trace(9, BEFORE + 4, stepping(2, 5.42), estimator=estimator)
    named = [estimator.observe({}, {2: 1.02}) for _ in range(4)]
    assert [change.recovered for each in named for change in each] == [True]

"""Local search: the example of its module, and a search that never leaves a spread that one step improves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.local_search import AssignmentArrays
from hydragraph.planner.assignment.problem import AssignmentProblem, problem_of
from tests.planner.examples import pipelines
from tests.uncompiled import uncompiled


def equal_pipelines(work: list[float], count: int) -> AssignmentArrays:
    """Return sequences of this work, and pipelines without a bubble that take anything."""
    terms = np.zeros((1, local_search.COLUMNS))
    terms[0, local_search.MODE] = local_search.EQ3
    return AssignmentArrays(np.array(work).reshape(-1, 1), np.array(work), np.zeros(count, np.int64), terms)


def test_the_example_of_the_module() -> None:
    instance = equal_pipelines([5.0, 4.0, 3.0, 3.0, 3.0], 2)
    placed = local_search.longest_first(instance, np.zeros(2, np.int64), False)
    assert placed.tolist() == [0, 1, 1, 0, 1]
    assert local_search.ends_of(placed, instance).tolist() == [8.0, 10.0]
    assert local_search.quick_end(instance) == 10.0
    assert local_search.descend(placed, instance, np.zeros(2)) == 9.0
    assert placed.tolist() == [0, 0, 1, 1, 1]


def test_shares_are_rounded_along_the_sequences() -> None:
    shares = np.array([[1 / 3, 2 / 3]] * 6)
    assert local_search.rounded(shares).argmax(1).tolist() == [1, 0, 1, 1, 0, 1]


def after_any_step(problem: AssignmentProblem, placed: np.ndarray, last: int) -> list[float]:
    """Return the later end of both pipelines, of every move and swap that takes a sequence from the last pipeline."""
    ends = []
    for i in np.flatnonzero(placed == last):
        for q in range(len(problem.pipelines)):
            partners: list[int] = [-1, *(int(k) for k in np.flatnonzero(placed == q) if k > i)] if q != last else []
            for k in partners:
                trial = placed.copy()
                trial[i] = q
                if k >= 0:
                    trial[k] = last
                if all(np.isfinite(problem.cost[j, problem.kind_of[p]]) for j, p in enumerate(trial)):
                    after = local_search.ends_of(trial, problem.instance)
                    ends.append(max(after[last], after[q]))
    return ends


# With more tokens such a pipeline forms more micro-batches, and ends less than the added work later.
FORMS_MORE = PipelineCost(a=1e-5, b=0.0625, c=0.0, stages=2, max_len=2000, util_len=453, devices=1)


@given(pipelines(), st.lists(st.integers(1, 2000), min_size=1, max_size=8), st.booleans())
@example((FORMS_MORE, FORMS_MORE), [1, 1, 323, 541, 579], True)
@settings(max_examples=30)
def test_descent_ends_where_no_step_helps(kinds: tuple[PipelineCost, ...], sizes: list[int], formed: bool) -> None:
    problem = problem_of(kinds, sizes, formed=formed)
    placed = np.asarray(local_search.longest_first(problem.instance, np.zeros(len(kinds), np.int64), False))
    end = local_search.descend(placed, problem.instance, np.zeros(len(kinds)))
    ends = local_search.ends_of(placed, problem.instance)
    assert end == max(ends)
    last = int(np.argmax(ends))
    assert all(later >= end * (1 - 1e-9) for later in after_any_step(problem, placed, last))


@given(pipelines(), st.lists(st.sampled_from([1, 5, 60, 61, 700]), min_size=2, max_size=20), st.booleans(), st.data())
@settings(max_examples=max(10, settings.default.max_examples // 33))
def test_a_step_is_the_best_of_all_though_of_equal_sequences_one_is_looked_at(
    kinds: tuple[PipelineCost, ...], sizes: list[int], formed: bool, data: st.DataObject
) -> None:
    problem = problem_of(kinds, sizes, formed=formed)
    count, nothing = len(kinds), np.zeros(len(kinds))
    fitting = [np.flatnonzero(np.isfinite(row[problem.kind_of])).tolist() for row in problem.cost]
    assume(all(fitting))
    placed = np.array([data.draw(st.sampled_from(each)) for each in fitting])
    state = local_search.no_state(count)
    local_search.recount(placed, problem.instance, nothing, np.ones(count, np.bool_), state)
    last = int(np.argmax(state.ends))
    with uncompiled(local_search):  # its only caller, `descend`, is compiled
        later, i, _, _ = local_search.best_step(last, np.inf, placed, problem.instance, nothing, state)
    least = min(after_any_step(problem, placed, last), default=np.inf)
    assert later == pytest.approx(min(least, state.ends[last]))
    assert i >= 0 or least >= state.ends[last] * (1 - 1e-9)


def test_a_seed_gives_the_same_kicks_and_never_a_worse_spread() -> None:
    instance = equal_pipelines(np.sort(np.random.default_rng(3).random(40))[::-1].tolist(), 7)
    start = local_search.longest_first(instance, np.zeros(7, np.int64), False)
    one = start.copy()
    two = start.copy()
    first = local_search.kick(one, instance, np.zeros(7), 20, 0.0, 5)
    assert first == local_search.kick(two, instance, np.zeros(7), 20, 0.0, 5)
    assert one.tolist() == two.tolist()
    assert first == pytest.approx(max(local_search.ends_of(one, instance)))
    assert first <= max(local_search.ends_of(start, instance))

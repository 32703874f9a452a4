"""The search by the schedule: its arrays stay true to each other, it never loses, and more of it is never worse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.assignment.assign_mini_batch import (
    BoundedMiniBatch,
    MicroBatchCut,
    bounded_pipelines,
    enveloped,
)
from hydragraph.planner.assignment.schedule_search import ends_of, improve
from tests.planner.examples import pipelines, uneven

SIZES = st.lists(st.integers(1, 2000), min_size=1, max_size=25)


def run(
    start: BoundedMiniBatch, cut: MicroBatchCut, kicks: int, tasks: int, seed: int = 0
) -> tuple[float, list[np.ndarray]]:
    arrays = [cut.placed.copy(), cut.batch.copy(), cut.order.copy(), cut.count.copy()]
    return float(improve(*arrays, start.given, kicks, tasks, 0.0, seed)), arrays


def test_the_example_of_the_module() -> None:
    kind = PipelineCost(0.0, 1.0, 0.0, 2, 4, 1, 1)
    assert kind.seconds([[4], [4], [2], [2]]) == pytest.approx(16.0)
    assert kind.seconds([[2], [4], [4], [2]]) == pytest.approx(14 + 2 / 3)
    start = bounded_pipelines([kind], [4, 4, 2, 2])
    every = [np.zeros(4, np.int64), np.arange(4), np.arange(4).reshape(1, 4), np.array([4])]
    assert improve(*every, start.given, 0, 10_000, 0.0, 0) == pytest.approx(14 + 2 / 3)


@given(uneven(pipelines()), SIZES, st.integers(0, 30), st.sampled_from([0, 300, 5000, 100_000]))
@settings(max_examples=max(20, settings.default.max_examples // 16))
def test_what_it_leaves_is_an_assignment_that_ends_when_it_says(
    kinds: tuple[PipelineCost, ...], sizes: list[int], kicks: int, tasks: int
) -> None:
    start = bounded_pipelines(kinds, sizes)
    cut = enveloped(start)
    before = float(ends_of(cut.placed, cut.batch, cut.order, cut.count, start.given).max())
    end, (placed, batch, order, count) = run(start, cut, kicks, tasks)
    assert end <= before
    assert ends_of(placed, batch, order, count, start.given).max() == pytest.approx(end, rel=1e-12)
    used = [order[p, x] for p in range(len(kinds)) for x in range(count[p])]
    assert sorted(used) == sorted(set(batch.tolist()))
    for p in range(len(kinds)):
        for m in order[p, : count[p]]:
            assert (placed[batch == m] == p).all()
            assert start.problem.lengths[batch == m].sum() <= kinds[p].max_len


@given(uneven(pipelines()), SIZES, st.integers(0, 3))
@settings(max_examples=max(10, settings.default.max_examples // 33))
def test_more_kicks_and_more_tasks_are_never_worse(
    kinds: tuple[PipelineCost, ...], sizes: list[int], seed: int
) -> None:
    start = bounded_pipelines(kinds, sizes)
    cut = enveloped(start)
    found = [run(start, cut, *effort, seed)[0] for effort in ((0, 0), (0, 1000), (2, 1000), (2, 20_000), (9, 20_000))]
    assert found == sorted(found, reverse=True)

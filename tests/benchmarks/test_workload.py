"""Ends of pipelines of equal stages, against explicit dependencies and closed forms."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.published.workload import FORWARD, pipeline_seconds
from hydragraph.cost.micro_batch_order import largest_in_middle


def by_dependencies(costs: list[list[float]], order: list[int]) -> float:
    """Return the longest path through all forwards and backwards: each stage's order, and what each waits for."""
    stages, count = len(costs), len(order)
    tasks: dict[tuple[str, int, int], float] = {}
    after: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}
    for s in range(stages):
        warm = min(stages - 1 - s, count)
        line = [("f", m) for m in order[:warm]]
        for m in range(count - warm):
            line += [("f", order[warm + m]), ("b", order[m])]
        line += [("b", m) for m in order[count - warm :]]
        for i, (what, m) in enumerate(line):
            tasks[what, s, m] = costs[s][m] * (FORWARD if what == "f" else 1 - FORWARD)
            before = [(line[i - 1][0], s, line[i - 1][1])] if i else []
            if what == "f":
                before += [("f", s - 1, m)] if s else []
            else:
                before += [("b", s + 1, m)] if s < stages - 1 else [("f", s, m)]
            after[what, s, m] = before
    ends: dict[tuple[str, int, int], float] = {}

    def end(task: tuple[str, int, int]) -> float:
        if task not in ends:
            ends[task] = tasks[task] + max((end(b) for b in after[task]), default=0.0)
        return ends[task]

    return max(map(end, tasks))


COSTS = st.lists(st.floats(0.1, 9), min_size=1, max_size=6)


def test_two_micro_batches_by_hand() -> None:
    assert pipeline_seconds([3.0, 6.0], 2) == pytest.approx(14.0)


@given(COSTS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_it_is_the_longest_path(costs: list[float], stages: int, random: Random) -> None:
    order = list(range(len(costs)))
    random.shuffle(order)
    end = pipeline_seconds([costs[m] for m in order], stages)
    assert end == pytest.approx(by_dependencies([costs] * stages, order), rel=1e-12)


@given(st.integers(1, 6), st.integers(1, 9), st.floats(0.1, 9))
def test_equal_micro_batches_take_v_plus_pp_minus_one(stages: int, count: int, cost: float) -> None:
    assert pipeline_seconds([cost] * count, stages) == pytest.approx(cost * (count + stages - 1), rel=1e-9)


def test_pipelines_fill_and_drain_faster_with_the_largest_micro_batch_in_the_middle() -> None:
    costs = np.array([5.0, 1.0, 4.0, 2.0, 3.0])
    order = np.argsort(largest_in_middle(costs))
    assert pipeline_seconds(costs[order].tolist(), 3) < pipeline_seconds(sorted(costs.tolist(), reverse=True), 3)


def test_no_micro_batches_take_no_time() -> None:
    assert pipeline_seconds([], 3) == 0.0

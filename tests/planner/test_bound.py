"""The relaxation against its example, and against spreads that it must not exclude."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.planner.bound import relax


def test_the_example_of_the_module() -> None:
    relaxed = relax(np.array([[4.0, 6.0], [2.0, 8.0]]), lambda z: np.array([z, z]), 6.0)
    assert relaxed.seconds == pytest.approx(3.6)
    assert relaxed.shares == pytest.approx(np.array([[0.4, 0.6], [1.0, 0.0]]))


ROWS = st.lists(st.tuples(*[st.floats(0.1, 10.0)] * 3), min_size=1, max_size=5)


@given(ROWS, st.lists(st.integers(1, 3), min_size=3, max_size=3))
@settings(max_examples=40)
def test_no_spread_ends_before_the_bound(rows: list[tuple[float, float, float]], counts: list[int]) -> None:
    cost = np.array(sorted(rows, reverse=True))
    best = np.inf
    for kinds in itertools.product(range(3), repeat=len(cost)):
        load = np.bincount(kinds, [cost[i, t] for i, t in enumerate(kinds)], 3)
        best = min(best, float((load / counts).max()))  # as if a kind's pipelines could share a sequence
    relaxed = relax(cost, lambda z: np.array(counts) * z, best)
    assert relaxed.seconds <= best * (1 + 1e-9)
    assert relaxed.shares.sum(1) == pytest.approx(np.ones(len(cost)))

"""Micro-batches of one pipeline: the example of their module, and the bound on the largest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.micro_batches import EQ1, form_in_order, largest_at_least, price

WORK = np.array([5.0, 4.0, 3.0, 3.0, 3.0])


def terms(max_len: float, stages: int, util_len: float) -> np.ndarray:
    row = np.zeros(local_search.COLUMNS)
    row[local_search.BUBBLE] = stages - 1
    row[local_search.OVERHEAD] = 1.0
    row[local_search.MAX_LEN] = max_len
    row[local_search.UTIL_LEN] = util_len
    return row


def formed(work: np.ndarray, kind: np.ndarray) -> tuple[float, float, int, list[int]]:
    """Return what `form` does, numbered as they are met, by the function that is compiled for Python's callers."""
    seconds, bound, count, placed = form_in_order(work, work, kind, EQ1, 10)
    met = list(dict.fromkeys(placed.tolist()))
    return seconds, bound, count, [met.index(batch) for batch in placed]


def test_the_example_of_the_module() -> None:
    bounds = [price(EQ1, largest_at_least(WORK, v), WORK.sum(), v, terms(18.0, 4, 3)) for v in range(1, 6)]
    assert bounds == [76.0, 50.0, 42.0, 49.0, 48.0]
    assert formed(WORK, terms(18.0, 4, 3)) == (48.0, 42.0, 3, [0, 1, 2, 2, 1])


def test_capacity_asks_for_more_micro_batches_than_tokens_do() -> None:
    lengths = np.array([3.0, 3.0, 3.0])
    assert formed(lengths, terms(5.0, 1, 5))[2] == 3


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=6), st.integers(1, 6))
@settings(max_examples=40)
def test_no_packing_has_a_smaller_largest_micro_batch(work: list[float], count: int) -> None:
    descending = np.array(sorted(work, reverse=True))
    best = min(
        np.bincount(placed, descending, count).max()
        for placed in itertools.product(range(min(count, len(work))), repeat=len(work))
    )
    bound = largest_at_least(descending, count)
    assert bound <= best * (1 + 1e-12)
    assert largest_at_least(WORK, 2) == pytest.approx(9.0)

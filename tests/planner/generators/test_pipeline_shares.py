from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.planner.generators.pipeline_shares import least_seconds, shares

PIPELINES = st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 3.0)), min_size=1, max_size=3)


@given(PIPELINES, st.integers(1, 7))
def test_shares_are_the_best_of_all(pipelines: list[tuple[float, float]], micro_batches: int) -> None:
    first = np.array([a for a, _ in pipelines])
    each = np.array([b for _, b in pipelines])
    best = np.inf
    for counts in product(range(micro_batches + 1), repeat=len(pipelines)):
        if sum(counts) == micro_batches:
            best = min(best, max(a + (n - 1) * b for a, b, n in zip(first, each, counts, strict=True) if n))
    found = shares(micro_batches, first, each)
    assert found.sum() == micro_batches
    assert max(a + (n - 1) * b for a, b, n in zip(first, each, found, strict=True) if n) == pytest.approx(best)
    alike = np.ones(len(pipelines), np.int64)
    assert least_seconds(micro_batches, first, each, alike) == pytest.approx(best)


def test_nobody_able_takes_forever() -> None:
    nobody = np.array([np.inf])
    assert np.isinf(least_seconds(3, nobody, np.array([1.0]), np.array([1])))

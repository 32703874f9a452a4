"""Distribution of micro-batches over pipelines that minimizes the last end time (Malleus's data ILP).

Pipeline i takes first_i + (m_i - 1) each_i for m_i micro-batches; sum m_i = M. By time T, it can finish
floor((T - first_i) / each_i) + 1 micro-batches, or none if T < first_i. Bisection finds the least T.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from hydragraph.kernels.numba_compiler import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_HALVINGS = 60


@partial(compiled, shared=True)
def able(seconds: float, first: float, each: float) -> int:
    if not seconds >= first:
        return 0
    return int(np.floor((seconds - first) / each * (1 + 1e-12) + 1e-12)) + 1


@compiled
def least_seconds(micro_batches: int, first: Floats, each: Floats, alike: Ints) -> float:
    """Return the least T for `alike` pipelines of each kind [K] (`first`, `each`: seconds [K]); infinite if none can
    run.
    """
    high = np.inf
    for k in range(len(first)):
        high = min(high, first[k] + (micro_batches - 1) * each[k])
    if not high < np.inf:
        return np.inf
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        total = 0
        for k in range(len(first)):
            total += alike[k] * able(middle, first[k], each[k])
        if total >= micro_batches:
            high = middle
        else:
            low = middle
    return high


def shares(micro_batches: int, first: Floats, each: Floats) -> Ints:
    """Return the numbers of micro-batches [P] that minimize the last pipeline's end time."""
    until = least_seconds(micro_batches, first, each, np.ones(len(first), np.int64))
    counts = np.array([able(until, a, b) for a, b in zip(first, each, strict=True)], dtype=np.int64)
    for _ in range(int(counts.sum()) - micro_batches):
        ends = np.where(counts > 0, first + (counts - 1) * each, -1.0)
        counts[int(np.argmax(ends))] -= 1
    return counts

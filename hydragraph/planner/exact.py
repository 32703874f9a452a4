"""The paper's integer programs, solved to optimality through cvxpy: the oracle of the tests, for small cases.

cvxpy is an extra: `pip install hydragraph[exact]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hydragraph.cost.profile import PipelineCost
from hydragraph.errors import Unsupported
from hydragraph.planner.local_search import BUBBLE, FIXED, Floats, Ints
from hydragraph.planner.problem import Problem, problem


def _cvxpy() -> Any:
    try:
        import cvxpy
    except ImportError as error:
        raise Unsupported(
            "cvxpy is not installed",
            where='method="exact"',
            remedy="pip install 'hydragraph[exact]', or method='search'",
        ) from error
    return cvxpy


def exact_dispatch(given: Problem) -> Ints:
    """Solve Eq. 3: m[i, j] in {0, 1}; minimise max_j sum_i m[i, j] cost[i, j] + bubble_j of the longest assigned.

    A pipeline without sequences takes no time: its constants count where it is used.
    """
    cp = _cvxpy()
    n, count = len(given.lengths), len(given.pipelines)
    cost, shape = given.cost[:, given.kind], given.shape[given.kind]
    fits = np.isfinite(cost)
    m, end = cp.Variable((n, count), boolean=True), cp.Variable()
    constraints = [cp.sum(m, axis=1) == 1, m <= fits.astype(float)]
    for j, row in enumerate(shape):
        kind = given.pipelines[j]
        load = np.where(fits[:, j], cost[:, j], 0.0) @ m[:, j]
        alone = row[FIXED] + row[BUBBLE] * (np.where(fits[:, j], cost[:, j], 0.0) + kind.c)
        extra = cp.Variable()  # at least the constants of every sequence that it got
        constraints += [extra >= cp.multiply(alone, m[:, j]), load + extra <= end]
    cp.Problem(cp.Minimize(end), constraints).solve(solver=cp.HIGHS)
    return np.asarray(np.argmax(m.value, axis=1), dtype=np.int64)


def exact_packing(pipeline: PipelineCost, lengths: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Solve Eq. 1: for each V, o[i, j] in {0, 1} with the least largest micro-batch of at most MaxLen tokens.

    Returns:
        The sequences of each micro-batch, and the seconds (PP - 1 + V) max cost.
    """
    given = problem([pipeline], lengths, formed=True)
    if not len(given.lengths):
        return (), 0.0
    tokens, n = given.lengths.sum(), len(given.lengths)
    low = max(1, math.ceil(tokens / pipeline.max_len))
    high = min(max(low, int(tokens // pipeline.util_len)), n)
    best, kept = np.inf, np.zeros(n, dtype=np.int64)
    for count in range(low, n + 1):
        if count > high and best < np.inf:
            break
        found = _least_largest(given.cost[:, 0], given.lengths, count, pipeline.max_len)
        if found is None:
            continue
        largest = max(given.cost[found == j, 0].sum() for j in range(count))
        value = (largest + pipeline.c) * (pipeline.stages - 1 + count)
        if value < best:
            best, kept = value, found
    batches = tuple(tuple(given.order[kept == j].tolist()) for j in range(int(kept.max()) + 1))
    return tuple(b for b in batches if b), float(best)


def _least_largest(work: Floats, lengths: Floats, count: int, max_len: float) -> Ints | None:
    cp = _cvxpy()
    o, largest = cp.Variable((len(work), count), boolean=True), cp.Variable()
    constraints = [cp.sum(o, axis=1) == 1, lengths @ o <= max_len, work @ o <= largest]
    constraints += [o[i, j] == 0 for i in range(min(len(work), count)) for j in range(i + 1, count)]  # symmetry
    found = cp.Problem(cp.Minimize(largest), constraints)
    found.solve(solver=cp.HIGHS)
    return np.asarray(np.argmax(o.value, axis=1), dtype=np.int64) if found.status == "optimal" else None

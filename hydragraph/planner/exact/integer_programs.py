"""The integer programs of Hydraulis, through cvxpy: `pip install hydragraph[exact]`.

Eq. 3, with each pipeline's end time by Eq. 2    `exact_dispatch`
Eq. 1, one program for each V of Appendix C      `exact_packing`
Eq. 3, then Eq. 1 for each pipeline              `exact_assignment`
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.errors import Unsupported
from hydragraph.planner.assignment.local_search import BUBBLE, FIXED, Floats, Ints
from hydragraph.planner.assignment.problem import AssignmentProblem, problem_of
from hydragraph.spec.assignment import Assignment


def cvxpy_with(solver: str, where: str, otherwise: str) -> Any:
    cvxpy: Any = None
    try:
        cvxpy = importlib.import_module("cvxpy")
        has_solver = solver in cvxpy.installed_solvers()
    except ImportError:
        has_solver = False
    if not has_solver:
        remedy = f"pip install 'hydragraph[exact]', or {otherwise}"
        raise Unsupported(f"cvxpy with {solver} is required, but not installed", where=where, remedy=remedy)
    return cvxpy


def _cvxpy() -> Any:
    return cvxpy_with("HIGHS", 'method="exact"', "method='search'")


def exact_assignment(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> Assignment:
    problem = problem_of(pipelines, lengths)
    micro_batches = []
    for pipeline, share in zip(pipelines, problem.shares(exact_dispatch(problem)), strict=True):
        batches, _ = exact_packing(pipeline, [lengths[i] for i in share])
        micro_batches.append(tuple(tuple(share[i] for i in batch) for batch in batches))
    return Assignment(tuple(micro_batches), tuple(map(int, lengths)))


def exact_dispatch(problem: AssignmentProblem) -> Ints:
    """Solve Eq. 3: minimize max_j (sum_i m[i, j] cost[i, j] + b_j).

    m[i, j] is 1 if sequence i is on pipeline j, else 0; b_j is the bubble due to pipeline j's longest sequence.
    """
    cp = _cvxpy()
    n = len(problem.lengths)
    if not n:
        return np.zeros(0, np.int64)
    count = len(problem.pipelines)
    cost = problem.cost[:, problem.kind_of]  # [n, P]
    # [P, 8 + 3 W]
    terms = problem.terms[problem.kind_of]
    fits = np.isfinite(cost)
    m = cp.Variable((n, count), boolean=True)
    end = cp.Variable()
    constraints = [cp.sum(m, axis=1) == 1, m <= fits.astype(float)]
    for j, row in enumerate(terms):
        kind = problem.pipelines[j]
        load = np.where(fits[:, j], cost[:, j], 0.0) @ m[:, j]
        alone = row[FIXED] + row[BUBBLE] * (np.where(fits[:, j], cost[:, j], 0.0) + kind.c)
        extra = cp.Variable()
        constraints += [extra >= cp.multiply(alone, m[:, j]), load + extra <= end]
    cp.Problem(cp.Minimize(end), constraints).solve(solver=cp.HIGHS)
    return np.asarray(np.argmax(m.value, axis=1), dtype=np.int64)


def exact_packing(pipeline: PipelineCost, lengths: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Solve Eq. 1: for each V, find V micro-batches of at most MaxLen tokens that minimize max_j cost_j.

    Returns:
        For the best V, each micro-batch's sequences, and the seconds (PP - 1 + V) max_j cost_j.
    """
    problem = problem_of([pipeline], lengths, formed=True)
    if not len(problem.lengths):
        return (), 0.0
    tokens = problem.lengths.sum()
    n = len(problem.lengths)
    low = max(1, math.ceil(tokens / pipeline.max_len))
    high = min(max(low, int(tokens // pipeline.util_len)), n)
    # For a fixed V, the program is linear.
    best = np.inf
    best_placed = np.zeros(n, dtype=np.int64)
    for count in range(low, n + 1):
        if count > high and best < np.inf:
            break
        placed = _least_largest(problem.cost[:, 0], problem.lengths, count, pipeline.max_len)
        if placed is None:
            continue
        largest = max(problem.cost[placed == j, 0].sum() for j in range(count))
        value = (largest + pipeline.c) * (pipeline.stages - 1 + count)
        if value < best:
            best = value
            best_placed = placed
    batches = tuple(tuple(problem.order[best_placed == j].tolist()) for j in range(int(best_placed.max()) + 1))
    return tuple(b for b in batches if b), float(best)


def _least_largest(work: Floats, lengths: Floats, count: int, max_len: float) -> Ints | None:
    cp = _cvxpy()
    o = cp.Variable((len(work), count), boolean=True)
    largest = cp.Variable()
    constraints = [cp.sum(o, axis=1) == 1, lengths @ o <= max_len, work @ o <= largest]
    # Excludes symmetric solutions.
    constraints += [o[i, j] == 0 for i in range(min(len(work), count)) for j in range(i + 1, count)]
    program = cp.Problem(cp.Minimize(largest), constraints)
    program.solve(solver=cp.HIGHS)
    return np.asarray(np.argmax(o.value, axis=1), dtype=np.int64) if program.status == "optimal" else None

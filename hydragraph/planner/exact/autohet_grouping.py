"""AutoHet's grouping by effective computing power (its equations 2 and 3), solved by SCIP.

Entities (devices, or tensor-parallel groups of one degree) of power g_i and memory m_i form D groups, each a pipeline
with one entity per stage. A group of P stages runs K = M / D of the M micro-batches, and idles for the fraction
rho = (P - 1) / (K + P - 1) of the time. The program is

    maximize  D min_j G_j,   G_j = (1 - rho_j) sum_i g_i x_ij,

where x_ij is 1 if entity i is in group j, else 0. Every entity is in one group, and every group has at least
`least_memory` bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hydragraph.errors import Unsupported
from hydragraph.planner.deadline import is_late
from hydragraph.planner.exact.integer_programs import cvxpy_with

SAME = 1e-9


class NothingHolds(Unsupported):
    """The model needs more memory than all entities have."""


@dataclass(frozen=True)
class EntityKind:
    """Interchangeable entities: power g in any unit, memory m in bytes."""

    power: float
    memory: float
    count: int


@dataclass(frozen=True)
class Grouping:
    """Groups (numbers of entities of each kind), the largest first, and their value D min_j G_j."""

    groups: tuple[tuple[int, ...], ...]
    value: float


def effective_power(kinds: Sequence[EntityKind], group: Sequence[int], micro_batches: float) -> float:
    """Return G of a group (equation 2)."""
    stages = sum(group)
    return micro_batches * sum(k.power * n for k, n in zip(kinds, group, strict=True)) / (micro_batches + stages - 1)


def value_of(kinds: Sequence[EntityKind], groups: Sequence[Sequence[int]], micro_batches: int) -> float:
    """Return the value D min_j G_j of a grouping (equation 3)."""
    per_group = micro_batches / len(groups)
    return len(groups) * min(effective_power(kinds, group, per_group) for group in groups)


def check_entities(kinds: Sequence[EntityKind], micro_batches: int, least_memory: float) -> None:
    if not kinds or any(k.count < 1 or not k.power > 0 or not k.memory > 0 for k in kinds):
        raise ValueError(f"'kinds' is {list(kinds)}: give at least one kind, with positive power, memory and count")
    if micro_batches < 1 or not least_memory >= 0:
        raise ValueError(
            f"micro_batches must be at least 1 and least_memory at least 0, not {micro_batches} and {least_memory}"
        )
    there = sum(k.memory * k.count for k in kinds)
    if there < least_memory:
        raise NothingHolds(
            f"the model needs {least_memory / 1e9:.3g} GB, but all devices together have {there / 1e9:.3g} GB",
            where="grouping by effective computing power",
            remedy="add devices, or shorten the sequences",
        )


def most_groups(kinds: Sequence[EntityKind], micro_batches: int, least_memory: float) -> int:
    entities = sum(k.count for k in kinds)
    fitting = math.inf
    if least_memory > 0:
        fitting = math.floor(sum(k.memory * k.count for k in kinds) / least_memory * (1 + SAME))
    return int(min(entities, micro_batches, fitting))


def most_power_by_scip(
    kinds: Sequence[EntityKind], micro_batches: int, least_memory: float, until: float | None = None
) -> Grouping:
    """Return the most powerful grouping found by the deadline, for small problems, with one integer program for each
    number of groups.

    With z = min_j G_j, the products w_ij = z x_ij are linearized by sum_j w_ij = z.
    """
    cvxpy = cvxpy_with("SCIP", 'solver "scip"', "plan without a solver")
    check_entities(kinds, micro_batches, least_memory)
    kind_of = np.repeat(np.arange(len(kinds)), [k.count for k in kinds])
    powers = np.array([k.power for k in kinds])[kind_of]
    memories = np.array([k.memory for k in kinds])[kind_of]
    most = float(powers.sum())
    best: tuple[tuple[int, ...], ...] = ()
    value = 0.0
    for number in range(most_groups(kinds, micro_batches, least_memory), 0, -1):
        if best and is_late(until):
            break
        limit = {} if until is None else {"limits/time": max(1.0, until - time.monotonic())}
        per_group = micro_batches / number
        x = cvxpy.Variable((len(powers), number), boolean=True)
        w = cvxpy.Variable((len(powers), number), nonneg=True)
        z = cvxpy.Variable(nonneg=True)
        constraints = [
            cvxpy.sum(x, axis=1) == 1,
            cvxpy.sum(x, axis=0) >= 1,
            memories / memories.max() @ x >= least_memory / memories.max(),
            w <= most * x,
            cvxpy.sum(w, axis=1) == z,
            per_group * (powers @ x) >= cvxpy.sum(w, axis=0) + z * (per_group - 1),
        ]
        problem = cvxpy.Problem(cvxpy.Maximize(number * z), [*constraints, number * z >= value * (1 + 1e-6)])
        # No solution within the time limit
        with suppress(cvxpy.SolverError):
            problem.solve(solver="SCIP", scip_params=limit)
        if x.value is None:
            continue
        counted = (np.bincount(kind_of[column], minlength=len(kinds)).tolist() for column in x.value.T > 0.5)
        groups = tuple(sorted(map(tuple, counted), key=lambda group: (-sum(group), group)))
        if value_of(kinds, groups, micro_batches) > value:
            best = groups
            value = value_of(kinds, groups, micro_batches)
    return Grouping(best, value)

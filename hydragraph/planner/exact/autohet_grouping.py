"""AutoHet's grouping by effective computing power (its equations 2 and 3): exactly, and as published, by SCIP.

Entities (devices, or tensor-parallel groups of one degree) of power g_i and memory m_i are put into D groups, each a
pipeline with one entity per stage. With M micro-batches in an iteration a group runs K = M / D of them; with P stages
it waits the fraction rho = (P - 1) / (K + P - 1) of the time (the bubble of the default schedule), so

    maximise  D min_j G_j,   G_j = (1 - rho_j) sum_i g_i x_ij = K sum_i g_i x_ij / (K + P_j - 1),

every entity in exactly one group, every group's memory at least `least_memory`.

Entities of one kind are interchangeable: a group is a pattern (the number of each kind), and a grouping is the number
of uses of each pattern. For given D and threshold z, the patterns of G >= z are known, and whether D of them use up all
entities is an integer program of one row per kind and one for D. G takes few values, so bisection over these is exact.

Bound: G_j >= z is K sum_i g_i x_ij >= z (K + P_j - 1). Summed over the groups: K sum g >= z (N + D (K - 1)), so

    D z <= M sum g / (N + M - D),

which grows with D. So the largest D comes first, and a D is skipped if its bound is below the best result. The same
sum over the D - 1 other groups leaves only patterns in a narrow band above z.

Example: 4 of power 1 and 2 of power 2, M = 8, memory for everything everywhere. D = 6: min G = 1, 6 in all. D = 4: the
two fast ones alone, (1, 1) twice: K = 2, G = 2 and 2 * 2 / 3: 5.33 in all. Bound for D = 6: 8 * 8 / (6 + 8 - 6) = 8.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydragraph.errors import Unsupported

# Maximum number of patterns: the product of all counts.
PATTERNS = 5_000_000
# Relative difference below which numbers are equal.
_SAME = 1e-9


class NothingHolds(Unsupported):
    """All entities together have less memory than the model needs."""


@dataclass(frozen=True)
class Kind:
    """Entities that are interchangeable.

    Attributes:
        power: g of one entity; any unit.
        memory: m, bytes of one entity.
        count: number of entities.
    """

    power: float
    memory: float
    count: int


@dataclass(frozen=True)
class Grouping:
    """Groups of entities.

    Attributes:
        groups: number of each kind in every group, the largest groups first.
        value: D min_j G_j.
        bound: upper bound of any grouping.
    """

    groups: tuple[tuple[int, ...], ...]
    value: float
    bound: float

    @property
    def gap(self) -> float:
        """Relative distance below the bound: 0.01 is 1 %."""
        return 1 - self.value / self.bound


def effective_power(kinds: Sequence[Kind], group: Sequence[int], micro_batches: float) -> float:
    """Return G of a group that runs `micro_batches` micro-batches (equation 2)."""
    stages = sum(group)
    return micro_batches * sum(k.power * n for k, n in zip(kinds, group, strict=True)) / (micro_batches + stages - 1)


def value_of(kinds: Sequence[Kind], groups: Sequence[Sequence[int]], micro_batches: int) -> float:
    """Return D min_j G_j of a grouping (the objective of equation 3)."""
    each = micro_batches / len(groups)
    return len(groups) * min(effective_power(kinds, group, each) for group in groups)


def most_power(kinds: Sequence[Kind], micro_batches: int, least_memory: float, tolerance: float = 0.0) -> Grouping:
    """Group entities for the most effective computing power.

    Args:
        kinds: kinds of the entities.
        micro_batches: M, micro-batches of an iteration over all groups.
        least_memory: bytes that a group needs to train the model.
        tolerance: a grouping within this fraction of the bound ends the search; 0: the optimum.

    Returns:
        the best grouping, and the proven bound: the value itself if the search completed.

    Raises:
        Unsupported: all memory together is less than one group needs, or the kinds have too many patterns.
        ValueError: no entities, or a number that is not positive.
    """
    _check(kinds, micro_batches, least_memory)
    listed = _patterns(kinds)
    best: tuple[tuple[int, ...], ...] = ()
    value = 0.0
    left = 0.0  # the largest bound of a number of groups that was skipped
    for number in range(_most_groups(kinds, micro_batches, least_memory), 0, -1):
        most = power_bound(kinds, number, micro_batches)
        if value >= most * (1 - max(tolerance, _SAME)):
            left = most
            break
        found = _of_number(kinds, listed, number, micro_batches, least_memory, value)
        if found:
            best = found
            value = value_of(kinds, found, micro_batches)
    # Smaller numbers have smaller bounds, so `left` covers them all; the searched ones are below `value`.
    return Grouping(best, value, max(value, left))


def power_bound(kinds: Sequence[Kind], groups: int, micro_batches: int) -> float:
    """Return the upper bound of the power of `groups` groups: M sum g / (N + M - D)."""
    power = sum(k.power * k.count for k in kinds)
    entities = sum(k.count for k in kinds)
    return micro_batches * power / (entities + micro_batches - groups)


def _check(kinds: Sequence[Kind], micro_batches: int, least_memory: float) -> None:
    if not kinds or any(k.count < 1 or not k.power > 0 or not k.memory > 0 for k in kinds):
        raise ValueError(f"kinds are {list(kinds)}: give at least one, of positive power, memory and count")
    if micro_batches < 1 or not least_memory >= 0:
        raise ValueError(f"micro_batches is {micro_batches}, least_memory {least_memory}: give numbers above 0")
    there = sum(k.memory * k.count for k in kinds)
    if there < least_memory:
        raise NothingHolds(
            f"the model needs {least_memory / 1e9:.3g} GB, all devices together have {there / 1e9:.3g} GB",
            where="grouping by effective computing power",
            remedy="add devices, or shorten the sequences",
        )


def _most_groups(kinds: Sequence[Kind], micro_batches: int, least_memory: float) -> int:
    entities = sum(k.count for k in kinds)
    fitting = math.inf
    if least_memory > 0:
        fitting = math.floor(sum(k.memory * k.count for k in kinds) / least_memory * (1 + _SAME))
    return int(min(entities, micro_batches, fitting))


def _patterns(kinds: Sequence[Kind]) -> NDArray[np.int64]:
    """Return the possible numbers of each kind in a group [patterns, kinds]."""
    shape = [k.count + 1 for k in kinds]
    if math.prod(shape) > PATTERNS:
        raise Unsupported(
            f"{len(kinds)} kinds of {sum(k.count for k in kinds)} entities can be grouped in too many ways to list",
            where="grouping by effective computing power",
            remedy="use a higher tensor-parallel degree, which makes fewer entities",
        )
    return np.indices(shape).reshape(len(shape), -1).T[1:]


def _of_number(
    kinds: Sequence[Kind],
    listed: NDArray[np.int64],
    number: int,
    micro_batches: int,
    least_memory: float,
    above: float,
) -> tuple[tuple[int, ...], ...]:
    """Return the best grouping into `number` groups with a value above `above`; empty if none exists."""
    each = micro_batches / number
    powers = np.array([k.power for k in kinds])
    memories = np.array([k.memory for k in kinds])
    counts = np.array([k.count for k in kinds])
    stages = listed.sum(axis=1)
    # The other groups also need memory and at least one entity each.
    rest = counts - listed
    fits = (listed @ memories >= least_memory * (1 - _SAME)) & (rest.sum(axis=1) >= number - 1)
    fits &= rest @ memories >= (number - 1) * least_memory * (1 - _SAME)
    effective = each * (listed @ powers) / (each + stages - 1)
    least = above / number
    values = np.unique(effective[fits & (effective > least * (1 + _SAME))])
    values = values[values <= power_bound(kinds, number, micro_batches) / number * (1 + _SAME)]
    best: tuple[tuple[int, ...], ...] = ()
    low = 0
    high = len(values)
    while low < high:
        middle = (low + high) // 2
        threshold = values[middle]
        others = each * (rest @ powers) - threshold * (rest.sum(axis=1) + (number - 1) * (each - 1))
        usable = fits & (effective >= threshold * (1 - _SAME)) & (others >= -_SAME * each * (counts @ powers))
        found = _used_up(listed[usable], counts, number)
        if found:
            best = found
            low = middle + 1
        else:
            high = middle
    return best


def _used_up(patterns: NDArray[np.int64], counts: NDArray[np.int64], number: int) -> tuple[tuple[int, ...], ...]:
    """Return `number` patterns that use up all entities; empty if that is impossible."""
    from scipy.optimize import LinearConstraint, milp  # only planning needs it

    if not len(patterns):
        return ()
    rows = np.vstack([patterns.T, np.ones(len(patterns))])
    every = np.append(counts, number)
    solved = milp(
        np.zeros(len(patterns)), integrality=np.ones(len(patterns)), constraints=LinearConstraint(rows, every, every)
    )
    if solved.x is None:
        return ()
    times = np.rint(solved.x).astype(np.int64)
    if times.sum() != number or (times @ patterns != counts).any():
        raise RuntimeError(f"the integer program's answer uses {times @ patterns} entities of {counts}")
    groups = [tuple(map(int, pattern)) for pattern, n in zip(patterns, times, strict=True) for _ in range(n)]
    return tuple(sorted(groups, key=lambda group: (-sum(group), group)))


def most_power_by_scip(kinds: Sequence[Kind], micro_batches: int, least_memory: float) -> Grouping:
    """Solve equation 3 as it was published, entity by entity, through cvxpy and SCIP.

    The product (sum_j y_j) z is linear for a given number of groups, so each number is solved separately; the z x_ij
    in the bubble ratio is linearized as w_ij = z x_ij with sum_j w_ij = z. Arguments, return value and errors are those
    of `most_power`, plus `Unsupported` if cvxpy or SCIP is not installed; small instances only.
    """
    cvxpy = _with_scip()
    _check(kinds, micro_batches, least_memory)
    powers = np.array([k.power for k in kinds for _ in range(k.count)])
    memories = np.array([k.memory for k in kinds for _ in range(k.count)])
    most = float(powers.sum())
    best: tuple[tuple[int, ...], ...] = ()
    value = 0.0
    for number in range(_most_groups(kinds, micro_batches, least_memory), 0, -1):
        each = micro_batches / number
        x = cvxpy.Variable((len(powers), number), boolean=True)
        w = cvxpy.Variable((len(powers), number), nonneg=True)
        z = cvxpy.Variable(nonneg=True)
        constraints = [
            cvxpy.sum(x, axis=1) == 1,
            cvxpy.sum(x, axis=0) >= 1,
            memories / memories.max() @ x >= least_memory / memories.max(),
            w <= most * x,
            cvxpy.sum(w, axis=1) == z,
            each * (powers @ x) >= cvxpy.sum(w, axis=0) + z * (each - 1),
        ]
        # Only improvements on larger numbers of groups matter.
        problem = cvxpy.Problem(cvxpy.Maximize(number * z), [*constraints, number * z >= value * (1 + 1e-6)])
        problem.solve(solver="SCIP")
        if x.value is None:
            continue
        groups = _counted(kinds, np.rint(x.value).astype(np.int64))
        if value_of(kinds, groups, micro_batches) > value:
            best = groups
            value = value_of(kinds, groups, micro_batches)
    return Grouping(best, value, value)


def _with_scip() -> Any:
    """Import and return cvxpy with SCIP."""
    try:
        cvxpy: Any = importlib.import_module("cvxpy")
        known = "SCIP" in cvxpy.installed_solvers()
    except ImportError:
        known = False
    if not known:
        raise Unsupported(
            'solver "scip" solves the grouping as it was published through cvxpy with SCIP, which is not installed',
            where="grouping by effective computing power",
            remedy="pip install 'hydragraph[exact]', or plan without a solver",
        )
    return cvxpy


def _counted(kinds: Sequence[Kind], chosen: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
    """Return the number of each kind in every group, from entities by groups."""
    kind_of = [k for k, kind in enumerate(kinds) for _ in range(kind.count)]
    groups = []
    for column in chosen.T:
        members = Counter(kind_of[i] for i in np.flatnonzero(column))
        groups.append(tuple(members[k] for k in range(len(kinds))))
    return tuple(sorted(groups, key=lambda group: (-sum(group), group)))

"""AutoHet's grouping by effective computing power (its equation 3), exactly, for many more entities than SCIP solves.

Entities of one kind are interchangeable: a group is a pattern (the number of each kind), and a grouping is the number
of uses of each pattern. For given D and threshold z, the patterns of G >= z are known, and whether D of them use up all
entities is an integer program of one row per kind and one for D. G takes few values, so bisection over these is exact.
Symbols are those of `planner/exact/autohet_grouping.py`.

Bound: G_j >= z is K sum_i g_i x_ij >= z (K + P_j - 1). Summed over the groups: K sum g >= z (N + D (K - 1)), so

    D z <= M sum g / (N + M - D),

which grows with D. So the largest D comes first, and the search ends at a D whose bound is below the best result. The
same sum over the D - 1 other groups leaves only patterns in a narrow band above z.

Example: 4 of power 1 and 2 of power 2, M = 8: the bound for D = 6 is 8 * 8 / (6 + 8 - 6) = 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, milp

from hydragraph.errors import Unsupported
from hydragraph.planner.exact.autohet_grouping import SAME, EntityKind, Grouping, check_entities, most_groups, value_of

# Maximum number of patterns: the product of all counts.
PATTERNS = 5_000_000


def most_power(kinds: Sequence[EntityKind], micro_batches: int, least_memory: float) -> Grouping:
    """Return the grouping of most effective computing power.

    Args:
        kinds: kinds of the entities.
        micro_batches: M, micro-batches of an iteration over all groups.
        least_memory: bytes that a group needs to train the model.

    Raises:
        Unsupported: all memory together is less than one group needs, or the kinds have too many patterns.
        ValueError: no entities, or a number that is not positive.
    """
    check_entities(kinds, micro_batches, least_memory)
    listed = _patterns(kinds)
    best: tuple[tuple[int, ...], ...] = ()
    value = 0.0
    for number in range(most_groups(kinds, micro_batches, least_memory), 0, -1):
        # Smaller numbers have smaller bounds.
        if value >= power_bound(kinds, number, micro_batches) * (1 - SAME):
            break
        found = _of_number(kinds, listed, number, micro_batches, least_memory, value)
        if found:
            best = found
            value = value_of(kinds, found, micro_batches)
    return Grouping(best, value)


def power_bound(kinds: Sequence[EntityKind], groups: int, micro_batches: int) -> float:
    """Return the upper bound of the power of `groups` groups: M sum g / (N + M - D)."""
    power = sum(k.power * k.count for k in kinds)
    entities = sum(k.count for k in kinds)
    return micro_batches * power / (entities + micro_batches - groups)


def _patterns(kinds: Sequence[EntityKind]) -> NDArray[np.int64]:
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
    kinds: Sequence[EntityKind],
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
    fits = (listed @ memories >= least_memory * (1 - SAME)) & (rest.sum(axis=1) >= number - 1)
    fits &= rest @ memories >= (number - 1) * least_memory * (1 - SAME)
    effective = each * (listed @ powers) / (each + stages - 1)
    least = above / number
    values = np.unique(effective[fits & (effective > least * (1 + SAME))])
    values = values[values <= power_bound(kinds, number, micro_batches) / number * (1 + SAME)]
    best: tuple[tuple[int, ...], ...] = ()
    low = 0
    high = len(values)
    while low < high:
        middle = (low + high) // 2
        threshold = values[middle]
        others = each * (rest @ powers) - threshold * (rest.sum(axis=1) + (number - 1) * (each - 1))
        usable = fits & (effective >= threshold * (1 - SAME)) & (others >= -SAME * each * (counts @ powers))
        found = _used_up(listed[usable], counts, number)
        if found:
            best = found
            low = middle + 1
        else:
            high = middle
    return best


def _used_up(patterns: NDArray[np.int64], counts: NDArray[np.int64], number: int) -> tuple[tuple[int, ...], ...]:
    """Return `number` patterns that use up all entities; empty if that is impossible."""
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

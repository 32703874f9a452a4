"""A proven lower bound on when the last pipeline finishes: the linear relaxation over kinds of pipelines.

Pipelines of one kind are interchangeable, so sequences need only be shared among kinds: minimise theta with
sum_i cost[i, t] x[i, t] <= theta capacity[t](z). For any prices lambda >= 0 of the kinds,
sum_i min_t lambda_t cost[i, t] <= sum_t lambda_t capacity[t](z) must hold of every z that can be reached, whatever x
is: so the bound is exact arithmetic on all sequences, and the linear program, solved on groups of similar lengths, only
finds good prices.

    n  sequences, sorted by length, descending;  K kinds;  t a kind
    z            a time by which all pipelines are to have finished; what is bounded from below
    cost[i, t]   [n, K]  seconds that sequence i adds at least to a pipeline of kind t; infinite where it does not fit
    capacity(z)  [K]     seconds of work that all pipelines of a kind can do by z
    x, `shares`  [n, K]  the part of each sequence that each kind gets; rows add up to 1
    lambda       [K]     `prices`: the duals of the capacities

Example: two sequences, cost [[4, 6], [2, 8]], one pipeline of each kind, capacity(z) = [z, z].

    at prices 1 and 2/3, the first sequence costs min(4, 4) = 4 and the second min(2, 5.33) = 2: 6 in all
    1 z + 2/3 z < 6 excludes every z below 3.6, however sequences are divided
    0.4 of the first and the second take kind 0 until 3.6, and 0.6 of the first kind 1; undivided they end at 6 or later

The papers solve Eq. 3 of Hydraulis or estimate it; this bound is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

Floats = NDArray[np.float64]

# Groups of similar lengths, in the linear program: prices of groups are nearly those of sequences, and always valid.
GROUPS = 200
# Rounds of the program, each at the z that the last one proved.
ROUNDS = 3
# Times the highest price: that of a kind without room, which could take no work whatever it costs.
FORBIDDING = 1e6


@dataclass(frozen=True)
class Relaxation:
    """The bound and where its solution puts each sequence.

    Attributes:
        seconds: no assignment finishes earlier.
        shares: [n, K], the part of each sequence that each kind gets.
    """

    seconds: float
    shares: Floats


def relax(cost: Floats, capacity: Callable[[float], Floats], start: float) -> Relaxation:
    """Return the relaxation.

    Args:
        cost: seconds of each sequence on each kind [n, K], infinite where it does not fit; by length, descending.
        capacity: seconds of work that all pipelines of each kind can do by z [K]; non-decreasing in z.
        start: a z that some assignment reaches.
    """
    if not len(cost):
        return Relaxation(0.0, cost)
    starts = _groups(cost)
    z = start
    shares = np.zeros_like(cost)
    # Prices are best for the capacities at one z, but exclude more z than that; at the z proved, better ones may exist.
    for _ in range(ROUNDS):
        room = capacity(z)
        if not room.any():
            break
        prices, shares = _prices(cost, starts, room)
        below = _reach(cost, prices, capacity, start)
        if z - below <= 1e-4 * z:
            z = below
            break
        z = below
    return Relaxation(z, shares)


def _groups(cost: Floats) -> NDArray[np.int64]:
    """Return where groups of similar sequences start; sequences of a group fit the same kinds."""
    n = len(cost)
    if n <= GROUPS:
        return np.arange(n)
    # Finer groups at the long end, where one sequence matters; a group never spans a length at which a kind drops out.
    fits = np.isfinite(cost).sum(1)
    even = np.unique(np.round(np.geomspace(1, n, GROUPS)).astype(np.int64)) - 1
    return np.unique(np.concatenate([[0], even, np.flatnonzero(np.diff(fits)) + 1]))


def _prices(cost: Floats, starts: NDArray[np.int64], room: Floats) -> tuple[Floats, Floats]:
    """Solve the linear program on groups; return the price of each kind and every sequence's shares."""
    n, kinds = cost.shape
    # Of one kind there is nothing to share, and any price says the same.
    if kinds == 1:
        return np.ones(1), np.ones((n, 1))
    sizes = np.diff(np.append(starts, n))
    bounded = np.where(np.isfinite(cost), cost, 0.0)
    # Variables are the share of each group on each kind that fits, and theta; a row for each kind's capacity, and one
    # for each group, whose shares add up to 1.
    total = np.add.reduceat(bounded, starts, axis=0)
    total[~np.isfinite(cost[starts])] = np.inf
    group, kind = np.nonzero(np.isfinite(total) & (room > 0))
    count = len(group)
    rows = np.concatenate([kind, np.arange(kinds)])
    columns = np.concatenate([np.arange(count), np.full(kinds, count)])
    work = csr_matrix((np.concatenate([total[group, kind], -room]), (rows, columns)), shape=(kinds, count + 1))
    whole = csr_matrix((np.ones(count), (group, np.arange(count))), shape=(len(starts), count + 1))
    objective = np.zeros(count + 1)
    objective[-1] = 1.0
    solution = linprog(
        objective, A_ub=work, b_ub=np.zeros(kinds), A_eq=whole, b_eq=np.ones(len(starts)), method="highs"
    )
    if solution.x is None:  # a kind without room is the only one that some sequence fits
        return np.ones(kinds), np.zeros_like(cost)
    # The capacities' duals are the prices; the solver's sign is that of a minimum, and noise may be below 0.
    shares = np.zeros((len(starts), kinds))
    shares[group, kind] = solution.x[:-1]
    prices = np.maximum(-solution.ineqlin.marginals, 0.0)
    prices[room <= 0] = FORBIDDING * prices.max()
    return prices, np.repeat(shares, sizes, axis=0)


def _reach(cost: Floats, prices: Floats, capacity: Callable[[float], Floats], start: float) -> float:
    """Return the least z that the prices do not exclude, at most `start`, rounded down."""
    # Each sequence where it is cheapest: no spread whatsoever pays less than this for its work.
    priced = np.where(np.isfinite(cost), np.where(np.isfinite(cost), cost, 0.0) * prices, np.inf)
    needed = float(priced.min(1).sum())
    if needed <= 0:
        return 0.0
    if float(prices @ capacity(start)) < needed:
        return start
    # Bisection keeps `low` excluded and `high` not, so returning `low` never claims too much.
    low = 0.0
    high = start
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if float(prices @ capacity(middle)) < needed:
            low = middle
        else:
            high = middle
    return low

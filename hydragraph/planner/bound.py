"""A proven lower bound on when the last pipeline finishes: the linear relaxation over kinds of pipelines.

Pipelines of one kind are interchangeable, so sequences need only be shared among kinds: minimise theta with
sum_i cost[i, t] x[i, t] <= theta capacity[t](z). For any prices lambda >= 0 of the kinds,
sum_i min_t lambda_t cost[i, t] <= sum_t lambda_t capacity[t](z) must hold of every z that can be reached, whatever x
is: so the bound is exact arithmetic on all sequences, and the linear program, solved on groups of similar lengths, only
finds good prices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

Floats = NDArray[np.float64]

GROUPS = 200  # of similar lengths, in the linear program
ROUNDS = 3  # of the program at the z that the last one proved
FORBIDDING = 1e6  # times the highest price: that of a kind without room, which could take no work whatever it costs


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
        cost: [n, K] seconds, infinite where a sequence does not fit; sorted by length, descending.
        capacity: seconds of work that all pipelines of each kind [K] can do by z; non-decreasing in z.
        start: a z that can be reached.
    """
    if not len(cost):
        return Relaxation(0.0, cost)
    starts, z, shares = _groups(cost), start, np.zeros_like(cost)
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
    fits = np.isfinite(cost).sum(1)
    even = np.unique(np.round(np.geomspace(1, n, GROUPS)).astype(np.int64)) - 1
    return np.unique(np.concatenate([[0], even, np.flatnonzero(np.diff(fits)) + 1]))


def _prices(cost: Floats, starts: NDArray[np.int64], room: Floats) -> tuple[Floats, Floats]:
    """Solve the linear program on groups; return the price of each kind and every sequence's shares."""
    n, kinds = cost.shape
    if kinds == 1:
        return np.ones(1), np.ones((n, 1))
    sizes = np.diff(np.append(starts, n))
    bounded = np.where(np.isfinite(cost), cost, 0.0)
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
    found = linprog(objective, A_ub=work, b_ub=np.zeros(kinds), A_eq=whole, b_eq=np.ones(len(starts)), method="highs")
    if found.x is None:  # a kind without room is the only one that some sequence fits
        return np.ones(kinds), np.zeros_like(cost)
    shares = np.zeros((len(starts), kinds))
    shares[group, kind] = found.x[:-1]
    prices = np.maximum(-found.ineqlin.marginals, 0.0)
    prices[room <= 0] = FORBIDDING * prices.max()
    return prices, np.repeat(shares, sizes, axis=0)


def _reach(cost: Floats, prices: Floats, capacity: Callable[[float], Floats], start: float) -> float:
    """Return the least z that the prices do not exclude, at most `start`, rounded down."""
    priced = np.where(np.isfinite(cost), np.where(np.isfinite(cost), cost, 0.0) * prices, np.inf)
    needed = float(priced.min(1).sum())
    low, high = 0.0, start
    if needed <= 0:
        return 0.0
    if float(prices @ capacity(start)) < needed:
        return start
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if float(prices @ capacity(middle)) < needed:
            low = middle
        else:
            high = middle
    return low

"""Lower bound on the last pipeline's end time: a linear relaxation over kinds of pipelines.

Minimize theta subject to sum_i cost[i, t] x[i, t] <= theta capacity[t](z). If some assignment ends by z, then sum_i
min_t lambda_t cost[i, t] <= sum_t lambda_t capacity[t](z) for any prices lambda >= 0. The linear program only has to
find good prices, so it groups similar lengths.

    n  sequences by length, descending;  K kinds;  t a kind
    z            a deadline for all pipelines
    cost[i, t]   [n, K]  least seconds of sequence i on a pipeline of kind t; infinite if it does not fit
    capacity(z)  [K]     seconds of work that a kind's pipelines finish by z
    x, `shares`  [n, K]  fraction of each sequence on each kind; rows add up to 1
    lambda       [K]     `prices`: dual variables of the capacities

If the schedule does not split backwards (`HOLDS_FOR`), `schedule_bound` adds bounds. A pipeline takes at least a
stage's computing time plus the least time in which a sequence reaches the stage (f, forward) and returns from it (b,
backward). For the p longest sequences:

    divided     the relaxation, with z - f - b seconds on each pipeline
    pigeonhole  each pipeline finishes a whole number of sequences by z; these numbers must add up to at least p
    alone       no sequence ends earlier than it would alone on its best pipeline

Example: two one-stage pipelines, sequences of 4, 3 and 3 seconds. The relaxation gives 5, but two sequences share a
pipeline and take at least 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from hydragraph.cost.compiled_replay import AHEAD, BACK, BACKWARD, FORWARD, replay, scratch_of
from hydragraph.cost.stage_arrays import StageTerms, add_pairs, fill_row, pairs_of, table_at
from hydragraph.ir.schedules.schedule_kinds import WHOLE_BACKWARD
from hydragraph.planner.assignment.problem import AssignmentProblem
from hydragraph.planner.bisection import above, bisect

Floats = NDArray[np.float64]

HOLDS_FOR = WHOLE_BACKWARD
# Maximum groups of lengths per linear program, and maximum programs.
GROUPS = 200
ROUNDS = 3
FORBIDDING = 1e6


@dataclass(frozen=True)
class Relaxation:
    """Solution of the linear relaxation; `seconds` is a lower bound on any assignment's time."""

    seconds: float
    shares: Floats
    prices: Floats


def relax(cost: Floats, capacity: Callable[[float], Floats], start: float) -> Relaxation:
    """Solve the linear relaxation for a nondecreasing `capacity` and the end time `start` of a known assignment."""
    if not len(cost):
        return Relaxation(0.0, cost, np.ones(cost.shape[1]))
    # A group's total cost stands for its (consecutive) sequences.
    starts = _groups(cost)
    z = start
    shares = np.zeros_like(cost)
    prices = np.ones(cost.shape[1])
    for _ in range(ROUNDS):
        # Capacity depends on z, so prices for a tighter z may give a better bound. Every round's
        # bound holds.
        room = capacity(z)
        if not room.any():
            break
        prices, shares = _prices(cost, starts, room)
        before = z
        z = _reach(cost, prices, capacity, start)
        if before - z <= 1e-4 * before:
            break
    return Relaxation(z, shares, prices)


def _groups(cost: Floats) -> NDArray[np.int64]:
    n = len(cost)
    if n <= GROUPS:
        return np.arange(n)
    # Groups of long sequences are smaller.
    fits = np.isfinite(cost).sum(1)
    # Groups also end where a kind of pipeline no longer fits, so that members have the same
    # choices.
    even = np.unique(np.round(np.geomspace(1, n, GROUPS)).astype(np.int64)) - 1
    return np.unique(np.concatenate([[0], even, np.flatnonzero(np.diff(fits)) + 1]))


def _prices(cost: Floats, starts: NDArray[np.int64], room: Floats) -> tuple[Floats, Floats]:
    n, kinds = cost.shape
    if kinds == 1:
        return np.ones(1), np.ones((n, 1))
    sizes = np.diff(np.append(starts, n))
    bounded = np.where(np.isfinite(cost), cost, 0.0)
    total = np.add.reduceat(bounded, starts, axis=0)
    # A group's first sequence, its longest, decides whether it fits.
    total[~np.isfinite(cost[starts])] = np.inf
    group, kind = np.nonzero(np.isfinite(total) & (room > 0))
    count = len(group)
    # Variables: x[group, kind] of allowed pairs, then theta. Rows of `work`: sum_i cost x - room
    # theta <= 0.
    rows = np.concatenate([kind, np.arange(kinds)])
    columns = np.concatenate([np.arange(count), np.full(kinds, count)])
    work = csr_matrix((np.concatenate([total[group, kind], -room]), (rows, columns)), shape=(kinds, count + 1))
    whole = csr_matrix((np.ones(count), (group, np.arange(count))), shape=(len(starts), count + 1))
    objective = np.zeros(count + 1)
    objective[-1] = 1.0
    solution = linprog(
        objective, A_ub=work, b_ub=np.zeros(kinds), A_eq=whole, b_eq=np.ones(len(starts)), method="highs"
    )
    if solution.x is None:
        return np.ones(kinds), np.zeros_like(cost)
    # Rounding may make dual prices negative.
    shares = np.zeros((len(starts), kinds))
    shares[group, kind] = solution.x[:-1]
    prices = np.maximum(-solution.ineqlin.marginals, 0.0)
    # A kind without capacity must not look free (dual price 0).
    prices[room <= 0] = FORBIDDING * prices.max()
    return prices, np.repeat(shares, sizes, axis=0)


def _reach(cost: Floats, prices: Floats, capacity: Callable[[float], Floats], start: float) -> float:
    priced = np.where(np.isfinite(cost), np.where(np.isfinite(cost), cost, 0.0) * prices, np.inf)
    needed = float(priced.min(1).sum())
    if needed <= 0:
        return 0.0
    # The prices even bound the known assignment's time, up to rounding.
    if float(prices @ capacity(start)) < needed:
        return start
    return bisect(lambda z: float(prices @ capacity(z)) >= needed, 0.0, start, 1e-9)[0]


@dataclass(frozen=True, eq=False)
class MinimumTimes:
    """Minimum times of sequences on the likely bottleneck stage of each kind of pipeline.

    Attributes:
        work: seconds of each sequence [n, K], infinite if it does not fit.
        overhead: fixed seconds of a micro-batch [K].
        prefixes: last index of each examined prefix of the sorted sequences [p].
        fill: seconds that each prefix's shortest sequence spends before the bottleneck, forward plus backward [p, K].
    """

    work: Floats
    overhead: Floats
    prefixes: NDArray[np.int64]
    fill: Floats

    def divided(self, problem: AssignmentProblem) -> Floats:
        """Return each sequence's work plus its share of overhead [n, K]."""
        per_token = self.overhead / np.array([max(1, kind.max_len) for kind in problem.kinds])
        return np.asarray(self.work + problem.lengths[:, None] * per_token)


def least_of(problem: AssignmentProblem, terms: StageTerms) -> MinimumTimes:
    """Return minimum times for lower bounds on the cost terms (`stage_terms` with `lower`)."""
    n = len(problem.lengths)
    kinds = len(problem.kinds)
    pairs = [[pairs_of(*reach, length) for length in problem.lengths] for reach in terms.reaches]
    # [3 + W, n]
    powers = np.stack([problem.lengths**2, problem.lengths, np.ones(n), *map(np.array, pairs)])
    prefixes = np.unique(np.round(np.geomspace(1, n, min(n, GROUPS))).astype(np.int64)) - 1
    work = np.empty((n, kinds))
    overhead = np.empty(kinds)
    fill = np.empty((len(prefixes), kinds))
    for k in range(kinds):
        seconds = terms.seconds[k, : terms.stages[k]]
        # Seconds to reach each stage and return from it, for each prefix's shortest sequence: [S,
        # p].
        ahead = (seconds[:, :, (FORWARD, BACKWARD)] @ powers[:, prefixes]).max(1).sum(1)
        hops = (seconds[:, :, (AHEAD, BACK)] @ powers[:, prefixes]).max(1).sum(1)
        passed = np.cumsum(ahead + hops, axis=0) - (ahead + hops)  # [S, p]
        # [S, R, 3 + W]
        both = seconds[:, :, FORWARD] + seconds[:, :, BACKWARD]
        sums = np.array([powers[0].sum(), powers[1].sum(), 1.0, *(row.sum() for row in powers[3:])])
        total = both @ sums / problem.counts.sum()
        # Any stage gives a valid bound; most work and the longest way likely give the largest.
        s, r = np.unravel_index(int(np.argmax(total + passed.mean(1)[:, None])), total.shape)
        work[:, k] = both[s, r, :2] @ powers[:2] + both[s, r, 3:] @ powers[3:]
        overhead[k] = both[s, r, 2]
        fill[:, k] = passed[s]
    return MinimumTimes(np.where(np.isfinite(problem.cost), work, np.inf), overhead, prefixes, fill)


def schedule_bound(problem: AssignmentProblem, terms: StageTerms, prices: Floats) -> float:
    """Return the schedule's lower bound on any assignment's end time, for any non-negative prices [K]."""
    if not len(problem.lengths) or not HOLDS_FOR.issuperset(kind.schedule for kind in problem.kinds):
        return 0.0
    least = least_of(problem, terms)
    prices = prices if prices.any() else np.ones_like(prices)
    low = max(_divided(problem, least, prices), alone(problem, terms))
    # Margin for rounding
    return _pigeonhole(problem, least, low) * (1 - 1e-9)


def _divided(problem: AssignmentProblem, least: MinimumTimes, prices: Floats) -> float:
    cost = least.divided(problem)
    finite = np.isfinite(cost)
    cheapest = np.where(finite, np.where(finite, cost, 0.0) * prices, np.inf).min(1)
    # With divided sequences, find the smallest z with sum_t price_t count_t max(0, z - fill_t) >=
    # needed.
    needed = np.cumsum(cheapest)[least.prefixes]
    # Capacity by z: the sum over kinds of price * count * max(0, z - fill).
    order = np.argsort(least.fill, axis=1)
    weights = (prices * problem.counts)[order]
    fills = np.take_along_axis(least.fill, order, axis=1)
    # At z, only kinds with fill below z have capacity: the first k in order of fill. Solve for z
    # with each k; the smallest solution is right.
    paid = np.cumsum(weights, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = (needed[:, None] + np.cumsum(weights * fills, axis=1)) / paid
    return float(np.where(needed > 0, np.where(paid > 0, z, np.inf).min(1), 0.0).max())


def _pigeonhole(problem: AssignmentProblem, least: MinimumTimes, low: float) -> float:
    lengths = problem.lengths[least.prefixes]
    prefix_sizes = least.prefixes + 1
    max_len = np.array([float(kind.max_len) for kind in problem.kinds])
    # A prefix's last sequence is its shortest, so at most `together` share an overhead.
    together = np.maximum(1.0, max_len // lengths[:, None])
    sequence_s = least.work[least.prefixes] + least.overhead / together

    def held(z: float) -> bool:
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.floor(np.maximum(0.0, z - least.fill) / sequence_s * (1 + 1e-12))
        return bool((np.minimum(np.nan_to_num(most, posinf=1e18), 1e18) @ problem.counts >= prefix_sizes).all())

    return low if held(low) else bisect(held, low, above(held, low), 1e-6)[0]


def alone(problem: AssignmentProblem, terms: StageTerms) -> float:
    return max(min(_alone(terms, k, n) for k in kinds) for n, kinds in problem.hardest)


def _alone(terms: StageTerms, kind: int, length: float) -> float:
    stages = int(terms.stages[kind])
    row = np.zeros((1, stages, terms.seconds.shape[3]))
    near = np.zeros(len(terms.reaches))
    add_pairs(near, terms.reaches, length, 1.0)
    fill_row(row[0], terms.seconds[kind], stages, length * length, length, near)
    return float(replay(table_at(terms, kind), stages, row, np.zeros(1, np.int64), 1, scratch_of(stages, 1)))

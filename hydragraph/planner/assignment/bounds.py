"""Lower bound on the last pipeline's end time: a linear relaxation over kinds of pipelines.

Minimize theta subject to sum_i cost[i, t] x[i, t] <= theta capacity[t](z). If some assignment ends by z, then sum_i
min_t lambda_t cost[i, t] <= sum_t lambda_t capacity[t](z) for any prices lambda >= 0. The linear program only has to
find good prices, so it groups similar lengths.

    n  sequences, sorted by length, descending;  K kinds;  t a kind
    z            a deadline for all pipelines
    cost[i, t]   [n, K]  minimum seconds of sequence i on a pipeline of kind t; infinite if it does not fit
    capacity(z)  [K]     seconds of work that all pipelines of a kind finish by z
    x, `shares`  [n, K]  fraction of each sequence on each kind; rows add up to 1
    lambda       [K]     `prices`: dual variables of the capacities

If the schedule does not split backwards (`HOLDS_FOR`), `schedule_bound` adds bounds from the schedule. If every
sequence of a pipeline takes at least f seconds to reach a stage in the forward, and b seconds to return from it in the
backward, the pipeline takes at least f + b plus the stage's computing time. Bounds for the p longest sequences:

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
# Maximum number of groups of lengths in a linear program, and maximum number of programs.
GROUPS = 200
ROUNDS = 3
FORBIDDING = 1e6


@dataclass(frozen=True)
class Relaxation:
    """Solution of the linear relaxation.

    Attributes:
        seconds: lower bound on the time of any assignment.
    """

    seconds: float
    shares: Floats
    prices: Floats


def relax(cost: Floats, capacity: Callable[[float], Floats], start: float) -> Relaxation:
    """Solve the linear relaxation.

    Args:
        capacity: nondecreasing function of the deadline z.
        start: end time of a known assignment.
    """
    if not len(cost):
        return Relaxation(0.0, cost, np.ones(cost.shape[1]))
    # One group per distinct part of the sorted sequences; its total cost stands for all of its
    # sequences.
    starts = _groups(cost)
    z = start
    shares = np.zeros_like(cost)
    prices = np.ones(cost.shape[1])
    for _ in range(ROUNDS):
        # Capacity depends on the deadline, so prices for a tighter z may give a better bound. The
        # bound of every round holds.
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
    # Groups also end where a kind of pipeline no longer fits, so that all members of a group have
    # the same choices.
    even = np.unique(np.round(np.geomspace(1, n, GROUPS)).astype(np.int64)) - 1
    return np.unique(np.concatenate([[0], even, np.flatnonzero(np.diff(fits)) + 1]))


def _prices(cost: Floats, starts: NDArray[np.int64], room: Floats) -> tuple[Floats, Floats]:
    n, kinds = cost.shape
    if kinds == 1:
        return np.ones(1), np.ones((n, 1))
    sizes = np.diff(np.append(starts, n))
    bounded = np.where(np.isfinite(cost), cost, 0.0)
    total = np.add.reduceat(bounded, starts, axis=0)
    # A group's first sequence is its longest, so it decides whether the group fits.
    total[~np.isfinite(cost[starts])] = np.inf
    group, kind = np.nonzero(np.isfinite(total) & (room > 0))
    count = len(group)
    # Variables: x[group, kind] for each allowed pair, then theta. Rows of `work`: sum_i cost x -
    # room theta <= 0.
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
    # A kind without capacity must not look free: its dual price would be 0.
    prices[room <= 0] = FORBIDDING * prices.max()
    return prices, np.repeat(shares, sizes, axis=0)


def _reach(cost: Floats, prices: Floats, capacity: Callable[[float], Floats], start: float) -> float:
    priced = np.where(np.isfinite(cost), np.where(np.isfinite(cost), cost, 0.0) * prices, np.inf)
    needed = float(priced.min(1).sum())
    if needed <= 0:
        return 0.0
    # The prices bound even the known assignment's time, up to rounding.
    if float(prices @ capacity(start)) < needed:
        return start
    return bisect(lambda z: float(prices @ capacity(z)) >= needed, 0.0, start, 1e-9)[0]


@dataclass(frozen=True, eq=False)
class MinimumTimes:
    """Minimum time of each sequence on the likely bottleneck stage of each kind of pipeline.

    Attributes:
        work: seconds of each sequence [n, K], infinite if it does not fit.
        overhead: fixed seconds of a micro-batch [K].
        prefixes: last index of each examined prefix of the sorted sequences [p], ascending.
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
    """Return each sequence's minimum times; see `MinimumTimes`.

    Args:
        terms: lower bounds on each kind's cost terms (`stage_terms` with `lower`).
    """
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
        # Seconds to reach each stage and to return from it, for the shortest sequence of each
        # prefix: [S, p].
        ahead = (seconds[:, :, (FORWARD, BACKWARD)] @ powers[:, prefixes]).max(1).sum(1)
        hops = (seconds[:, :, (AHEAD, BACK)] @ powers[:, prefixes]).max(1).sum(1)
        passed = np.cumsum(ahead + hops, axis=0) - (ahead + hops)  # [S, p]
        # [S, R, 3 + W]
        both = seconds[:, :, FORWARD] + seconds[:, :, BACKWARD]
        sums = np.array([powers[0].sum(), powers[1].sum(), 1.0, *(row.sum() for row in powers[3:])])
        total = both @ sums / problem.counts.sum()
        # Any stage gives a valid bound; the stage with most work and the longest way to it likely
        # gives the largest.
        s, r = np.unravel_index(int(np.argmax(total + passed.mean(1)[:, None])), total.shape)
        work[:, k] = both[s, r, :2] @ powers[:2] + both[s, r, 3:] @ powers[3:]
        overhead[k] = both[s, r, 2]
        fill[:, k] = passed[s]
    return MinimumTimes(np.where(np.isfinite(problem.cost), work, np.inf), overhead, prefixes, fill)


def schedule_bound(problem: AssignmentProblem, terms: StageTerms, prices: Floats) -> float:
    """Return a lower bound on any assignment's end time, based on the schedule.

    Args:
        prices: any non-negative price for each kind [K].
    """
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
    # Sequences can be divided here: find the smallest z with sum_t price_t count_t max(0, z -
    # fill_t) >= needed.
    needed = np.cumsum(cheapest)[least.prefixes]
    # Capacity by time z: the sum over kinds of price * count * max(0, z - fill).
    order = np.argsort(least.fill, axis=1)
    weights = (prices * problem.counts)[order]
    fills = np.take_along_axis(least.fill, order, axis=1)
    # At time z, only kinds with fill below z have capacity: the first k kinds in the order of fill.
    # Solve for z with each k; the smallest solution is the right one.
    paid = np.cumsum(weights, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = (needed[:, None] + np.cumsum(weights * fills, axis=1)) / paid
    return float(np.where(needed > 0, np.where(paid > 0, z, np.inf).min(1), 0.0).max())


def _pigeonhole(problem: AssignmentProblem, least: MinimumTimes, low: float) -> float:
    lengths = problem.lengths[least.prefixes]
    prefix_sizes = least.prefixes + 1
    max_len = np.array([float(kind.max_len) for kind in problem.kinds])
    # All sequences of a prefix are at least as long as its last, so at most `together` share a
    # micro-batch's overhead.
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

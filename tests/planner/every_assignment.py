"""The best of all assignments of a few sequences, with any micro-batches in any order, by enumeration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydragraph.cost.compiled_replay import PARTS, replay, scratch_of
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.stage_arrays import StageTerms, add_pairs, fill_row, stage_terms, table_at
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.assignment.local_search import Floats, Ints
from hydragraph.planner.assignment.problem import problem_of
from hydragraph.spec.assignment import Assignment

# Maximum number of sequences: 8 have 545,835 orders of micro-batches on a single pipeline.
MOST = 8


def exact_assignment(pipelines: Sequence[PipelineCost], lengths: Sequence[int]) -> tuple[float, Assignment]:
    """Return the best of all assignments, and its end.

    Raises:
        ValueError: more than `MOST` sequences, or costs that are not constants.
        Unsupported: a sequence is longer than every MaxLen.
    """
    problem = problem_of(pipelines, lengths, formed=True)
    n = len(problem.lengths)
    terms = stage_terms(problem.kinds, n)
    if n > MOST or not terms.faithful.all():
        raise ValueError(f"{n} sequences, at most {MOST} of them: all assignments are too many, or costs are tables")
    # For every subset of the sequences, the best that a pipeline of each kind can do with it alone.
    alone = [
        _every_subset(problem.lengths, float(kind.max_len), terms, k)
        if n
        else (np.zeros(1), np.zeros((1, 0), np.int64))
        for k, kind in enumerate(problem.kinds)
    ]
    # Pipeline by pipeline: the best way to give the first ones a subset, and the part that the last one gets.
    ends = np.full(1 << n, np.inf)
    ends[0] = 0.0
    shares = []
    for k in problem.kind_of.tolist():
        following = np.full(1 << n, np.inf)
        share = np.zeros(1 << n, np.int64)
        for taken in range(1 << n):
            part = taken
            while True:
                end = max(ends[taken ^ part], alone[k][0][part])
                if end < following[taken]:
                    following[taken] = end
                    share[taken] = part
                if not part:
                    break
                part = (part - 1) & taken
        ends = following
        shares.append(share)
    left = (1 << n) - 1
    micro_batches: list[tuple[tuple[int, ...], ...]] = []
    for k, share in zip(reversed(problem.kind_of.tolist()), reversed(shares), strict=True):
        part = int(share[left])
        mine = [i for i in range(n) if part >> i & 1]
        at = alone[k][1][part]
        batches = [[int(problem.order[i]) for i in mine if at[i] == x] for x in range(len(mine))]
        micro_batches.append(tuple(tuple(b) for b in batches if b))
        left ^= part
    return float(ends[-1]), Assignment(tuple(reversed(micro_batches)), tuple(map(int, lengths)))


@compiled
def _every_subset(lengths: Floats, max_len: float, terms: StageTerms, kind: int) -> tuple[Floats, Ints]:
    """Return the least end of every subset of the sequences (bit i: sequence i), and each one's place in the order."""
    n = len(lengths)
    stages = terms.stages[kind]
    ends = np.full(1 << n, np.inf)
    places = np.full((1 << n, n), -1, np.int64)
    ends[0] = 0.0
    scratch = scratch_of(stages, n)
    table = table_at(terms, kind)
    rows = np.empty((n, stages, PARTS))
    squares = np.zeros(n)
    tokens = np.zeros(n)
    near = np.zeros((n, len(terms.reaches)))
    group = np.zeros(n, np.int64)
    most = np.zeros(n, np.int64)  # the largest group up to each member
    order = np.zeros(n, np.int64)
    for subset in range(1, 1 << n):
        members = np.array([i for i in range(n) if subset >> i & 1])
        count = len(members)
        group[:] = 0
        most[:] = 0
        # Groups as restricted growth strings: a member opens at most the group after the existing ones.
        while True:
            groups = most[count - 1] + 1
            squares[:] = 0.0
            tokens[:] = 0.0
            near[:] = 0.0
            for j in range(count):
                length = lengths[members[j]]
                squares[group[j]] += length * length
                tokens[group[j]] += length
                add_pairs(near[group[j]], terms.reaches, length, 1.0)
            if tokens.max() <= max_len:
                for m in range(groups):
                    fill_row(rows[m], terms.seconds[kind], stages, squares[m], tokens[m], near[m])
                    order[m] = m
                while True:
                    end = replay(table, stages, rows, order, groups, scratch)
                    if end < ends[subset]:
                        ends[subset] = end
                        for j in range(count):
                            for x in range(groups):
                                if order[x] == group[j]:
                                    places[subset, members[j]] = x
                    if not _next_order(order, groups):
                        break
            j = count - 1
            while j > 0 and group[j] > most[j - 1]:
                j -= 1
            if j == 0:
                break
            group[j] += 1
            most[j] = max(most[j - 1], group[j])
            for k in range(j + 1, count):
                group[k] = 0
                most[k] = most[j]
    return ends, places


@compiled
def _next_order(order: Ints, count: int) -> bool:
    """Advance an order to its lexicographic successor, in place; return False after the last one."""
    x = count - 2
    while x >= 0 and order[x] > order[x + 1]:
        x -= 1
    if x < 0:
        return False
    y = count - 1
    while order[y] < order[x]:
        y -= 1
    order[x], order[y] = order[y], order[x]
    low = x + 1
    high = count - 1
    while low < high:
        order[low], order[high] = order[high], order[low]
        low += 1
        high -= 1
    return True

"""Plan with the least cost in Metis's model, found by dynamic programming over labels.

For one order of types and one number of micro-batches B, a plan is a path from (no ranks, no layers) to (all ranks, all
layers). Each step is an *option* (a stage's first rank, number of ranks and degrees) with layers. The cost is

    cost = B generator + (B - 1) max t + max o + max g + sum (t + handed on) + B sync of the last stage

where t, o and g are the milliseconds of a stage's micro-batch, update and gradient transfer (other terms:
`metis_cost`). A *label* is the total (sum, t, o, g) of the stages so far. At the same ranks and layers, label P
dominates label Q if

    P.sum + (B - 1) (P.t - Q.t)^+ + (P.o - Q.o)^+ + (P.g - Q.g)^+ <= Q.sum

Every completion of a label has at least the sum in `sums`, and the t, o and g in `least`. Labels are raised to `least`,
so that more are dominated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.deadline import is_late
from hydragraph.planner.metis.metis_cost import (
    StageRanks,
    powers_of_two,
    price,
    samples_of,
    size_index,
    stage_bytes,
)
from hydragraph.planner.metis.metis_walk import LEAST_MB, replicas_of_one_type
from hydragraph.planner.metis.problem import Floats, Ints, MetisProblem, Tables

_MIB = 1024.0 * 1024.0
_ROUNDING = 1e-12


class Options(NamedTuple):
    """Possible stages for one order of types and one B, sorted by first rank.

    Attributes:
        begin: index of each rank's first option, then O [N + 1].
        size, dp, tp: ranks, replicas, and ranks per replica [O].
        first_row, last_row: rows of `upto` [O]; a stage takes the largest difference in its rows.
        upto: milliseconds of the first l layers [R, L + 1].
        held: MB of the first l layers, each on the type that needs most [O, L + 1].
        limit: MB of all devices or, if `per_rank`, of the smallest [O].
        bandwidth: least bandwidth of the stage's types [O].
        samples: samples per micro-batch and replica [O].
        sync: B times the milliseconds outside layers, if the option is the last stage [O].
        ahead: bandwidth of each rank's type, an upper bound for stages that begin there; infinite at the end [N + 1].
    """

    begin: Ints
    size: Ints
    dp: Ints
    tp: Ints
    first_row: Ints
    last_row: Ints
    upto: Floats
    held: Floats
    limit: Floats
    bandwidth: Floats
    samples: Ints
    sync: Floats
    ahead: Floats


class Shapes(NamedTuple):
    """Stages for one order of types: first rank, size, log2 of tp, and size per type [O, T]."""

    start: Ints
    size: Ints
    degree: Ints
    counts: Ints


def shapes_of(tables: Tables, kinds: Ints, places: Ints, sizes: Ints, mixed_tp: bool, max_tp: int) -> Shapes:
    types, degrees = tables.upto.shape[:2]
    grid = np.meshgrid(np.arange(kinds.size), sizes, np.arange(degrees), indexing="ij")
    start, size, degree = (axis.ravel() for axis in grid)
    able = (start + size <= kinds.size) & (1 << degree <= np.minimum(size, max_tp))
    if not mixed_tp:
        every = zip(start[able].tolist(), size[able].tolist(), (1 << degree[able]).tolist(), strict=True)
        able[able] = [replicas_of_one_type(places, *shape) for shape in every]
    start, size, degree = start[able], size[able], degree[able]
    upto = np.cumsum(np.vstack((np.zeros(types, np.int64), np.eye(types, dtype=np.int64)[kinds])), axis=0)
    return Shapes(start, size, degree, upto[start + size] - upto[start])


def options_of(tables: Tables, kinds: Ints, shapes: Shapes, batches: int) -> Options:
    mbs = tables.batch // (shapes.size >> shapes.degree) // batches
    m = np.where((mbs > 0) & (mbs < tables.size_at.size), tables.size_at[np.minimum(mbs, tables.size_at.size - 1)], -1)
    used = shapes.counts > 0
    able = (m >= 0) & (tables.known[:, shapes.degree, m].T | ~used).all(1)
    rows = tables.upto.reshape(-1, tables.upto.shape[3])
    first_row = np.ravel_multi_index((kinds[shapes.start], shapes.degree, m), tables.sync.shape, mode="clip")
    last_row = first_row + 1
    mixed = np.flatnonzero(able & (used.sum(1) > 1))
    further = np.zeros((int((shapes.size >> shapes.degree)[mixed].sum()), rows.shape[1]))
    end = 0
    for option in mixed.tolist():
        first_row[option] = len(rows) + end
        start, size, degree = shapes.start[option], shapes.size[option], shapes.degree[option]
        row = replica_rows(tables, kinds, start, size, size >> degree, degree, batches, further, end)
        able[option] = row >= 0
        end = max(end, row)
        last_row[option] = len(rows) + end
    start, size, degree = (of[able] for of in shapes[:3])
    m, used, counts = m[able], used[able], shapes.counts[able]
    least = np.where(used, tables.capacity, np.inf).min(1)
    memory = np.where(used[:, :, None], tables.memory[:, degree, m].swapaxes(0, 1), 0.0).max(1)
    return Options(
        np.searchsorted(start, np.arange(kinds.size + 1)),
        size,
        size >> degree,
        1 << degree,
        first_row[able],
        last_row[able],
        np.concatenate((rows, further[:end])),
        np.cumsum(np.hstack((np.zeros((len(memory), 1)), memory)), axis=1),
        least if tables.per_rank else counts @ tables.capacity,
        np.where(used, tables.bandwidth, np.inf).min(1),
        mbs[able],
        batches * np.where(used, tables.sync[:, degree, m].T, -np.inf).max(1),
        np.append(tables.bandwidth[kinds], np.inf),
    )


# numba takes seconds to compile np.concatenate.
@compiled
def longer(rows: Floats, count: int) -> Floats:
    padded = np.zeros((count, rows.shape[1]), rows.dtype)
    padded[: rows.shape[0]] = rows
    return padded


@compiled
def replica_rows(
    tables: Tables, kinds: Ints, start: int, group: int, dp: int, d: int, batches: int, upto: Floats, rows: int
) -> int:
    """Write a mixed stage's rows of `upto`; return the next row, or -1 if a replica was not measured."""
    shares = samples_of(tables, kinds, start, group, dp, d, tables.batch // batches)
    width = group // dp
    for i in range(dp):
        kind = kinds[start + i * width]
        if i > 0 and shares[i] == shares[i - 1] and kind == kinds[start + (i - 1) * width]:
            continue
        upto[rows] = 0.0
        for digit in powers_of_two(shares[i])[::-1]:
            m = size_index(tables, digit)
            if m < 0 or not tables.known[kind, d, m]:
                return -1
            upto[rows] += tables.upto[kind, d, m]
        if shares[i] < 0:
            return -1
        rows += 1
    return rows


@compiled
def took(o: Options, option: int, first: int, end: int) -> float:
    slowest_ms = 0.0
    for row in range(o.first_row[option], o.last_row[option]):
        slowest_ms = max(slowest_ms, o.upto[row, end] - o.upto[row, first])
    return slowest_ms


@compiled
def fits(tables: Tables, o: Options, option: int, first: int, end: int) -> bool:
    memory_mb = o.held[option, end] - o.held[option, first]
    return bool(LEAST_MB + tables.factor * memory_mb <= o.limit[option])


@compiled
def handed_on(tables: Tables, o: Options, option: int, end: int) -> float:
    """Return how many numbers a stage that ends before layer `end` sends to the next stage."""
    if end == tables.share.size - 1:
        return float(o.samples[option] * tables.logits / o.tp[option])
    return float(o.samples[option] * tables.activation)


@compiled
def updating(tables: Tables, o: Options, option: int, count: int) -> float:
    return float(tables.optimizer / o.tp[option] * count / tables.share.size)


@compiled
def gradients(tables: Tables, o: Options, option: int, first: int, end: int) -> float:
    """Return the milliseconds to transfer the gradients of layers [`first`, `end`)."""
    dp = o.dp[option]
    ms_per_byte = 2.0 * (dp - 1) / (dp * o.bandwidth[option] * _MIB)
    return float(ms_per_byte * stage_bytes(tables, first, end, o.tp[option]))


def bounds_of(tables: Tables, o: Options) -> tuple[Floats, Floats, Ints, Ints]:
    """Return lower bounds on the cost of completing a plan after n ranks and l layers.

    Returns:
        sums: least sum of stages [N + 1, L + 1].
        least: least maxima of t, o and g [N + 1, L + 1, 3].
        option, end: first stage of the completion that attains `sums` [N + 1, L + 1].
    """
    shape = (o.begin.size, tables.share.size + 1)
    sums = np.full(shape, np.inf)
    least = np.full((*shape, 3), np.inf)
    chosen = np.full(shape, -1, np.int64)
    ends = np.zeros(shape, np.int64)
    sums[-1, -1] = least[-1, -1] = 0.0
    write_bounds(tables, o, sums, least, chosen, ends)
    return sums, least, chosen, ends


@compiled
def write_bounds(tables: Tables, o: Options, sums: Floats, least: Floats, chosen: Ints, ends: Ints) -> None:
    ranks = o.begin.size - 1
    layers = tables.share.size
    for start in range(ranks - 1, -1, -1):
        for option in range(o.begin[start], o.begin[start + 1]):
            behind = start + o.size[option]
            for first in range(layers - 1, -1, -1):
                for end in range(first + 1, layers + 1):
                    if not np.isfinite(least[behind, end, 0]):
                        continue
                    if not fits(tables, o, option, first, end):
                        break
                    t = took(o, option, first, end)
                    further = o.sync[option]
                    if behind < ranks:
                        between = min(o.bandwidth[option], o.ahead[behind])
                        further = handed_on(tables, o, option, end) / (between * _MIB)
                    here = least[start, first]
                    there = least[behind, end]
                    here[0] = min(here[0], max(there[0], t))
                    here[1] = min(here[1], max(there[1], updating(tables, o, option, end - first)))
                    here[2] = min(here[2], max(there[2], gradients(tables, o, option, first, end)))
                    total = t + further + sums[behind, end]
                    if total < sums[start, first]:
                        sums[start, first] = total
                        chosen[start, first] = option
                        ends[start, first] = end


@compiled
def best_labels(
    tables: Tables, o: Options, batches: int, sums: Floats, least: Floats, best: float, fewest: int
) -> tuple[Ints, int, int]:
    """Search for a plan of at least `fewest` stages that costs less than `best`.

    Returns:
        Each label's origin, the plan's last label (-1: none), and the number of labels.
    """
    ranks = o.begin.size - 1
    layers = tables.share.size
    fixed = batches * tables.generator
    room = 4096
    # Entries of a label: sum, t, o, g, the pending transfer's size (in numbers), and its sender's
    # bandwidth.
    value = np.zeros((room, 6))
    # Entries of a label's origin: previous label, option, end of its layers, next label at the same
    # ranks and layers, number of stages (at most `fewest`).
    origin = np.zeros((room, 5), dtype=np.int64)
    heads = np.full((ranks + 1, layers + 1), -1, dtype=np.int64)
    latest_at = np.full(ranks + 1, np.inf)
    for rank in range(ranks - 1, -1, -1):
        latest_at[rank] = min(latest_at[rank + 1], o.ahead[rank])
    value[0, 1:4] = least[0, 0]
    value[0, 5] = np.inf
    origin[0] = -1, 0, 0, -1, 0
    heads[0, 0] = 0
    label_count = 1
    last = -1
    smallest = o.size.min()
    new = np.zeros(6)
    for start in range(ranks):
        for option in range(o.begin[start], o.begin[start + 1]):
            behind = start + o.size[option]
            for first in range(layers):
                if heads[start, first] < 0:
                    continue
                for end in range(first + 1, layers + 1):
                    if not np.isfinite(least[behind, end, 0]):
                        continue
                    if not fits(tables, o, option, first, end):
                        break
                    t = took(o, option, first, end)
                    update = updating(tables, o, option, end - first)
                    gradient = gradients(tables, o, option, first, end)
                    label = heads[start, first]
                    while label >= 0:
                        if label_count == value.shape[0]:
                            value = longer(value, 2 * label_count)
                            origin = longer(origin, 2 * label_count)
                        handed = value[label, 4] / (min(value[label, 5], o.bandwidth[option]) * _MIB)
                        new[0] = value[label, 0] + handed + t
                        new[1] = max(value[label, 1], t, least[behind, end, 0])
                        new[2] = max(value[label, 2], update, least[behind, end, 1])
                        new[3] = max(value[label, 3], gradient, least[behind, end, 2])
                        before = label
                        label = origin[label, 3]
                        stages = min(origin[before, 4] + 1, fewest)
                        if stages + min((ranks - behind) // smallest, layers - end) < fewest:
                            continue
                        if behind == ranks:
                            cost = new[0] + o.sync[option] + (batches - 1) * new[1] + new[2] + new[3] + fixed
                            if cost < best:
                                best = cost
                                last = label_count
                                origin[last] = before, option, end, -1, 0
                                label_count += 1
                            continue
                        new[4] = handed_on(tables, o, option, end)
                        new[5] = o.bandwidth[option]
                        soonest = new[4] / (min(new[5], o.ahead[behind]) * _MIB)
                        latest = new[4] / (min(new[5], latest_at[behind]) * _MIB)
                        rest = (batches - 1) * new[1] + sums[behind, end]
                        if new[0] + soonest + new[2] + new[3] + fixed + rest >= best * (1.0 - _ROUNDING):
                            continue
                        head = heads[behind, end]
                        if is_needless(value, origin, head, new, stages, soonest, batches, latest_at[behind]):
                            continue
                        head = without_needless(value, origin, head, new, stages, latest, batches, o.ahead[behind])
                        value[label_count] = new
                        origin[label_count] = before, option, end, head, stages
                        heads[behind, end] = label_count
                        label_count += 1
    return origin, last, label_count


@compiled
def excess(batches: int, one: Floats, other: Floats) -> float:
    """Return how much more `one` may cost than `other` because of t, o and g, whatever stages follow."""
    return float(
        (batches - 1) * max(0.0, one[1] - other[1]) + max(0.0, one[2] - other[2]) + max(0.0, one[3] - other[3])
    )


@compiled
def is_needless(
    value: Floats, origin: Ints, head: int, new: Floats, stages: int, soonest: float, batches: int, slow: float
) -> bool:
    """Return whether an existing label at the same ranks and layers dominates the new label.

    If pending transfers differ, the existing label's is the slowest (`slow`), and the new one's the fastest
    (`soonest`).
    """
    label = head
    while label >= 0:
        here = value[label]
        more = here[0] - new[0] + excess(batches, here, new)
        if here[4] != new[4] or here[5] != new[5]:
            more += here[4] / (min(here[5], slow) * _MIB) - soonest
        if more <= 0.0 and origin[label, 4] >= stages:
            return True
        label = origin[label, 3]
    return False


@compiled
def without_needless(
    value: Floats, origin: Ints, head: int, new: Floats, stages: int, latest: float, batches: int, fast: float
) -> int:
    """Remove the labels that the new label dominates; return the first that is left."""
    before = -1
    label = head
    while label >= 0:
        here = value[label]
        following = origin[label, 3]
        more = new[0] - here[0] + excess(batches, new, here)
        if here[4] != new[4] or here[5] != new[5]:
            more += latest - here[4] / (min(here[5], fast) * _MIB)
        if more <= 0.0 and origin[label, 4] <= stages:
            if before < 0:
                head = following
            else:
                origin[before, 3] = following
        else:
            before = label
        label = following
    return head


def _plan_of_sums(o: Options, chosen: Ints, ends: Ints) -> Ints:
    start = 0
    options = []
    bounds = [0]
    while start < o.begin.size - 1:
        options.append(chosen[start, bounds[-1]])
        bounds.append(ends[start, bounds[-1]])
        start += o.size[options[-1]]
    return _rows(o, options, bounds)


def _plan_of_label(o: Options, origin: Ints, last: int) -> Ints:
    options = []
    bounds = []
    label = last
    while label > 0:
        label, option, end = origin[label, :3]
        options.append(option)
        bounds.append(end)
    return _rows(o, options[::-1], [0, *bounds[::-1]])


def _rows(o: Options, options: Sequence[int], bounds: Sequence[int]) -> Ints:
    rows = np.zeros((4, len(bounds)), dtype=np.int64)
    for s, option in enumerate(options):
        rows[:3, s] = o.size[option], o.dp[option], o.tp[option]
    rows[3] = bounds
    return rows


class _Case(NamedTuple):
    bound: float
    types: tuple[str, ...]
    batches: int
    options: Options
    sums: Floats
    least: Floats


class Optimum(NamedTuple):
    """Best plan as rows, and the number of labels."""

    types: tuple[str, ...]
    batches: int
    rows: Ints
    cost: float
    labels: int


def optimum(
    problem: MetisProblem,
    mixed_tp: bool,
    *,
    smallest: int = 1,
    fewest: int = 1,
    known: Optimum | None = None,
    until: float | None = None,
) -> Optimum | None:
    """Return the plan of least cost (or `known`), or None if no plan fits.

    Args:
        smallest: minimum number of ranks of a stage, a power of two.
    """
    tables = problem.tables
    best = known
    ranks = problem.cluster.devices
    sizes = np.array([1 << i for i in range(ranks.bit_length()) if 1 << i >= smallest], dtype=np.int64)
    cases: list[_Case] = []
    for types in permutations(problem.types):
        kinds = problem.kinds(types)
        places = problem.places(types)
        shapes = shapes_of(tables, kinds, places, sizes, mixed_tp, problem.max_tp)
        for batches in (number for number in range(1, problem.batch + 1) if problem.batch % number == 0):
            if best is not None and is_late(until):
                break
            options = options_of(tables, kinds, shapes, batches)
            sums, least, chosen, ends = bounds_of(tables, options)
            if not np.isfinite(sums[0, 0]):
                continue
            rows = _plan_of_sums(options, chosen, ends)
            if rows.shape[1] > fewest:
                best = _better(problem, best, types, batches, rows)
            start = least[0, 0]
            pipeline_ms = (batches - 1) * start[0] + start[1] + start[2] + sums[0, 0]
            bound = float(pipeline_ms + batches * tables.generator)
            cases.append(_Case(bound, types, batches, options, sums, least))
    labels = 0 if known is None else known.labels
    for case in sorted(cases, key=lambda case: case.bound):
        if best is not None and (is_late(until) or case.bound >= best.cost * (1.0 - _ROUNDING)):
            break
        cost = np.inf if best is None else best.cost
        origin, last, looked_at = best_labels(tables, case.options, case.batches, case.sums, case.least, cost, fewest)
        if last >= 0:
            best = _better(problem, best, case.types, case.batches, _plan_of_label(case.options, origin, last))
        labels += looked_at
    return None if best is None else best._replace(labels=labels)


def _better(problem: MetisProblem, best: Optimum | None, types: tuple[str, ...], batches: int, rows: Ints) -> Optimum:
    ranks = StageRanks(problem.kinds(types), *rows[:3, :-1].copy())
    parts_ms = price(problem.tables, ranks, rows[3], batches, len(ranks.groups))
    cost = float(parts_ms.sum())
    return Optimum(types, batches, rows, cost, 0) if best is None or cost < best.cost else best

"""Metis's cost model of an iteration.

    s    a stage of S, with dp * tp ranks and layers a to b - 1
    B    number of micro-batches
    mbs  samples per micro-batch and replica, batch // dp // B

A stage of one device type takes upto[b] - upto[a] for a micro-batch. A stage of several types splits its batch // B
samples over replicas by speed for one sample. A replica computes 5 samples in the time of 4 plus that of 1. The cost in
milliseconds, with the least bandwidth of any type involved, is

    total = (B - 1) max_s t_s + sum_s t_s                     pipeline
          + B max of sync over the last stage's types         time outside layers
          + max_s optimizer / tp * (b - a) / L                update
          + max_s 2 (dp - 1) / dp * bytes / tp / bandwidth    gradients
          + sum_{s < S - 1} numbers sent / bandwidth          activations (numbers, not bytes, as in Metis)
          + B generator                                       data
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.metis.problem import Floats, Ints, StagePlan, Tables

_MIB = 1024.0 * 1024.0

PARTS = ("execution", "sync", "optimizer", "gradients", "activations", "generator")


class StageRanks(NamedTuple):
    """Ranks of stages.

    Attributes:
        kinds: type of each rank [N].
        groups, dp, tp: ranks, replicas, and ranks per replica of each stage [S].
    """

    kinds: Ints
    groups: Ints
    dp: Ints
    tp: Ints


def parts(plan: StagePlan) -> dict[str, float]:
    """Return the parts of a plan's cost in milliseconds, as in Metis, even for plans that cannot train.

    Raises:
        ValueError: the profile has no measurement for a stage.
    """
    problem = plan.problem
    tables = problem.tables
    dp, tp = zip(*plan.degrees, strict=True)
    if max(tp) > 1 << (tables.upto.shape[1] - 1):
        raise ValueError(f"{plan} has tp {max(tp)}: use degrees up to {1 << (tables.upto.shape[1] - 1)}")
    ranks = StageRanks(problem.kinds(plan.types), *(np.array(column, np.int64) for column in (plan.groups, dp, tp)))
    parts_ms = price(tables, ranks, np.array(plan.partition, np.int64), plan.batches, len(plan.groups))
    if not np.isfinite(parts_ms).all():
        raise ValueError(
            f"{plan}: the profile has no entry for a stage's micro-batch size or degree; measure all stages first"
        )
    return dict(zip(PARTS, map(float, parts_ms), strict=True))


def cost(plan: StagePlan) -> float:
    """Return a plan's iteration time in milliseconds."""
    total = 0.0
    for part in parts(plan).values():
        total += part
    return total


@partial(compiled, shared=True)
def price(tables: Tables, ranks: StageRanks, bounds: Ints, batches: int, count: int) -> Floats:
    """Return the parts [6] of a plan's cost, infinite if not measured.

    Args:
        bounds: first layer of each stage, and the end [S + 1].
        count: number of stages to price; Metis sometimes prices only the first.
    """
    kinds, groups, dp, tp = ranks
    layers = tables.share.size
    parts_ms = np.zeros(6)
    slowest = 0.0
    total = 0.0
    start = 0
    for s in range(count):
        first, end = bounds[s], bounds[s + 1]
        d = degree_index(tp[s])
        t = stage_ms(tables, kinds, start, groups[s], dp[s], d, first, end, batches)
        slowest = max(slowest, t)
        total += t
        mbs = tables.batch // dp[s] // batches
        bandwidth = least_bandwidth(tables, kinds, start, groups[s])
        if s == count - 1:
            parts_ms[1] = sync_ms(tables, kinds, start, groups[s], d, mbs) * batches
        else:
            between = min(bandwidth, least_bandwidth(tables, kinds, start + groups[s], groups[s + 1]))
            handed = mbs * tables.logits / tp[s] if end == layers - 1 else mbs * tables.activation
            parts_ms[4] += handed / (between * _MIB)
        update = tables.optimizer / tp[s] * (end - first) / layers
        parts_ms[2] = max(parts_ms[2], update)
        bytes_ = stage_bytes(tables, first, end, tp[s])
        parts_ms[3] = max(parts_ms[3], 2.0 * (dp[s] - 1) / (dp[s] * bandwidth * _MIB) * bytes_)
        start += groups[s]
    parts_ms[0] = (batches - 1) * slowest + total
    parts_ms[5] = batches * tables.generator
    return parts_ms


@compiled
def degree_index(tp: int) -> int:
    d = 0
    while tp > 1:
        tp >>= 1
        d += 1
    return d


@compiled
def one_type(kinds: Ints, start: int, size: int) -> bool:
    """Return whether a group's ranks, sorted by type, have one type."""
    return bool(kinds[start] == kinds[start + size - 1])


@compiled
def least_bandwidth(tables: Tables, kinds: Ints, start: int, size: int) -> float:
    return float(tables.bandwidth[kinds[start : start + size]].min())


@compiled
def sync_ms(tables: Tables, kinds: Ints, start: int, size: int, d: int, mbs: int) -> float:
    """Return the milliseconds spent outside layers on the slowest type; infinite if not measured."""
    m = size_index(tables, mbs)
    mine = kinds[start : start + size]
    if m < 0 or not tables.known[:, d, m][mine].all():
        return np.inf
    return float(tables.sync[:, d, m][mine].max())


@compiled
def stage_bytes(tables: Tables, first: int, end: int, tp: int) -> float:
    middle = end - first
    total_bytes = 0.0
    if first == 0:
        total_bytes += tables.parameters[0] / tp
        middle -= 1
    if end == tables.share.size:
        total_bytes += tables.parameters[2] / tp
        middle -= 1
    return float(total_bytes + tables.parameters[1] / tp * middle)


@compiled
def size_index(tables: Tables, mbs: int) -> int:
    return int(tables.size_at[mbs]) if 0 < mbs < tables.size_at.size else -1


@compiled
def stage_ms(
    tables: Tables, kinds: Ints, start: int, size: int, dp: int, d: int, first: int, end: int, batches: int
) -> float:
    """Return the milliseconds spent in layers [`first`, `end`); infinite if not measured."""
    if one_type(kinds, start, size):
        kind = kinds[start]
        m = size_index(tables, tables.batch // dp // batches)
        if m < 0 or not tables.known[kind, d, m]:
            return np.inf
        return float(tables.upto[kind, d, m, end] - tables.upto[kind, d, m, first])
    shares = samples_of(tables, kinds, start, size, dp, d, tables.batch // batches)
    group = size // dp
    slowest = 0.0
    for i in range(dp):
        kind = kinds[start + i * group]
        if i == 0 or shares[i] != shares[i - 1] or kind != kinds[start + (i - 1) * group]:
            slowest = max(slowest, replica_ms(tables, kind, d, shares[i], first, end))
    return slowest


@compiled
def replica_ms(tables: Tables, kind: int, d: int, samples: int, first: int, end: int) -> float:
    total_ms = 0.0
    for digit in powers_of_two(samples):
        m = size_index(tables, digit)
        if m < 0 or not tables.known[kind, d, m]:
            return np.inf
        total_ms += tables.upto[kind, d, m, end] - tables.upto[kind, d, m, first]
    return total_ms


@compiled
def powers_of_two(samples: int) -> list[int]:
    """Return the powers of two that add up to `samples`, the largest first; for -1 (not measured), only 1."""
    powers = []
    digit = 1
    while 2 * digit <= samples:
        digit *= 2
    while digit > 0:
        if samples & digit:
            powers.append(digit)
        digit //= 2
    return powers


@compiled
def samples_of(tables: Tables, kinds: Ints, start: int, size: int, dp: int, d: int, samples: int) -> Ints:
    """Return each replica's number of samples [dp], by its first device's speed; -1: not measured."""
    m = size_index(tables, 1)
    group = size // dp
    first = kinds[start : start + dp * group : group]
    if m < 0 or not tables.known[:, d, m][first].all():
        return np.full(dp, -1, dtype=np.int64)
    speed = 1.0 / tables.upto[:, d, m, tables.share.size][first]
    exact = samples * (speed / speed.sum())
    replica_samples: Ints = exact.astype(np.int64)
    over = exact - replica_samples
    for _ in range(samples - replica_samples.sum()):
        largest = np.argmax(over)
        replica_samples[largest] += 1
        over[largest] = -1.0
    return replica_samples

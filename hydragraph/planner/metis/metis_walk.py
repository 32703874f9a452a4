"""Metis's search and its memory-aware variant.

For each order of types, division of ranks into stages and number of micro-batches, a walk begins with tp 1 in every
stage. Layers are divided by speed, with at most three corrections for memory. A *step* is a change of degrees (one
stage halves dp and doubles tp) or a correction. The stage that changes first is

    NAIVE   the one with least memory left when layers last fitted; if they never fitted, the one with largest dp
    MEMORY  the one most short of memory at the first attempt; if all fitted, the one with least memory left

A walk ends when a plan fits at the first attempt, or when no stage can change. As in Table 1 of the improved paper,
only steps that led to a plan count.

    capacity[s]  [S]    fraction of the total speed
    split[q]     [7 L]  layers in seven equal pieces
    owner[q]     [7 L]  stage of a piece; -1: none
"""

from __future__ import annotations

from functools import partial

import numpy as np

from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.metis.metis_cost import (
    StageRanks,
    degree_index,
    one_type,
    powers_of_two,
    price,
    samples_of,
    size_index,
    stage_ms,
)
from hydragraph.planner.metis.problem import Floats, Ints, Tables

NAIVE = 0
MEMORY = 1

PIECES = 7
ATTEMPTS = 3
# Assumed memory of a stage without layers.
LEAST_MB = 0.001


@compiled
def walk(
    tables: Tables,
    kinds: Ints,
    places: Ints,
    divisions: Ints,
    order: int,
    max_tp: int,
    mixed_tp: bool,
    stages: int,
) -> tuple[int, float, float, int, Ints]:
    """Walk the degrees of each division into S stages.

    Args:
        places: label of each rank [N], which a replica's ranks must share unless `mixed_tp`.
        divisions: ranks of each stage [divisions, S].
        stages: number of stages that Metis counts when it first prices a plan.

    Returns:
        steps: number of steps.
        best: cost of the cheapest plan that can train; infinite if none.
        claimed: cost that Metis's program reports.
        micro_batches: the cheapest plan's number of micro-batches.
        plan: its groups, dp, tp and first layers [4, S + 1].
    """
    count = divisions.shape[1]
    layers = tables.share.size
    split = np.repeat(tables.share / PIECES, PIECES)
    bounds = np.zeros(count + 1, dtype=np.int64)
    limits = np.zeros(count)
    left = np.zeros(count)
    lacking = np.zeros(count)
    steps = 0
    best = np.inf
    claimed = np.inf
    micro_batches = 0
    plan = np.zeros((4, count + 1), dtype=np.int64)
    for groups in divisions:
        capacity_mb(tables, kinds, groups, limits)
        # Micro-batch counts that divide the batch, largest first, as in Metis.
        for batches in range(tables.batch, 0, -1):
            if tables.batch % batches:
                continue
            dp = groups.copy()
            tp = np.ones_like(groups)
            ranks = StageRanks(kinds, groups, dp, tp)
            pending_steps = 0
            has_left = False
            has_lacking = False
            more = True
            while more:
                attempt = 0
                if degrees_are_valid(tables, ranks, batches, max_tp):
                    attempt, failed = divide(tables, ranks, batches, split, limits, bounds, left, lacking)
                    pending_steps += failed
                    if attempt >= 0:
                        has_left = attempt > 0
                        has_lacking = attempt != 1
                if attempt > 0:
                    steps += pending_steps
                    pending_steps = 0
                    cost = price(tables, ranks, bounds, batches, count).sum()
                    claimed = min(claimed, cost)
                    # Metis first prices a plan as if it had `stages` stages, so it may report a
                    # lower cost.
                    if stages < count:
                        claimed = min(claimed, price(tables, ranks, bounds, batches, stages).sum())
                    if cost < best and can_train(places, groups, tp, bounds, layers, mixed_tp):
                        best = cost
                        micro_batches = batches
                        plan[0, :count] = groups
                        plan[1, :count] = dp
                        plan[2, :count] = tp
                        plan[3] = bounds
                    if attempt == 1:
                        break
                pending_steps += 1
                # Choose the stage that doubles tp (see the module's docstring).
                if order == MEMORY and has_lacking:
                    more = change(dp, tp, lacking)
                elif has_left:
                    more = change(dp, tp, left)
                else:
                    more = change(dp, tp, 1.0 / dp)
    return steps, best, claimed, micro_batches, plan


@compiled
def can_train(places: Ints, groups: Ints, tp: Ints, bounds: Ints, layers: int, mixed_tp: bool) -> bool:
    if bounds[-1] != layers:
        return False
    start = 0
    for s in range(groups.size):
        if bounds[s + 1] == bounds[s]:
            return False
        if not mixed_tp and not replicas_of_one_type(places, start, groups[s], tp[s]):
            return False
        start += groups[s]
    return True


@partial(compiled, shared=True)
def replicas_of_one_type(kinds: Ints, start: int, size: int, tp: int) -> bool:
    if tp == 1 or one_type(kinds, start, size):
        return True
    for first in range(start, start + size, tp):  # noqa: SIM110
        if not one_type(kinds, first, tp):
            return False
    return True


@compiled
def degrees_are_valid(tables: Tables, ranks: StageRanks, batches: int, max_tp: int) -> bool:
    mbs = tables.batch // ranks.dp // batches
    return bool(mbs.min() > 0 and mbs.max() < tables.size_at.size and ranks.tp.max() <= max_tp)


@compiled
def change(dp: Ints, tp: Ints, left: Floats) -> bool:
    if dp.max() == 1:
        return False
    least = np.argmin(np.where(dp > 1, left, np.inf))
    dp[least] //= 2
    tp[least] *= 2
    return True


@compiled
def capacity_mb(tables: Tables, kinds: Ints, groups: Ints, limits: Floats) -> None:
    start = 0
    for s in range(groups.size):
        capacity = tables.capacity[kinds[start : start + groups[s]]]
        if tables.per_rank:
            limits[s] = capacity.min()
        elif one_type(kinds, start, groups[s]):
            limits[s] = capacity[0] * groups[s]
        else:
            limits[s] = capacity.sum()
        start += groups[s]


@compiled
def divide(
    tables: Tables,
    ranks: StageRanks,
    batches: int,
    split: Floats,
    limits: Floats,
    bounds: Ints,
    left: Floats,
    lacking: Floats,
) -> tuple[int, int]:
    """Divide layers over stages by speed and memory.

    Returns:
        The attempt that fitted (0: none; -1: not measured), and the number of failed attempts.
    """
    speed = np.zeros(ranks.groups.size)
    if not speeds(tables, ranks, batches, speed):
        return -1, 0
    demand = np.zeros(speed.size)
    for attempt in range(1, ATTEMPTS + 1):
        partition(tables.share, split, speed, bounds)
        if not memory_mb(tables, ranks, batches, bounds, demand):
            return -1, 0
        left[:] = limits - demand
        if left.min() >= 0:
            return attempt, attempt - 1
        if attempt == 1:
            lacking[:] = left
        if not correct(speed, limits, demand):
            return 0, attempt
    return 0, ATTEMPTS


@compiled
def speeds(tables: Tables, ranks: StageRanks, batches: int, found: Floats) -> bool:
    """Write each stage's fraction of the total speed; return whether all were measured."""
    layers = tables.share.size
    start = 0
    total = 0.0
    for s in range(found.size):
        d = degree_index(ranks.tp[s])
        if d >= tables.upto.shape[1]:
            return False
        took = stage_ms(tables, ranks.kinds, start, ranks.groups[s], ranks.dp[s], d, 0, layers, batches)
        if not np.isfinite(took):
            return False
        found[s] = 1.0 / took if took != 0 else 0.0
        total += found[s]
        start += ranks.groups[s]
    found /= total
    return bool(total > 0)


@compiled
def memory_mb(tables: Tables, ranks: StageRanks, batches: int, bounds: Ints, demand: Floats) -> bool:
    """Write each stage's memory in MB, as Metis computes it, to `demand`; return whether all were measured.

    As in Metis, all stages use the measurements of rank 0's type, and a stage of mixed types divides its samples as if
    it had all devices. If memory is limited per rank, the type that needs the most memory counts.
    """
    kinds = ranks.kinds
    kind = kinds[0]
    start = 0
    for s in range(demand.size):
        d = degree_index(ranks.tp[s])
        first, end = bounds[s], bounds[s + 1]
        mbs = tables.batch // batches // ranks.dp[s]
        demand[s] = LEAST_MB
        if tables.per_rank:
            needed = 0.0
            for rank in range(start, start + ranks.groups[s]):
                if rank == start or kinds[rank] != kinds[rank - 1]:
                    needed = max(needed, layers_mb(tables, kinds[rank], d, mbs, first, end))
            demand[s] += needed * tables.factor
        elif one_type(kinds, start, ranks.groups[s]):
            demand[s] += layers_mb(tables, kind, d, mbs, first, end) * tables.factor
        else:
            for samples in samples_of(tables, kinds, 0, kinds.size, ranks.dp[s], d, tables.batch // batches):
                for digit in powers_of_two(samples):
                    demand[s] += layers_mb(tables, kind, d, digit, first, end) * tables.factor
        start += ranks.groups[s]
    return bool(np.isfinite(demand).all())


@compiled
def layers_mb(tables: Tables, kind: int, d: int, mbs: int, first: int, end: int) -> float:
    m = size_index(tables, mbs)
    if m < 0 or not tables.known[kind, d, m]:
        return np.inf
    return float(tables.memory[kind, d, m, first:end].sum())


@compiled
def correct(speed: Floats, limits: Floats, demand: Floats) -> bool:
    """Lower the speeds of stages with too little memory, and raise others; return whether this works."""
    count = speed.size
    fits = limits > demand
    # A stage that fits may take more layers, up to its memory; others get 0.9 of what would fit.
    room = np.where(fits, speed * limits / demand - speed, 0.0)
    added = np.zeros(count)
    lowered = np.where(fits, speed, speed * (limits / demand) * 0.9)
    missing = (speed - lowered).sum()
    if room.sum() < missing:
        return False
    # Distribute what others lost over stages with room, in proportion to speed.
    while missing > 0.01:
        total = speed[room > 0.001].sum()
        before = missing
        for s in range(count):
            part = speed[s] / total if room[s] > 0.001 else 0.0
            share = missing * part
            gain = room[s] if share > room[s] else share
            added[s] += gain
            room[s] -= gain
            missing -= gain
        # Here, Metis's program would loop forever
        if missing == before:
            return False
    speed[:] = added + lowered
    return True


@compiled
def partition(share: Floats, split: Floats, speed: Floats, bounds: Ints) -> None:
    """Divide layers over stages by speed; the last layers may be in no stage."""
    count = speed.size
    owner = np.full(split.size, -1, dtype=np.int64)
    capacity = speed.copy()
    # As in Metis: pieces from the front, then to the last stage, then the rest; whole layers by
    # majority.
    give_pieces_forward(split, capacity, owner)
    give_pieces_to_last(split, capacity, owner)
    give_rest_of_pieces(split, capacity, owner)
    stage = np.full(share.size, -1, dtype=np.int64)
    whole_layers(owner, stage, count)
    spare(share, speed, stage, capacity)
    for _ in range(3):
        if not level(share, stage, capacity):
            break
    bounds[1:] = np.cumsum(np.bincount(stage[stage >= 0], minlength=count))


@compiled
def give_pieces_forward(split: Floats, capacity: Floats, owner: Ints) -> None:
    """Fill each stage but the last from the front, leaving the first piece above its capacity unassigned."""
    at = 0
    end = split.size - 1 - PIECES
    for s in range(capacity.size - 1):
        while at < end:
            piece = at
            at += 1
            if not capacity[s] > split[piece]:
                break
            capacity[s] -= split[piece]
            owner[piece] = s


@compiled
def give_pieces_to_last(split: Floats, capacity: Floats, owner: Ints) -> None:
    """Fill the last stage from the end: the last layer, then adjacent pieces within capacity."""
    last = capacity.size - 1
    lowest = split.size
    piece_count = 0
    for piece in range(split.size - 1, -1, -1):
        if owner[piece] >= 0:
            continue
        if piece_count >= PIECES and (piece + 1 != lowest or not capacity[last] > split[piece]):
            continue
        capacity[last] -= split[piece]
        owner[piece] = last
        lowest = piece
        piece_count += 1


@compiled
def give_rest_of_pieces(split: Floats, capacity: Floats, owner: Ints) -> None:
    """Give each unassigned piece to the stage with most capacity between the owners before and after it."""
    count = capacity.size
    low = np.full(count, split.size, dtype=np.int64)
    high = np.full(count, -1, dtype=np.int64)
    for piece in range(split.size):
        if owner[piece] >= 0:
            low[owner[piece]] = min(low[owner[piece]], piece)
            high[owner[piece]] = piece
    for piece in range(split.size):
        if owner[piece] >= 0:
            continue
        before = 0
        behind = count - 1
        highest = -1
        lowest = split.size
        for s in range(count):
            if high[s] < 0:
                continue
            if piece > high[s] and high[s] > highest:
                before = s
                highest = high[s]
            if piece < low[s] and low[s] < lowest:
                behind = s
                lowest = low[s]
        most = before + np.argmax(capacity[before : behind + 1])
        capacity[most] -= split[piece]
        owner[piece] = most
        low[most] = min(low[most], piece)
        high[most] = max(high[most], piece)


@compiled
def whole_layers(owner: Ints, stage: Ints, count: int) -> None:
    for layer in range(stage.size):
        pieces = np.bincount(owner[layer * PIECES : (layer + 1) * PIECES], minlength=count)
        if 2 * pieces.max() > PIECES:
            stage[layer] = np.argmax(pieces)


@compiled
def spare(share: Floats, speed: Floats, stage: Ints, found: Floats) -> None:
    for s in range(speed.size):
        layers = np.flatnonzero(stage == s)
        total = np.cumsum(share[layers[0] : layers[-1] + 1])[-1] if layers.size > 0 else 0.0
        found[s] = speed[s] - total


@compiled
def level(share: Floats, stage: Ints, capacity: Floats) -> bool:
    """Move a neighbor's layer to the stage with most free capacity, unless a stage would then have more."""
    count = capacity.size
    most = int(np.argmax(capacity))
    near = -1
    if most > 0:
        near = most - 1
    if most + 1 < count and (near < 0 or capacity[most + 1] < capacity[near]):
        near = most + 1
    if near < 0:
        return False
    layers = np.flatnonzero(stage == near)
    if layers.size < 2:
        return False
    moved = layers[-1] if most > near else layers[0]
    largest = capacity[most]
    for s in range(count):
        now = capacity[s]
        if s == most:
            now -= share[moved]
        elif s == near:
            now += share[moved]
        if now > largest:
            return False
    stage[moved] = most
    capacity[most] -= share[moved]
    capacity[near] += share[moved]
    return True

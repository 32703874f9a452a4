"""Stage times of a micro-batch, as arrays for compiled code.

    K, S, R, W              numbers of pipeline kinds, stages of the deepest kind, rank kinds per stage, reaches
    seconds[k, s, r, part]  [K, S, R, 5, 3 + W]  per token^2, per token, per micro-batch, and per `AttentionReach.pairs`
    row[s, part]            [S, 5]               a micro-batch's seconds on each stage's slowest rank

A micro-batch is described by sum l^2, sum l and W sums of `AttentionReach.pairs`. Times of links with measured points
are approximate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from hydragraph.cost.compiled_replay import AHEAD, BACK, BACKWARD, EARLY, FORWARD, PARTS
from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.reach import AttentionReach
from hydragraph.cost.stage_costs import NeighborMessages, Parts, Ring, StageCost
from hydragraph.ir.layout import Bools, Floats, Ints
from hydragraph.ir.schedules.schedule import ScheduleTable
from hydragraph.ir.schedules.schedule_kinds import table_of
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.spec.cluster import Interconnect


class StageTerms(NamedTuple):
    """Pipeline kinds.

    Attributes:
        reaches: window and chunk [W, 2]; infinite: none.
        stages: number of stages of each kind [K].
        tables: schedule of each kind [K, S, actions].
        faithful: whether a kind's seconds equal `PipelineCost.seconds` [K].
    """

    seconds: Floats
    reaches: Floats
    stages: Ints
    tables: ScheduleTable
    faithful: Bools


def stage_terms(kinds: Sequence[PipelineCost], count: int, lower: bool = False) -> StageTerms:
    """Return the arrays of pipeline kinds.

    Args:
        count: maximum number of micro-batches per pipeline.
        lower: compute lower bounds, not approximations.
    """
    reaches = tuple(sorted({r for kind in kinds for r in _reaches(kind)}, key=lambda each: each.order))
    arrays = [_kind(kind, lower, reaches) for kind in kinds]
    deepest = max(len(array) for array, _ in arrays)
    mixed = max(array.shape[1] for array, _ in arrays)
    seconds = np.zeros((len(kinds), deepest, mixed, PARTS, 3 + len(reaches)))
    for k, (array, _) in enumerate(arrays):
        stages, ranks = array.shape[:2]
        seconds[k, :stages, :ranks] = array
        seconds[k, :stages, ranks:] = array[:, :1]
    return StageTerms(
        seconds,
        np.array([reach.order for reach in reaches], dtype=np.float64).reshape(-1, 2),
        np.array([len(array) for array, _ in arrays], dtype=np.int64),
        _tables(
            tuple((kind.schedule, kind.rows or len(array)) for kind, (array, _) in zip(kinds, arrays, strict=True)),
            max(count, 1),
        ),
        np.array([faithful for _, faithful in arrays]),
    )


@lru_cache(maxsize=64)
def _tables(kinds: tuple[tuple[str, int | tuple[int, ...]], ...], count: int) -> ScheduleTable:
    every = [table_of(schedule, rows, count) for schedule, rows in kinds]
    deepest = max(len(table.work) for table in every)
    longest = max(table.work.shape[1] for table in every)
    stacked = ScheduleTable(*(np.full((len(kinds), deepest, longest), -1, np.int32) for _ in ScheduleTable._fields))
    for k, table in enumerate(every):
        stages, actions = table.work.shape
        for array, part in zip(stacked, table, strict=True):
            array[k, :stages, :actions] = part
    return stacked


@partial(compiled, shared=True)
def table_at(terms: StageTerms, kind: int) -> ScheduleTable:
    tables = terms.tables
    return ScheduleTable(tables.work[kind], tables.micro_batch[kind], tables.skip[kind], tables.stage[kind])


@lru_cache(maxsize=256)
def _reaches(kind: PipelineCost) -> frozenset[AttentionReach]:
    parts = (part for s in kind.stage_costs for part in (*s.forward, *s.backward, *s.aux))
    curves = (curve for part in parts for _, curve in part)
    return frozenset(reach for curve in curves for reach, _ in curve.near)


@lru_cache(maxsize=256)
def _kind(kind: PipelineCost, lower: bool, reaches: tuple[AttentionReach, ...]) -> tuple[Floats, bool]:
    stages = kind.stage_costs
    mixed = max(len(stage.forward) for stage in stages)
    seconds = np.zeros((len(stages), mixed, PARTS, 3 + len(reaches)))
    for s, stage in enumerate(stages):
        for r in range(mixed):
            at = r if r < len(stage.forward) else 0
            rings = [_ring(ring, lower) for ring in stage.rings] if stage.rings else [np.zeros(3)] * 2
            seconds[s, r, EARLY] = _added(stage.aux[at], reaches) if stage.aux else 0.0
            seconds[s, r, FORWARD] = _added(stage.forward[at], reaches)
            seconds[s, r, BACKWARD] = _added(stage.backward[at], reaches)
            seconds[s, r, FORWARD, :3] += rings[0]
            seconds[s, r, BACKWARD, :3] += rings[1]
            seconds[s, r, AHEAD, :3] = _hop(stage.ahead, lower)
            seconds[s, r, BACK, :3] = _hop(stage.back, lower)
    return seconds, all(map(_faithful, stages))


def _added(parts: Parts, reaches: Sequence[AttentionReach]) -> Floats:
    total = np.zeros(3 + len(reaches))
    for times, k in parts:
        near = dict(k.near)
        total += times * np.array([k.a, k.b, k.c, *(near.get(reach, 0.0) for reach in reaches)])
    return total


def _per_byte(link: Interconnect, lower: bool) -> float:
    speeds = (speed for _, speed in link.points if lower)
    return 1 / max([link.bytes_per_s, *speeds])


def _ring(ring: Ring, lower: bool) -> Floats:
    return np.array([0.0, ring.token_seconds(_per_byte(ring.link, lower)), ring.latency_s])


def _hop(hop: NeighborMessages | None, lower: bool) -> Floats:
    if hop is None:
        return np.zeros(3)
    size = hop.token_bytes * hop.part * max(1, hop.sharing)
    per_token = size * sum(_per_byte(link, lower) for link in hop.links)
    return np.array([0.0, per_token, sum(link.latency_s for link in hop.links)])


def _faithful(stage: StageCost) -> bool:
    hops = [hop for hop in (stage.ahead, stage.back) if hop is not None]
    links = [*(ring.link for ring in stage.rings or ()), *(link for hop in hops for link in hop.links)]
    return not any(link.points for link in links)


@compiled
def pairs_of(window: float, chunk: float, length: float) -> float:
    """Return `AttentionReach.pairs` for a window and a chunk size (infinite: no limit)."""
    pairs = 0.0
    if length >= chunk:
        near = min(window, chunk)
        pairs = math.floor(length / chunk) * near * (2 * chunk - near)
        length %= chunk
    near = min(window, length)
    return float(pairs + near * (2 * length - near))


@partial(compiled, shared=True)
def add_pairs(near: Floats, reaches: Floats, length: float, times: float) -> None:
    """Add a sequence's pairs, multiplied by `times`, to `near` [W] for each of `reaches` [W, 2]."""
    for w in range(len(reaches)):
        near[w] += times * pairs_of(reaches[w, 0], reaches[w, 1], length)


@partial(compiled, shared=True)
def fill_row(row: Floats, seconds: Floats, stages: int, squares: float, tokens: float, near: Floats) -> None:
    """Write the seconds of each stage for a micro-batch.

    Args:
        row: output [S, 5].
        seconds: `StageTerms.seconds` of one kind [S, R, 5, 3 + W].
    """
    for s in range(stages):
        for part in range(PARTS):
            most = 0.0
            for r in range(seconds.shape[1]):
                k = seconds[s, r, part]
                spent = k[0] * squares + k[1] * tokens + k[2]
                for w in range(len(near)):
                    spent += k[3 + w] * near[w]
                most = max(most, spent)
            row[s, part] = most

"""Distribution of layers if a rank divides its memory freely between its stage and its part of the state.

The first stages have the most micro-batches in flight, so fewer stages recompute if the first own less state. For
bounds t_s on the stages' times, a dynamic program over stages and layers maximizes the sum of the rooms, the fractions
of the state that the stages' ranks can own:

    room_s = tp_s min((limit - need) / (state + beside), (limit - gradients) / (state + at_end)),   sum_s room_s >= 1

The two terms are the limits of `price_candidate.owners`: a rank's bytes without state (`need`), its gradient bytes, and
an owner's message bytes at the peak (`beside`) and at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.block_pieces import GRADIENT_BYTES
from hydragraph.cost.costs import Costs
from hydragraph.cost.rank_memory import batch_bytes
from hydragraph.ir.schedules.schedule_kinds import in_flight
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.bisection import bisect
from hydragraph.planner.generators.group_prices import state_bytes
from hydragraph.planner.generators.pipelines_of_groups import Partition, PipelineLayout, PipelinePricing
from hydragraph.planner.price_candidate import NEAR_LIMIT, SearchCandidate
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Required total rooms, in turn, as fractions of the state.
ROOMS = (1.01, 1.05)
# Ratios to the slowest stage's time: the maximum that counts as a gain, and the search's limits.
WORTH = 0.985
SLOWEST = 1.5
QUICKEST = 0.5
FORGIVEN = 1e-9
NEARLY = 0.004
_HALVINGS = 12


class Stages(NamedTuple):
    """Stages of a pipeline, as arrays [S] or, with options, [S, O].

    Attributes:
        layer: seconds per layer; infinite if the option does not exist.
        extra: seconds of the first and last block, where present.
        fixed, each: a rank's bytes besides layers, and per layer.
        gradients: bytes of a layer's gradients and weights.
        ranks: tensor-parallel degree.
        limit: usable bytes of each rank.
    """

    layer: Floats
    extra: Floats
    fixed: Floats
    each: Floats
    gradients: Floats
    ranks: Ints
    limit: Floats


class Pool(NamedTuple):
    """Quantities common to all stages.

    Attributes:
        state: bytes of all state.
        whole, ends: bytes of all pipelines' weights and gradients of a layer, and of the first and last block.
        pulled: fraction of `whole` and `ends` that are weights.
        idle: room of ranks without layers, as a fraction of the state.
    """

    layers: int
    state: float
    whole: float
    ends: float
    pulled: float
    idle: float


class _Row(NamedTuple):
    laid: PipelineLayout
    times: int
    stages: Stages


def pooled(costs: Costs, candidate: SearchCandidate, tokens: int) -> Iterator[SearchCandidate]:
    """Yield variants of the candidate, with layers redistributed to save time or to fit."""
    if costs.ranks == 1:
        return
    bench = candidate.bench
    limits = _limits(costs, candidate, tokens)
    count = max(1, round(bench.micro_batches / candidate.partition.count))
    kinds = zip(candidate.laid_by_kind(), candidate.partition.pipelines, strict=True)
    rows = [_row(bench, laid, times, limits, count) for laid, (_, times) in kinds]
    pool = _pool(costs, candidate, limits)
    for needed in ROOMS:
        factor = _least_factor(pool, rows, needed)
        if factor is None:
            continue
        laid = [_quick(pool, bench, row, factor, _share(pool, rows, factor, needed)) for row in rows]
        pipelines = {row.laid.order: row.times for row in rows}
        seconds = bench.price_of(dict(zip(pipelines, laid, strict=True)), pipelines)
        partition = Partition(candidate.partition.pipelines, candidate.partition.idle, seconds)
        yield replace(candidate, partition=partition, layout=tuple(laid))


def _limits(costs: Costs, candidate: SearchCandidate, tokens: int) -> list[float]:
    # A form's limit is that of its rank with least memory.
    least = dict.fromkeys(candidate.bench.forms, math.inf)
    for group in candidate.groups:
        limit = min(NEAR_LIMIT * costs.memory_of(rank) for rank in group.devices) - batch_bytes(tokens, tokens)
        least[group.form] = min(least[group.form], limit)
    return [least[form] for form in candidate.bench.forms]


def _pool(costs: Costs, candidate: SearchCandidate, limits: Sequence[float]) -> Pool:
    bench = candidate.bench
    option = bench.options[0][0]
    pipelines = candidate.partition.count
    pulled = costs.sizes.itemsize / (costs.sizes.itemsize + GRADIENT_BYTES)
    whole = pipelines * option.kind.tp * option.state_bytes
    ends = pipelines * option.kind.tp * (option.first_bytes + option.last_bytes)
    state = costs.home.copies * state_bytes(costs)
    # An idle rank owns state and exchanges messages, but has no layers.
    idle = state + bench.layers * whole + ends
    room = math.fsum(bench.forms[i].tp * max(0.0, limits[i]) / idle for i in candidate.partition.idle)
    return Pool(bench.layers, state, whole, ends, pulled, room)


def _row(bench: PipelinePricing, laid: PipelineLayout, times: int, limits: Sequence[float], count: int) -> _Row:
    stages = len(laid.order)
    shape = (stages, max(len(bench.options[i]) for i in laid.order))
    layer, extra, fixed, layer_bytes, gradients = (np.full(shape, math.inf) for _ in range(5))
    # Early stages keep more micro-batches, so layers need more bytes.
    in_flight_of = in_flight(DEFAULT_SCHEDULE, stages, count)
    for s, form in enumerate(laid.order):
        rate = bench.forms[form].rate
        first, last = s == 0, s == stages - 1
        for o, option in enumerate(bench.options[form]):
            layer[s, o] = rate * option.layer_s
            extra[s, o] = rate * (option.aux_s + first * option.first_s + last * option.last_s)
            fixed[s, o] = option.own_bytes + first * option.first_bytes + last * option.last_bytes
            layer_bytes[s, o] = option.state_bytes + in_flight_of[s] * option.kept_bytes
            gradients[s, o] = option.state_bytes
    ranks = np.array([bench.forms[i].tp for i in laid.order])
    limit = np.array([limits[i] for i in laid.order])
    return _Row(laid, times, Stages(layer, extra, fixed, layer_bytes, gradients, ranks, limit))


def _least_factor(pool: Pool, rows: Sequence[_Row], needed: float) -> float | None:
    def fits(factor: float) -> bool:
        return _room(pool, rows, factor) >= needed

    # Save time, or find the smallest slowdown that lets the state fit.
    if fits(WORTH):
        return bisect(fits, QUICKEST, WORTH, NEARLY)[1]
    if not fits(1.0) and fits(SLOWEST):
        return bisect(fits, 1.0, SLOWEST, NEARLY)[1]
    return None


def _room(pool: Pool, rows: Sequence[_Row], factor: float) -> float:
    rooms = (row.times * roomiest(pool, row.stages, factor * row.laid.each_s, 0.0)[0] for row in rows)
    return float(pool.idle + sum(rooms))


def _share(pool: Pool, rows: Sequence[_Row], factor: float, needed: float) -> float:
    most = _room(pool, rows, factor) - pool.idle
    return max(0.0, (needed - pool.idle) / most) if most > 0 else 1.0


def _quick(pool: Pool, bench: PipelinePricing, row: _Row, factor: float, share: float) -> PipelineLayout:
    bound = factor * row.laid.each_s
    # Bisect the price of a second: the highest price with enough room gives the fastest stages.
    most, layers, chosen = roomiest(pool, row.stages, bound, 0.0)
    low, high = 0.0, 1e3 / bound
    for _ in range(_HALVINGS):
        # Geometric mean: prices span orders of magnitude.
        price = math.sqrt(max(low, 1e-6 * high) * high)
        room, other, ways = roomiest(pool, row.stages, bound, price)
        if room >= share * most * (1 - 1e-9):
            layers, chosen = other, ways
            low = price
        else:
            high = price
    return bench.laid_as(row.laid.order, layers, chosen)


@compiled
def roomiest(pool: Pool, of: Stages, bound: float, price: float) -> tuple[float, Ints, Ints]:
    """Return the layers that maximize the room minus `price` times the sum of the stages' seconds, each at most
    `bound`.

    Returns:
        The fraction of the state that fits (-inf: layers do not fit), and each stage's layers and option [S].
    """
    layers = pool.layers
    stages, options = of.layer.shape
    weights = pool.whole * pool.pulled
    gradients = pool.whole * (1 - pool.pulled)
    end_weights = pool.pulled * pool.ends
    end_gradients = (1 - pool.pulled) * pool.ends
    # best[s, done]: most room (minus priced seconds) of the first s stages with `done` layers;
    # `layers_table`, `way`, `rooms`: the last stage's layers and option, and the room.
    best = np.full((stages + 1, layers + 1), -np.inf)
    best[0, 0] = 0.0
    layers_table = np.zeros((stages + 1, layers + 1), np.int64)
    way = np.zeros((stages + 1, layers + 1), np.int64)
    rooms = np.zeros((stages + 1, layers + 1))
    for s in range(stages):
        last = s == stages - 1
        for done in range(s, layers - (stages - s) + 1):
            if best[s, done] == -np.inf:
                continue
            for o in range(options):
                most = layers - done - (stages - s - 1)
                # Later stages need a layer each; the last gets all that are left.
                for n in range(most if last else 1, most + 1):
                    seconds = of.extra[s, o] + of.layer[s, o] * n
                    need = of.fixed[s, o] + of.each[s, o] * n
                    if not seconds <= bound * (1 + FORGIVEN) or need > of.limit[s]:
                        break
                    # An owner sends other stages' weights. Gradients of earlier layers arrive after
                    # the peak.
                    sent = weights * (layers - n) + end_weights
                    behind = 0.0 if last else gradients * (layers - done - n) + end_gradients
                    at_end = gradients * layers + end_gradients
                    room = min(
                        (of.limit[s] - need) / (pool.state + sent + behind),
                        (of.limit[s] - (1 - pool.pulled) * of.gradients[s, o] * n) / (pool.state + sent + at_end),
                    )
                    room = of.ranks[s] * max(0.0, room)
                    value = best[s, done] + room - price * seconds
                    if value > best[s + 1, done + n]:
                        best[s + 1, done + n] = value
                        layers_table[s + 1, done + n] = n
                        way[s + 1, done + n] = o
                        rooms[s + 1, done + n] = rooms[s, done] + room
    stage_layers = np.zeros(stages, np.int64)
    chosen = np.zeros(stages, np.int64)
    if best[stages, layers] == -np.inf:
        return -np.inf, stage_layers, chosen
    # Follow the choices back from the last stage.
    left = layers
    for s in range(stages, 0, -1):
        stage_layers[s - 1] = layers_table[s, left]
        chosen[s - 1] = way[s, left]
        left -= layers_table[s, left]
    return rooms[stages, layers], stage_layers, chosen

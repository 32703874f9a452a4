"""The layers of a candidate's pipelines, where stages and owners of the state share all memory.

The search gives every rank its part of the state and asks what its stage may hold beside that. Yet who owns the state
is free: a first stage, which has most micro-batches in flight, may own little, a last stage or an idle device much. So
fewer stages have to recompute, and the slowest stage gets quicker. For bounds t_s on the seconds of stages, a dynamic
program over stages and layers finds what leaves most room: with the lines of `settle.owners`,

    room_s = tp_s min((limit - need) / (state + beside), (limit - gradients) / (state + at_end)),   sum_s room_s >= 1,

in parts of the state; `beside` and `at_end`, an owner's messages, are known once the layers before a stage are. The
least bounds, all pipelines' by the same factor, are found by bisection. Among the layers that keep them, a price of
seconds finds quick ones: what could recompute within its bound, but need not, does not.

Example: two stages of two layers that may hold 10 bytes each; a state of 6; a layer needs 2 bytes and 3 more for each
micro-batch in flight, or 0 more if it recomputes. Owning alike, the first stage has 10 - 3 = 7 bytes and needs
2 * (2 + 2 * 3) = 16, so it recomputes; the second one needs 2 * (2 + 3) = 10, and does so, too. But the first one needs
4 bytes then, and can own all of the state: the second one need not recompute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.block_pieces import GRADIENT_BYTES
from hydragraph.cost.costs import Costs
from hydragraph.cost.rank_memory import batch_bytes
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.generators.group_prices import state_bytes
from hydragraph.planner.generators.pipelines_of_groups import Bench, Laid, Partition
from hydragraph.planner.price_candidate import NEAR_LIMIT, Candidate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# How much room is asked for, in parts of the state: lines are near the exact walk, and shares are rounded.
ROOMS = (1.01, 1.05)
# Factors on the seconds of stages: what gains less than the first is not worth a look; no larger one than the last.
WORTH = 0.985
SLOWEST = 1.5
QUICKEST = 0.5
# Factors and prices are found to this part, and in so many halvings.
NEARLY = 0.004
_HALVINGS = 12


@dataclass(frozen=True, eq=False)
class _Row:
    """The stages of a pipeline: [S] or, of each option, [S, O].

    Attributes:
        laid: the pipeline as the search laid it.
        times: how many there are of it.
        layer, extra: seconds per layer, and of other blocks; infinite where there is no such option.
        fixed, each, gradients: bytes of a rank, whatever its layers, per layer, and of a layer's weights and gradients.
        ranks, limit: of each stage: its degree, and the bytes of each of its ranks.
    """

    laid: Laid
    times: int
    layer: Floats
    extra: Floats
    fixed: Floats
    each: Floats
    gradients: Floats
    ranks: Ints
    limit: Floats


@dataclass(frozen=True)
class _Pool:
    """What all stages have in common.

    Attributes:
        layers: L.
        state: bytes of all the state.
        whole: bytes of weights and gradients of a layer, of all pipelines.
        ends: the same of the first and the last block.
        pulled: which part of them weights are.
        idle: room of ranks without layers, in parts of the state.
    """

    layers: int
    state: float
    whole: float
    ends: float
    pulled: float
    idle: float


def pooled(costs: Costs, candidate: Candidate, tokens: int) -> Iterator[Candidate]:
    """Yield the candidate with other layers, where that makes it quicker, or makes it fit: the least cautious first.

    Args:
        tokens: of an iteration.
    """
    if costs.ranks == 1:
        return
    bench = candidate.bench
    limits = _limits(costs, candidate, tokens)
    count = max(1, round(bench.micro_batches / candidate.partition.count))
    rows = [_row(bench, laid, times, limits, count) for laid, times in _kinds(candidate)]
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


def _kinds(candidate: Candidate) -> list[tuple[Laid, int]]:
    every = candidate.laid()
    found = []
    at = 0
    for _, times in candidate.partition.pipelines:
        found.append((every[at], times))
        at += times
    return found


def _limits(costs: Costs, candidate: Candidate, tokens: int) -> list[float]:
    """Return the bytes that a rank of each form may hold."""
    least = dict.fromkeys(candidate.bench.forms, math.inf)
    for group in candidate.groups:
        limit = min(NEAR_LIMIT * costs.memory_of(rank) for rank in group.devices) - batch_bytes(tokens, tokens)
        least[group.form] = min(least[group.form], limit)
    return [least[form] for form in candidate.bench.forms]


def _pool(costs: Costs, candidate: Candidate, limits: Sequence[float]) -> _Pool:
    bench = candidate.bench
    option = bench.options[0][0]
    pipelines = candidate.partition.count
    pulled = costs.sizes.itemsize / (costs.sizes.itemsize + GRADIENT_BYTES)
    whole = pipelines * option.kind.tp * option.state_bytes
    ends = pipelines * option.kind.tp * (option.first_bytes + option.last_bytes)
    state = costs.home.copies * state_bytes(costs)
    idle = state + bench.layers * whole + ends
    room = sum(bench.forms[i].tp * max(0.0, limits[i]) / idle for i in candidate.partition.idle)
    return _Pool(bench.layers, state, whole, ends, pulled, room)


def _row(bench: Bench, laid: Laid, times: int, limits: Sequence[float], count: int) -> _Row:
    stages = len(laid.order)
    shape = (stages, max(len(bench.options[i]) for i in laid.order))
    layer, extra, fixed, each, gradients = (np.full(shape, math.inf) for _ in range(5))
    for s, form in enumerate(laid.order):
        rate = bench.forms[form].rate
        first, last = s == 0, s == stages - 1
        flying = min(stages - s, count)
        for o, option in enumerate(bench.options[form]):
            layer[s, o] = rate * option.layer_s
            extra[s, o] = rate * (option.aux_s + first * option.first_s + last * option.last_s)
            fixed[s, o] = option.own_bytes + first * option.first_bytes + last * option.last_bytes
            each[s, o] = option.state_bytes + flying * option.kept_bytes
            gradients[s, o] = option.state_bytes
    ranks = np.array([bench.forms[i].tp for i in laid.order])
    return _Row(laid, times, layer, extra, fixed, each, gradients, ranks, np.array([limits[i] for i in laid.order]))


def _least_factor(pool: _Pool, rows: Sequence[_Row], needed: float) -> float | None:
    """Return the least factor on all stages' seconds that leaves so much room; None: no smaller one than there is."""

    def fits(factor: float) -> bool:
        return _room(pool, rows, factor) >= needed

    if fits(WORTH):
        low, high = QUICKEST, WORTH
    elif fits(1.0):
        return None
    elif fits(SLOWEST):
        low, high = 1.0, SLOWEST
    else:
        return None
    while high > low * (1 + NEARLY):
        middle = (low + high) / 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def _room(pool: _Pool, rows: Sequence[_Row], factor: float) -> float:
    return pool.idle + sum(row.times * _solved(pool, row, factor * row.laid.each_s, 0.0)[0] for row in rows)


def _share(pool: _Pool, rows: Sequence[_Row], factor: float, needed: float) -> float:
    """Return which part of the most room that its pipelines can leave each of them has to leave."""
    most = _room(pool, rows, factor) - pool.idle
    return max(0.0, (needed - pool.idle) / most) if most > 0 else 1.0


def _quick(pool: _Pool, bench: Bench, row: _Row, factor: float, share: float) -> Laid:
    """Return the pipeline within its bound whose stages take least together and that leaves its part of the room."""
    bound = factor * row.laid.each_s
    most, layers, chosen = _solved(pool, row, bound, 0.0)
    # Rooms are parts of the state: from this price on, seconds alone count.
    low, high = 0.0, 1e3 / bound
    for _ in range(_HALVINGS):
        price = math.sqrt(max(low, 1e-6 * high) * high)
        room, other, ways = _solved(pool, row, bound, price)
        if room >= share * most * (1 - 1e-9):
            layers, chosen = other, ways
            low = price
        else:
            high = price
    return bench.laid_as(row.laid.order, layers, chosen)


def _solved(pool: _Pool, row: _Row, bound: float, price: float) -> tuple[float, Ints, Ints]:
    found: tuple[float, Ints, Ints] = roomiest(
        pool.layers, bound * (1 + 1e-9), price, row.layer, row.extra, row.fixed, row.each, row.gradients,
        row.ranks, row.limit, pool.state, pool.whole, pool.ends, pool.pulled,
    )  # fmt: skip
    return found


@compiled
def roomiest(
    layers: int,
    bound: float,
    price: float,
    layer: Floats,
    extra: Floats,
    fixed: Floats,
    each: Floats,
    gradients: Floats,
    ranks: Ints,
    limit: Floats,
    state: float,
    whole: float,
    ends: float,
    pulled: float,
) -> tuple[float, Ints, Ints]:
    """Return the layers of stages that leave most room, less what their seconds cost.

    Args:
        bound: seconds that no stage may exceed.
        price: of a second, in parts of the state.
        gradients: bytes of a layer's weights and gradients, of a rank.
        layer, extra, fixed, each, ranks, limit: see `_Row`.
        state, whole, ends, pulled: see `_Pool`.

    Returns:
        the room (minus infinity where nothing fits), layers [S] and options [S].
    """
    stages, options = layer.shape
    best = np.full((stages + 1, layers + 1), -np.inf)
    best[0, 0] = 0.0
    taken = np.zeros((stages + 1, layers + 1), np.int64)
    way = np.zeros((stages + 1, layers + 1), np.int64)
    rooms = np.zeros((stages + 1, layers + 1))
    for s in range(stages):
        last = s == stages - 1
        for done in range(s, layers - (stages - s) + 1):
            if best[s, done] == -np.inf:
                continue
            for o in range(options):
                most = layers - done - (stages - s - 1)
                for n in range(most if last else 1, most + 1):
                    seconds = extra[s, o] + layer[s, o] * n
                    need = fixed[s, o] + each[s, o] * n
                    if not seconds <= bound or need > limit[s]:
                        break
                    sent = whole * pulled * (layers - n) + pulled * ends
                    behind = 0.0 if last else whole * (1 - pulled) * (layers - done - n) + (1 - pulled) * ends
                    at_end = whole * (1 - pulled) * layers + (1 - pulled) * ends
                    room = min(
                        (limit[s] - need) / (state + sent + behind),
                        (limit[s] - (1 - pulled) * gradients[s, o] * n) / (state + sent + at_end),
                    )
                    room = ranks[s] * max(0.0, room)
                    value = best[s, done] + room - price * seconds
                    if value > best[s + 1, done + n]:
                        best[s + 1, done + n] = value
                        taken[s + 1, done + n] = n
                        way[s + 1, done + n] = o
                        rooms[s + 1, done + n] = rooms[s, done] + room
    found = np.zeros(stages, np.int64)
    chosen = np.zeros(stages, np.int64)
    if best[stages, layers] == -np.inf:
        return -np.inf, found, chosen
    left = layers
    for s in range(stages, 0, -1):
        found[s - 1] = taken[s, left]
        chosen[s - 1] = way[s, left]
        left -= taken[s, left]
    return rooms[stages, layers], found, chosen

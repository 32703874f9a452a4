"""Lower bound for pipelines of whole layers and whole sequences: tighter than `bound`, and found in minutes.

`bound` keeps all devices busy all the time. Real pipelines cannot: sequences and layers do not split, a pipeline fills
and drains, and memory is limited. For equal micro-batches, stages s = 1, ..., S of l_s layers, t_s = f_s + b_s seconds
(forward, backward) and X = sum t_s, a pipeline runs m micro-batches in at least

    X + (m - 1) t_s - min(S - s, m - 1) f_s        for every stage s,

because under the default schedule stage s has done at most S - s forwards besides its first when the first backward
returns to it, after passing through all stages once; a schedule that runs all forwards first takes X + (m - 1) t_s. The
test whether a pipeline can end by T is repeated for intervals [X0, X1] of X: stage s then has at most (T - X0) / (m - 1
- min(S - s, m - 1) f_s / t_s) seconds, which limits its layers for each execution option, as does its memory; all
stages together have at most X1 seconds and, because all devices must also hold the state, a limited number of bytes.
Prices for both (Lagrange) leave a knapsack over stages: the most layers for given numbers of devices of each kind. A
second knapsack, over pipelines, gives the most micro-batches of all devices by T. If there are too few, T is a bound;
bisection finds the largest.

Omitted, which lowers the bound: pull and push, messages between stages, the node of each device, and messages in
memory. Not covered: stages shared by several pipelines, and micro-batches of different sizes in one iteration.

Example: two devices, two layers of 1 s, three sequences: `bound` gives 3 s. Alone, a device runs one of
them in 2 s, two in 4 s. Both in line have X = 2: 2 + 2 * 1 = 4 s for the last stage. So the bound is 4 s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.costs import Costs
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.generators.device_groups import NodeDevices, nodes_of
from hydragraph.planner.generators.group_prices import LayerPrices, state_bytes
from hydragraph.planner.iteration_bound import bound
from hydragraph.spec.health import Health
from hydragraph.spec.pipeline import Stage

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Ratio of the ends of an interval of X.
WIDTH = 1.04
# Relative precision of the bound.
NEARLY = 0.002
# Maximum number of states: the product of (count + 1) over the kinds of devices.
STATES = 20_000
# Number of stages treated individually, counted from a pipeline's end; the stages before them are merged and may be
# any number. All stages beyond the number of micro-batches are alike.
DEEP = 40
# Beyond this number of micro-batches of a pipeline, only multiples of one, two, three, ... are examined.
FINE = 64
# Upper limit of the seconds of an iteration.
MOST = 1e9


@dataclass(frozen=True)
class Relaxed:
    """Constraints that the bound ignores, to show their effect on it.

    Attributes:
        memory: whether memory is unlimited.
        layers: whether layers may be split.
    """

    memory: bool = False
    layers: bool = False


@dataclass(frozen=True, eq=False)
class _Problem:
    """Groups that devices can form, with their times and memory.

    Attributes:
        counts: devices of each kind [K].
        uses: devices of each kind in each group [G, K].
        forward, backward, last, state, kept: for each group and option [G, O]: seconds of a layer's forward and
            backward, of the last block, bytes of a layer on each rank, and bytes kept by a micro-batch in flight.
        ranks: ranks of each group [G].
        memory: bytes of a rank of each group [G].
        layers: L.
        spare: bytes of all devices after the state.
        least: minimum bytes of a pipeline.
    """

    counts: Ints
    uses: Ints
    forward: Floats
    backward: Floats
    last: Floats
    state: Floats
    kept: Floats
    ranks: Ints
    memory: Floats
    layers: int
    spare: float
    least: float


def whole_bound(
    costs: Costs,
    sequences: int,
    length: int,
    sizes: Sequence[int] = (1, 2, 4, 8, 16),
    relaxed: Relaxed = Relaxed(),
    below_s: float = math.inf,
) -> float:
    """Return a lower bound of the seconds of strategies with unshared stages and equal micro-batches.

    Args:
        sequences, length: number and length of the sequences of an iteration.
        sizes: allowed numbers of sequences in a micro-batch.
        relaxed: constraints to ignore.
        below_s: seconds of a plan; the bound is not computed beyond it.
    """
    simple = bound(costs, [[length] * sequences])
    found = [
        _bound(costs, -(-sequences // size), [length] * size, relaxed, simple, below_s)
        for size in dict.fromkeys(min(size, sequences) for size in sizes)
    ]
    return max(simple, min(found))


def _bound(
    costs: Costs, micro_batches: int, lengths: Sequence[int], relaxed: Relaxed, low: float, below_s: float
) -> float:
    problem = _problem(costs, lengths, relaxed)
    if math.prod((problem.counts + 1).tolist()) > STATES:
        return low
    if low >= below_s or not _possible(problem, micro_batches, min(below_s, MOST), relaxed):
        return min(below_s, MOST)
    high = min(2 * low, below_s)
    while not _possible(problem, micro_batches, high, relaxed):
        low = high
        high = min(2 * high, below_s)
    while high > low * (1 + NEARLY):
        middle = math.sqrt(low * high)
        if _possible(problem, micro_batches, middle, relaxed):
            high = middle
        else:
            low = middle
    return low


def _possible(problem: _Problem, micro_batches: int, seconds: float, relaxed: Relaxed) -> bool:
    """Return whether the relaxed problem can run `micro_batches` within `seconds`."""
    most = int(min(problem.counts.sum(), micro_batches))
    if not relaxed.memory:
        most = min(most, int(problem.spare // problem.least))
    # Fewer pipelines leave more memory for one: their number is examined in ranges 1 to 1, 2 to 2, 3 to 4, 5 to 8, ...
    low = 1
    while low <= most:
        high = low if low < 3 else 2 * (low - 1)
        room = math.inf if relaxed.memory else problem.spare - (low - 1) * problem.least
        done = _able(
            problem.counts, problem.uses, problem.forward, problem.backward, problem.last, problem.state, problem.kept,
            problem.ranks, problem.memory, problem.layers, micro_batches, seconds, room, not relaxed.layers,
            min(problem.layers, int(problem.counts.sum())), WIDTH,
        )  # fmt: skip
        if _packed(problem.counts, done, min(high, most)) >= micro_batches:
            return True
        low = high + 1
    return False


def _problem(costs: Costs, lengths: Sequence[int], relaxed: Relaxed) -> _Problem:
    prices = LayerPrices(costs, lengths)
    nodes = nodes_of(costs)
    kinds = list(dict.fromkeys((node.site, rate) for node in nodes for rate in sorted(node.rates)))
    there = Counter((node.site, rate) for node in nodes for rate in node.rates)
    groups: dict[tuple[int, ...], tuple[NodeDevices, int, float]] = {}
    for node in nodes:
        mine = Counter(node.rates)
        places = [kinds.index((node.site, rate)) for rate in mine]
        for taken in product(*(range(n + 1) for n in mine.values())):
            if sum(taken) in prices.degrees(node.site, len(node.devices)):
                uses = [0] * len(kinds)
                for k, n in zip(places, taken, strict=True):
                    uses[k] = n
                rate = max(rate for rate, n in zip(mine, taken, strict=True) if n)
                groups.setdefault(tuple(uses), (node, sum(taken), rate))
    options = [prices.options(node.site, tp) for node, tp, _ in groups.values()]
    width = max(map(len, options))
    rows = {name: np.full((len(groups), width), math.inf) for name in ("forward", "backward", "last", "state", "kept")}
    for g, (node, _, rate) in enumerate(groups.values()):
        for o, option in enumerate(options[g]):
            stage = Stage(node.devices[: option.kind.tp], 1, option.kind.sequence_parallel, option.kind.recompute)
            forward, backward = _least(costs, stage, lengths, rate)
            rows["forward"][g, o] = forward
            rows["backward"][g, o] = backward
            rows["last"][g, o] = option.last_s
            rows["state"][g, o] = option.state_bytes
            rows["kept"][g, o] = option.kept_bytes
    ranks = np.array([tp for _, tp, _ in groups.values()])
    memory = [
        max(costs.memory_of(r) for n in nodes if n.site == node.site for r in n.devices)
        for node, _, _ in groups.values()
    ]
    running = [rank for node in nodes for rank in node.devices]
    spare = sum(map(costs.memory_of, running)) - costs.home.copies * state_bytes(costs)
    return _Problem(
        np.array([there[kind] for kind in kinds]),
        np.array(list(groups)),
        rows["forward"],
        rows["backward"],
        rows["last"],
        rows["state"],
        rows["kept"],
        ranks,
        np.full(len(groups), math.inf) if relaxed.memory else np.array(memory),
        costs.outline.layers,
        spare,
        costs.outline.layers * float((ranks[:, None] * (rows["state"] + rows["kept"])).min()),
    )


def _least(costs: Costs, stage: Stage, lengths: Sequence[int], rate: float) -> tuple[float, float]:
    """Return the seconds of forward and backward of the cheapest layer on a group of the given rate."""
    healthy = costs.changed(health=Health())
    found = []
    names = costs.profile.blocks
    for template in dict.fromkeys(names[1:-1] or names):
        at = names.index(template)
        cost = healthy.stage(stage, (at, at + 1))
        _, *both = cost.apart(lengths)
        rings = [0.0, 0.0] if cost.rings is None else [ring.seconds(sum(lengths)) for ring in cost.rings]
        # A slow rank slows the computation; its effect on the ring is not counted.
        found.append([rate * (s - ring) + ring for s, ring in zip(both, rings, strict=True)])
    return min(one for one, _ in found), min(two for _, two in found)


@compiled
def _able(
    counts: Ints,
    uses: Ints,
    forward: Floats,
    backward: Floats,
    last: Floats,
    state: Floats,
    kept: Floats,
    ranks: Ints,
    memory: Floats,
    layers: int,
    micro_batches: int,
    seconds: float,
    room: float,
    whole: bool,
    stages: int,
    width: float,
) -> Ints:
    """Return the most micro-batches of one pipeline for every number of devices of each kind [states]."""
    groups, options = forward.shape
    kinds = len(counts)
    stride = np.ones(kinds, np.int64)
    for k in range(kinds - 1):
        stride[k + 1] = stride[k] * (counts[k] + 1)
    states = stride[kinds - 1] * (counts[kinds - 1] + 1)
    has = np.zeros((states, kinds), np.int64)
    for i in range(states):
        for k in range(kinds):
            has[i, k] = i // stride[k] % (counts[k] + 1)
    step = np.zeros(groups, np.int64)
    for g in range(groups):
        for k in range(kinds):
            step[g] += uses[g, k] * stride[k]
    usable = np.zeros((groups, states), np.bool_)
    for g in range(groups):
        for i in range(states):
            fits = True
            for k in range(kinds):
                fits = fits and has[i, k] + uses[g, k] <= counts[k]
            usable[g, i] = fits
    # Prices: for seconds, 1 / y for every different y; for bytes, a geometric range that covers a layer's cost.
    quickest = np.inf
    slope = np.zeros(12)
    prices = 1
    for g in range(groups):
        y = np.inf
        for o in range(options):
            y = min(y, forward[g, o] + backward[g, o])
        quickest = min(quickest, y)
        new = prices < 12
        for q in range(prices):
            new = new and abs(slope[q] * y - 1) > 1e-3
        if new:
            slope[prices] = 1 / y
            prices += 1
    of_bytes = np.zeros(8)
    if room < np.inf:
        least = np.inf
        for g in range(groups):
            for o in range(options):
                least = min(least, ranks[g] * (state[g, o] + kept[g, o]))
        for q in range(1, 8):
            of_bytes[q] = 1 / (least * 1.35 ** (q - 1))
    done = np.zeros(states, np.int64)
    now = np.empty(states)
    after = np.empty(states)
    value = np.empty(groups)
    duals = prices + (7 if room < np.inf else 0)
    m = 0
    while m < micro_batches:
        # If m is possible and the next examined number is not, the numbers in between are assumed possible.
        skipped = m
        m = min(m + 1 + m // FINE, micro_batches)
        deep = min(DEEP, stages, m)
        some = False
        low = layers * quickest
        able = np.zeros(states, np.bool_)
        while low < seconds:
            high = min(low * width, seconds)
            holds = np.ones((deep + 1, states), np.bool_)
            holds[deep, :] = deep < stages
            for q in range(duals):
                a = slope[q] if q < prices else 0.0
                z = of_bytes[q - prices + 1] if q >= prices else 0.0
                target = layers - a * high - (z * room if z > 0 else 0.0) - 1e-6
                now[:] = -np.inf
                now[0] = 0.0
                for j in range(deep + (deep < stages)):
                    # The merged stages wait least and hold least.
                    waits = min(j if j < deep else stages, m - 1)
                    flying = min(j + 1, m)
                    for g in range(groups):
                        value[g] = -np.inf
                        for o in range(options):
                            y = forward[g, o] + backward[g, o]
                            if not y < np.inf:
                                continue
                            part = m - 1 - waits * forward[g, o] / y
                            most = seconds if part <= 1e-12 else min(seconds, (seconds - low) / part)
                            outer = last[g, o] if j == 0 else 0.0
                            each = state[g, o] + flying * kept[g, o]
                            n = min((most - outer) / y * (1 + 1e-9), float(layers))
                            n = min(n, memory[g] / each * (1 + 1e-9))
                            if whole:
                                n = np.floor(n)
                            if n <= 0:
                                continue
                            gain = 1 - a * y - z * ranks[g] * each
                            if gain <= 0:
                                n = min(n, 1.0 if whole else 0.0)
                            value[g] = max(value[g], n * gain - a * outer)
                    if j < deep:
                        after[:] = -np.inf
                    else:
                        after[:] = now
                    for g in range(groups):
                        if value[g] > -np.inf:
                            for i in range(states - step[g]):
                                if usable[g, i]:
                                    # An in-place update allows any number of merged stages.
                                    w = (now[i] if j < deep else after[i]) + value[g]
                                    if w > after[i + step[g]]:
                                        after[i + step[g]] = w
                    for i in range(states):
                        if after[i] < target:
                            holds[j, i] = False
                    now[:] = after
            for j in range(deep + 1):
                for i in range(states):
                    able[i] = able[i] or holds[j, i]
            low = high
        for i in range(states):
            if able[i]:
                done[i] = m
                some = True
            elif done[i] == skipped > 0:
                done[i] = m - 1
        if not some:
            break
    # More devices can do at least what fewer can.
    for k in range(kinds):
        for i in range(states):
            if has[i, k] and done[i - stride[k]] > done[i]:
                done[i] = done[i - stride[k]]
    return done


@compiled
def _packed(counts: Ints, done: Ints, most: int) -> int:
    """Return the most micro-batches of at most `most` pipelines that share all devices."""
    kinds = len(counts)
    states = len(done)
    stride = np.ones(kinds, np.int64)
    for k in range(kinds - 1):
        stride[k + 1] = stride[k] * (counts[k] + 1)
    # A pipeline is useful only if it does more than those with fewer devices.
    useful = np.zeros(states, np.bool_)
    for i in range(states):
        useful[i] = done[i] > 0
        for k in range(kinds):
            if i // stride[k] % (counts[k] + 1) and done[i - stride[k]] == done[i]:
                useful[i] = False
    best = np.zeros(states, np.int64)
    for _ in range(most):
        before = best.copy()
        for i in range(states):
            for p in range(i + 1):
                if useful[p]:
                    fits = True
                    for k in range(kinds):
                        fits = fits and p // stride[k] % (counts[k] + 1) <= i // stride[k] % (counts[k] + 1)
                    if fits and before[i - p] + done[p] > best[i]:
                        best[i] = before[i - p] + done[p]
    return int(best[states - 1])

"""Pipelines whose ranks own the state of their layers if memory allows, so most pulls and pushes need no messages.

A pipeline consists of groups of one tensor-parallel degree. In some layouts, groups of all nodes have layers in
proportion to memory, and stages may stream. In the others, stages take nearly equal times, and the slowest groups may
stay idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hydragraph.cost.costs import Costs
from hydragraph.planner.generators.group_prices import SAFETY, LayerPrices, site_of, state_bytes
from hydragraph.planner.generators.pipeline_layers import spread
from hydragraph.planner.generators.stage_layout import Option
from hydragraph.planner.price_candidate import PricedPlan, Shortage, owners_by_block
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.planner.streamed_data_parallelism import (
    computing_s,
    groups_by_kind,
    micro_batches_of_each,
    simulate_best,
    traffic_s,
)
from hydragraph.planner.traffic_bound import bytes_by_block
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.pipeline import Pipeline, Stage
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

# Balanced strategies per number of pipelines and degree, and maximum number of subsets of groups by speed
BALANCED = 2
SUBSETS = 8


def owned_pipelines(
    costs: Costs, workload: Workload, below_s: float, until: float | None, streams: Sequence[bool | str] = (False,)
) -> list[PricedPlan | Shortage]:
    """Return simulated pipelines of several stages, and shortages (arguments: see `streamed`).

    The search reserves memory for the messages of ranks that share all state, which these ranks do not need.

    Args:
        streams: how stages stream weights (see `Stage`), False for stages that keep them.
    """
    varied = MiniBatchPrices(costs, workload.batches)

    def price(strategy: Strategy) -> PricedPlan | Shortage | None:
        if not strategy.streams:
            return varied.settle(strategy, "owned")
        filled = [2 * len(pipeline.stages) for pipeline in strategy.pipelines]
        chosen = owners_by_block(costs, strategy, Assignment.even(filled, workload.longest))
        return None if chosen is None else varied.settle(strategy, "streamed", chosen[0])

    expected = {strategy: _expected_s(costs, strategy, workload) for strategy in _strategies(costs, streams)}
    if False in streams:
        expected = {**_balanced(costs, workload), **expected}
    return list(simulate_best(expected, price, below_s, until))


def _expected_s(costs: Costs, strategy: Strategy, workload: Workload) -> float:
    each = max(1.0, sum(map(len, workload.batches)) / len(workload.batches) / len(strategy.pipelines))
    bubble = (len(strategy.pipelines[0].stages) - 1) / each
    # Only streamed stages move weights or gradients once per micro-batch
    streams = strategy.streams
    counts = micro_batches_of_each(costs, strategy, workload) if streams else [1] * len(strategy.pipelines)
    return max((1 + bubble) * computing_s(costs, strategy, workload), traffic_s(costs, strategy, counts))


def _strategies(costs: Costs, streams: Sequence[bool | str]) -> Iterator[Strategy]:
    for kind, groups in groups_by_kind(costs):
        depths = range(2, min(len(groups), costs.outline.layers) + 1)
        # Groups stay idle only if no number of stages can use all.
        for depth in [depth for depth in depths if len(groups) % depth == 0] or depths:
            count = len(groups) // depth
            rows = [groups[first : depth * count : count] for first in range(count)]
            layers = [_layers_by_memory(costs, row) for row in rows]
            for stream in streams:
                yield Strategy(
                    tuple(
                        Pipeline(tuple(Stage.of(group, n, kind, stream) for group, n in zip(row, counts, strict=True)))
                        for row, counts in zip(rows, layers, strict=True)
                    )
                )


def _balanced(costs: Costs, workload: Workload) -> dict[Strategy, float]:
    """Return strategies whose stages take nearly equal times, and their estimated seconds.

    For each number of pipelines and degree, the `BALANCED` fastest are returned.
    """
    prices = LayerPrices(costs, [workload.typical.length])
    # whole: bytes of weights, gradients and optimizer state per byte of weights and gradients
    whole = 1 + state_bytes(costs) / sum(array.sum() for array in bytes_by_block(costs))
    sequences = workload.typical.sequences
    # found: (number of pipelines, degree) -> estimated seconds -> strategy; kinds with equal seconds count once
    found: dict[tuple[int, int], dict[float, Strategy]] = {}
    for kind, groups in groups_by_kind(costs):
        layer_s = [_rate(costs, group) * _option(prices, group, kind).layer_s for group in groups]
        # Groups of devices 0 and 1 (0.1 s per layer) and 2 (0.3 s): all three, then the first two.
        for slowest in sorted(set(layer_s), reverse=True)[:SUBSETS]:
            fast = [group for group, seconds in zip(groups, layer_s, strict=True) if seconds <= slowest]
            for depth in range(2, min(len(fast), costs.outline.layers) + 1):
                count, idle = divmod(len(fast), depth)
                if idle:
                    continue
                estimate_s, strategy = _of_depth(costs, prices, whole, kind, fast, depth, sequences / count)
                if strategy is not None:
                    found.setdefault((count, kind.tp), {}).setdefault(estimate_s, strategy)
    return {
        strategies[seconds]: max(seconds, traffic_s(costs, strategies[seconds], [1] * count))
        for (count, _), strategies in found.items()
        for seconds in sorted(strategies)[:BALANCED]
    }


def _of_depth(
    costs: Costs,
    prices: LayerPrices,
    whole: float,
    kind: StageKind,
    groups: Sequence[tuple[int, ...]],
    depth: int,
    micro_batches: float,
) -> tuple[float, Strategy | None]:
    """Return pipelines of `depth` groups, and their estimated seconds; None if some stage cannot hold its layers."""
    count = len(groups) // depth
    each = max(1, round(micro_batches))
    pipelines = []
    longest_s = 0.0
    for first in range(count):
        row = groups[first : depth * count : count]
        seconds, layers = _layers_by_time(costs, prices, whole, kind, row, each)
        if not math.isfinite(seconds):
            return math.inf, None
        longest_s = max(longest_s, seconds)
        pipelines.append(Pipeline(tuple(Stage.of(group, n, kind) for group, n in zip(row, layers, strict=True))))
    return longest_s, Strategy(tuple(pipelines))


def _layers_by_time(
    costs: Costs,
    prices: LayerPrices,
    whole: float,
    kind: StageKind,
    groups: Sequence[tuple[int, ...]],
    micro_batches: int,
) -> tuple[float, list[int]]:
    """Return a pipeline's seconds and the stages' layers. Each stage holds its layers' state and activations."""
    layer, extra, cap = (np.zeros((len(groups), 1)) for _ in range(3))
    for s, group in enumerate(groups):
        option = _option(prices, group, kind)
        first, last = s == 0, s == len(groups) - 1
        rate = _rate(costs, group)
        layer[s] = rate * option.layer_s
        extra[s] = rate * (option.aux_s + first * option.first_s + last * option.last_s)
        flying = min(len(groups) - s, micro_batches)
        outer = whole * (first * option.first_bytes + last * option.last_bytes)
        free = SAFETY * min(map(costs.memory_of, group)) - option.own_bytes - outer
        each = whole * option.state_bytes + flying * option.kept_bytes
        cap[s] = min(costs.outline.layers, max(0, free // each)) if each else costs.outline.layers
    sum_s, layers, _ = spread(costs.outline.layers, micro_batches, layer, extra, cap.astype(np.int64))
    slowest_s = float((extra[:, 0] + layer[:, 0] * layers).max())
    return sum_s + (micro_batches - 1) * slowest_s, layers.tolist()


def _option(prices: LayerPrices, group: Sequence[int], kind: StageKind) -> Option:
    options = prices.options(site_of(prices.costs, group[0]), kind.tp)
    return next(option for option in options if option.kind == kind)


def _rate(costs: Costs, group: Sequence[int]) -> float:
    return max(costs.health.rate(rank) for rank in group)


def _layers_by_memory(costs: Costs, groups: Sequence[Sequence[int]]) -> list[int]:
    count = costs.outline.layers
    pulled, _ = bytes_by_block(costs)
    held = np.cumsum([pulled[slice(*costs.outline.span(layer, layer + 1))].sum() for layer in range(count)])
    memory = np.cumsum([sum(map(costs.memory_of, group)) for group in groups])
    ends = [0]
    for stage, part in enumerate(memory / memory[-1], 1):
        nearest = int(np.abs(held - part * held[-1]).argmin()) + 1
        ends.append(min(max(nearest, ends[-1] + 1), count - (len(groups) - stage)))
    return [end - begin for begin, end in pairwise(ends)]

"""Pipelines whose ranks own the state of their layers, with or without streamed stages.

If memory allows, ranks own the state of the layers that they compute, so most pulls and pushes need no messages. A
pipeline consists of groups of equal tensor-parallel degree from all nodes, with layers in proportion to the groups'
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hydragraph.cost.costs import Costs
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
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload


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
    return list(simulate_best(expected, price, below_s, until))


def _expected_s(costs: Costs, strategy: Strategy, workload: Workload) -> float:
    each = max(1.0, sum(map(len, workload.batches)) / len(workload.batches) / len(strategy.pipelines))
    bubble = (len(strategy.pipelines[0].stages) - 1) / each
    counts = micro_batches_of_each(costs, strategy, workload)
    return max((1 + bubble) * computing_s(costs, strategy, workload), traffic_s(costs, strategy, counts))


def _strategies(costs: Costs, streams: Sequence[bool | str]) -> Iterator[Strategy]:
    for kind, groups in groups_by_kind(costs):
        depths = range(2, min(len(groups), costs.outline.layers) + 1)
        # Groups stay idle only if no number of stages can use all groups.
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

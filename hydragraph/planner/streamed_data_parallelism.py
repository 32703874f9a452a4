"""Data parallelism with streamed stages: ranks store few weights and gradients besides their shares of the state.

With `stream: true`, a rank stores two blocks and pulls each block twice per micro-batch. With `stream: gradients`, it
stores all weights and pushes gradients once per micro-batch.

An iteration takes at least the slowest rank's traffic, and at least 1 / (sum_p 1 / W_p), where W_p is pipeline p's time
for the whole mini-batch. Strategies with the lowest bounds are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress

from hydragraph.cost.costs import Costs
from hydragraph.planner.deadline import is_late
from hydragraph.planner.generators.device_groups import nodes_of
from hydragraph.planner.micro_batch_sizes import ANY, pipeline_costs
from hydragraph.planner.price_candidate import PricedPlan, Shortage, owners
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.pipeline import GRADIENTS, Pipeline, Stage
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

SIMULATED = 3
# For a mini-batch
LEAST_S = 1e-12


def streamed(costs: Costs, workload: Workload, below_s: float, until: float | None) -> list[PricedPlan | Shortage]:
    """Return simulated strategies that stream, and the shortages of strategies that do not fit.

    Args:
        below_s: strategies expected to take at least this long are skipped; infinite if no plan is known.
        until: deadline, ignored while no plan is known.
    """
    varied = MiniBatchPrices(costs, workload.batches)
    short: list[Shortage] = []
    homes: dict[Strategy, Home] = {}
    expected: dict[Strategy, float] = {}
    for strategy in _strategies(costs):
        if is_late(until) and math.isfinite(below_s):
            break
        computing = computing_s(costs, strategy, workload)
        if max(computing, traffic_s(costs, strategy, [1] * len(strategy.pipelines))) >= below_s:
            continue
        choice = _least(costs, strategy, workload.longest)
        if isinstance(choice, Shortage):
            short.append(choice)
            continue
        homes[strategy] = choice[0]
        owned = costs.changed(home=choice[0])
        traffic = traffic_s(owned, strategy, micro_batches_of_each(owned, strategy, workload))
        expected[strategy] = max(computing, traffic)

    def price(strategy: Strategy) -> PricedPlan | Shortage:
        return _without_idle(varied, varied.settle(strategy, "streamed", homes[strategy]))

    return [*short, *simulate_best(expected, price, below_s, until)]


def simulate_best(
    expected: Mapping[Strategy, float],
    price: Callable[[Strategy], PricedPlan | Shortage | None],
    below_s: float,
    until: float | None,
) -> Iterator[PricedPlan | Shortage]:
    """Price strategies, the lowest expected time first, until `SIMULATED` fit.

    `price` returns None for a strategy that does not fit; `below_s` and `until` are as in `streamed`.
    """
    able = 0
    for strategy in sorted(expected, key=expected.__getitem__):
        if able == SIMULATED or expected[strategy] >= below_s or (is_late(until) and math.isfinite(below_s)):
            return
        outcome = price(strategy)
        if outcome is not None:
            yield outcome
        if isinstance(outcome, PricedPlan) and math.isfinite(outcome.seconds):
            able += 1
            below_s = min(below_s, outcome.seconds)


def _without_idle(varied: MiniBatchPrices, found: PricedPlan | Shortage) -> PricedPlan | Shortage:
    if isinstance(found, Shortage) or not math.isfinite(found.seconds):
        return found
    runs = [
        any(batches) for batches in zip(*(assignment.micro_batches for assignment in found.assignments), strict=True)
    ]
    if all(runs):
        return found
    busy = replace(found.strategy, pipelines=tuple(compress(found.strategy.pipelines, runs)))
    return varied.settle(busy, found.origin)


def streaming_fits(costs: Costs, longest: int, times: float = 1.0) -> bool:
    """Return whether the strategy that needs the least memory fits if devices have `times` their memory."""
    devices = tuple(replace(d, memory_bytes=int(times * d.memory_bytes)) for d in costs.cluster.devices)
    larger = costs.changed(cluster=replace(costs.cluster, devices=devices))
    every = [strategy for strategy in _strategies(larger) if strategy.pipelines[0].stages[0].stream is True]
    last = max(every, key=lambda s: (s.pipelines[0].stages[0].tp, s.pipelines[0].stages[0].kind), default=None)
    return last is not None and not isinstance(_least(larger, last, longest), Shortage)


def groups_by_kind(costs: Costs) -> Iterator[tuple[StageKind, list[tuple[int, ...]]]]:
    """Yield each kind of stage that all devices support, and groups of devices for it, each within a node."""
    nodes = [sorted(node.devices) for node in nodes_of(costs)]
    types = {costs.cluster.type_of(devices[0]) for devices in nodes}
    kinds: set[StageKind] = set.intersection(*(set(costs.profile.of(name).pieces) for name in types))
    for kind in sorted(kinds):
        groups = [
            tuple(devices[first : first + kind.tp])
            for devices in nodes
            for first in range(0, len(devices) - kind.tp + 1, kind.tp)
        ]
        if groups and costs.sizes.allows(kind.tp):
            yield kind, groups


def _strategies(costs: Costs) -> Iterator[Strategy]:
    for kind, groups in groups_by_kind(costs):
        for stream in (GRADIENTS, True):
            stages = (Stage.of(g, costs.outline.layers, kind, stream) for g in groups)
            yield Strategy(tuple(Pipeline((stage,)) for stage in stages))


def _least(costs: Costs, strategy: Strategy, longest: int) -> tuple[Home, tuple[int, ...]] | Shortage:
    return owners(costs, strategy, Assignment.even([1] * len(strategy.pipelines), longest))


def computing_s(costs: Costs, strategy: Strategy, workload: Workload) -> float:
    """Return the computation time if all pipelines are always full."""
    total_s = 0.0
    pipelines = pipeline_costs(costs, strategy, ANY)
    for batch in workload.batches:
        work = {id(p): max(LEAST_S, sum(float(p.envelope.work(n)) for n in batch)) for p in pipelines}
        total_s += 1 / sum(1 / work[id(p)] for p in pipelines)
    return total_s / len(workload.batches)


def micro_batches_of_each(owned: Costs, strategy: Strategy, workload: Workload) -> list[int]:
    tokens = sum(map(sum, workload.batches)) / len(workload.batches) / len(strategy.pipelines)
    limits = [max(pipeline.max_len, workload.longest) for pipeline in pipeline_costs(owned, strategy)]
    return [math.ceil(tokens / limit) for limit in limits]


def traffic_s(costs: Costs, strategy: Strategy, micro_batches: Sequence[int]) -> float:
    """Return the slowest stage's time for pulls and pushes.

    A layer's assumed owners are all ranks if pipelines have one stage, else the ranks that compute the layer.
    """
    every = sum(bucket.size for bucket in costs.buckets)
    learning = sum(bucket.size for bucket in costs.buckets if bucket.learns)
    slowest = 0.0
    for users in zip(*(pipeline.stages for pipeline in strategy.pipelines), strict=True):
        owners = costs.ranks if len(strategy.pipelines[0].stages) == 1 else sum(stage.tp for stage in users)
        several = len({costs.cluster.node_of(rank) for stage in users for rank in stage.devices}) > 1
        for stage, times in zip(users, micro_batches, strict=True):
            pulls = 2 * times if stage.stream is True else 1
            pushes = times if stage.stream else 1
            moved = (pulls * costs.sizes.itemsize * every + pushes * costs.push_itemsize * learning) / stage.tp
            node = costs.cluster.node(costs.cluster.node_of(stage.devices[0]))
            link = node.inner.bytes_per_s
            if several:
                link = min(link, node.outer.bytes_per_s * min(1.0, node.cards / node.devices))
            apart = 1 - (1 if owners == costs.ranks else stage.tp) / owners
            slowest = max(slowest, apart * moved * stage.layers / costs.outline.layers / link)
    return slowest

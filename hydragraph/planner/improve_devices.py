"""Improvement of plans for varying lengths, by moves of devices.

The search for equal sequences gives a device type one tensor-parallel degree, but long sequences need large groups.
Moves:

    split a node's devices into other groups, each with its own pipeline; slow devices may become idle
    replace a pipeline by one or two of another degree
    merge two pipelines into one of any degree
    leave a pipeline's devices idle

Each move is tried for one node or pipeline, and for all equal ones at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations_with_replacement

from hydragraph.cost.costs import Costs
from hydragraph.planner.deadline import is_late
from hydragraph.planner.generators.device_groups import Group, GroupForm, NodeDevices, nodes_of, regular, runs, splits
from hydragraph.planner.generators.group_prices import LayerPrices, free_bytes
from hydragraph.planner.generators.pipelines_of_groups import PipelinePricing
from hydragraph.planner.price_candidate import form_of, placed
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.strategy import Strategy
from hydragraph.spec.training_workload import Workload

# Maximum strategies that are priced to improve one.
PRICED = 200
# Moves to compare; the first gain is often a dead end.
AT_ONCE = 24
# Minimum fraction of time that a move saves.
SAVES = 1e-3
# Moves with a `pace` above this multiple of the best time are not priced.
REACH = 1.15
# Assumed exposed fraction of pull and push.
WAITED = 0.25
# Devices slower than their node's healthiest by this factor may stay idle.
SLOW = 1.5

Devices = tuple[int, ...]


class DeviceMoves:
    """Moves to strategies whose pipelines fit a micro-batch of `reach` tokens."""

    def __init__(self, costs: Costs, workload: Workload, reach: int, safety: float) -> None:
        typical = workload.typical
        self._costs = costs
        self._nodes = nodes_of(costs)
        self._node = {rank: node for node in self._nodes for rank in node.devices}
        self._rate = {rank: rate for node in self._nodes for rank, rate in zip(node.devices, node.rates, strict=True)}
        prices = LayerPrices(costs, [typical.length], reach)
        self._degrees = {node: prices.degrees(node.site, len(node.devices)) for node in self._nodes}
        self._all_degrees = sorted({degree for degrees in self._degrees.values() for degree in degrees})
        free_by_rank = free_bytes(costs, typical.sequences * typical.length, safety)
        # Least bytes that a rank's share of the state leaves free, over nodes with such groups.
        free: dict[GroupForm, float] = {}
        for node in self._nodes:
            least = min(free_by_rank[rank] for rank in node.devices)
            for tp in self._degrees[node]:
                for rate in dict.fromkeys(node.rates):
                    form = GroupForm(node.site, tp, rate)
                    free[form] = min(free.get(form, math.inf), least)
        self._forms = {form: i for i, form in enumerate(free)}
        self._bench = PipelinePricing(prices, list(free), list(free.values()), typical.sequences)
        self._prices = prices
        self._made: dict[tuple[Group, ...], Pipeline | None] = {}
        self._paces: dict[Hashable, tuple[float, float]] = {}

    def pace(self, strategy: Strategy) -> float:
        """Estimate the iteration time as if pipelines were always busy, plus exposed traffic."""
        paces = [self._pace(pipeline) for pipeline in strategy.pipelines]
        busy = self._bench.micro_batches / sum(speed for speed, _ in paces)
        return busy + WAITED * max(traffic for _, traffic in paces)

    def _pace(self, pipeline: Pipeline) -> tuple[float, float]:
        key = form_of(self._costs, pipeline)
        if key not in self._paces:
            slowest = 0.0
            traffic = 0.0
            for s, stage in enumerate(pipeline.stages):
                site = self._node[stage.devices[0]].site
                rate = max(self._rate[rank] for rank in stage.devices)
                option = next(o for o in self._prices.options(site, stage.tp) if o.kind == stage.kind)
                ends = s == 0, s == len(pipeline.stages) - 1
                seconds = option.aux_s + stage.layers * option.layer_s + ends[0] * option.first_s
                slowest = max(slowest, rate * (seconds + ends[1] * option.last_s))
                size = stage.layers * option.state_bytes + ends[0] * option.first_bytes + ends[1] * option.last_bytes
                traffic = max(traffic, self._bench.passing(self._forms[GroupForm(site, stage.tp, rate)], size))
            self._paces[key] = 1 / slowest, traffic
        return self._paces[key]

    def moves(self, strategy: Strategy) -> Iterator[Strategy]:
        """Yield the strategies one move away from a strategy without shared stages."""
        alike: dict[Hashable, list[Pipeline]] = {}
        for pipeline in strategy.pipelines:
            alike.setdefault(form_of(self._costs, pipeline), []).append(pipeline)
        count = max(1, self._bench.micro_batches // len(strategy.pipelines))
        yield from self._nodes_split(strategy, count)
        for pipelines in alike.values():
            # Change one of these equal pipelines, or all.
            for some in {1: pipelines[:1], len(pipelines): pipelines}.values():
                yield from _with(strategy, some, [])
                for parts in (1, 2) if len(pipelines[0].devices) > 1 else (1,):
                    for degree in self._all_degrees:
                        devices = [one.devices[part::parts] for one in some for part in range(parts)]
                        yield from _with(strategy, some, [self._pipeline(d, degree, count) for d in devices])
        for one, other in combinations_with_replacement(alike.values(), 2):
            # Pair equal pipelines, or those of two kinds.
            both = (one[::2], one[1::2]) if one is other else (one, other)
            pairs = list(zip(*both, strict=False))
            for joined in {1: pairs[:1], len(pairs): pairs}.values():
                for degree in self._all_degrees:
                    merged = [self._pipeline((*a.devices, *b.devices), degree, count) for a, b in joined]
                    yield from _with(strategy, [p for pair in joined for p in pair], merged)

    def _nodes_split(self, strategy: Strategy, count: int) -> Iterator[Strategy]:
        single: dict[NodeDevices, list[Pipeline]] = {node: [] for node in self._nodes}
        multi_stage_ranks: set[int] = set()
        for pipeline in strategy.pipelines:
            if len(pipeline.stages) == 1:
                single[self._node[pipeline.devices[0]]].append(pipeline)
            else:
                multi_stage_ranks.update(pipeline.devices)
        alike: dict[Hashable, list[tuple[Devices, list[Pipeline]]]] = {}
        for node, pipelines in single.items():
            devices = tuple(rank for rank in node.devices if rank not in multi_stage_ranks)
            # Nodes are equal if their devices are equally slow and form equal one-stage pipelines.
            # Devices of other pipelines stay.
            shape = tuple(sorted(tuple(sorted(self._rate[rank] for rank in p.devices)) for p in pipelines))
            key = node.site, tuple(self._rate[rank] for rank in devices), shape
            if devices:
                alike.setdefault(key, []).append((devices, pipelines))
        for nodes in alike.values():
            example = nodes[0][0]
            healthy = min(self._rate[rank] for rank in example)
            # Devices are sorted from slow to healthy, so the first `slow` may be idle.
            slow = sum(self._rate[rank] > SLOW * healthy for rank in example)
            for idle in dict.fromkeys((0, slow)):
                for sizes in splits(len(example) - idle, self._degrees[self._node[example[0]]]):
                    for some in {1: nodes[:1], len(nodes): nodes}.values():
                        split = [(ranks[idle:], sizes, pipelines) for ranks, pipelines in some]
                        yield from self._split(strategy, split, count)
        # Split all nodes at once, or all but one node or kind, because the slowest pipeline
        # determines the traffic's time.
        every = [node for nodes in alike.values() for node in nodes]
        for degree in self._all_degrees:
            for kept in [every[:0], *(nodes[:n] for nodes in alike.values() for n in {1, len(nodes)})]:
                some = [node for node in every if node not in kept]
                split = [
                    (ranks, regular(len(ranks), degree, self._degrees[self._node[ranks[0]]]), pipelines)
                    for ranks, pipelines in some
                ]
                yield from self._split(strategy, split, count)

    def _split(
        self, strategy: Strategy, nodes: Sequence[tuple[Devices, Sequence[int], list[Pipeline]]], count: int
    ) -> Iterator[Strategy]:
        new_pipelines = [
            self._pipeline(run, len(run), count) for ranks, sizes, _ in nodes for run in runs(ranks, sizes)
        ]
        yield from _with(strategy, [p for _, _, pipelines in nodes for p in pipelines], new_pipelines)

    def laid_anew(self, pipeline: Pipeline, devices: Sequence[int], pipelines: int) -> Pipeline | None:
        """Return a pipeline on `devices`, or None if it does not fit.

        It keeps the largest tensor-parallel degree of `pipeline` if possible. The mini-batch is divided over
        `pipelines` pipelines.
        """
        count = max(1, self._bench.micro_batches // pipelines)
        return self._pipeline(devices, max(stage.tp for stage in pipeline.stages), count) if devices else None

    def _pipeline(self, devices: Sequence[int], degree: int, count: int) -> Pipeline | None:
        groups: list[Group] = []
        for node in self._nodes:
            mine = [rank for rank in node.devices if rank in set(devices)]
            sizes = self._degrees[node]
            if not mine:
                continue
            if not sizes or sizes[0] != 1:
                return None
            for run in runs(mine, regular(len(mine), degree, sizes)):
                rate = max(self._rate[rank] for rank in run)
                groups.append(Group(tuple(sorted(run)), GroupForm(node.site, len(run), rate)))
        key = tuple(groups)
        if key not in self._made:
            laid = self._bench.lay(tuple(sorted(self._forms[group.form] for group in groups)), count)
            self._made[key] = placed([laid], groups, self._forms)[0] if laid.order else None
        return self._made[key]


def climbed(
    varied: MiniBatchPrices, sources: Sequence[DeviceMoves], start: Strategy, until: float | None, priced: int = PRICED
) -> Strategy:
    """Until a deadline, improve a strategy that fits all mini-batches."""
    now = start
    best = varied.seconds(now)
    left = priced
    looked_at: set[Strategy] = set()
    gained = True
    while gained:
        gained = False
        moves = {move: None for device_moves in sources for move in device_moves.moves(now)}
        order = sorted((sources[0].pace(move), i, move) for i, move in enumerate(moves))
        # `pace` is quick but ignores the sequences' assignment, so it only selects moves to price.
        near = [move for least, _, move in order if least < best * REACH and move not in looked_at]
        while near and left > 0 and not gained:
            # Take the best of AT_ONCE moves, then generate all moves from there.
            some = near[: min(left, AT_ONCE)]
            near = near[AT_ONCE:]
            for move in some:
                if is_late(until):
                    return now
                looked_at.add(move)
                left -= move not in varied.priced
                seconds = varied.seconds(move, best)
                if seconds < best * (1 - SAVES):
                    now, best, gained = move, seconds, True
    return now


def _with(strategy: Strategy, without: Sequence[Pipeline], made: Sequence[Pipeline | None]) -> Iterator[Strategy]:
    gone = set(without)
    kept = [pipeline for pipeline in strategy.pipelines if pipeline not in gone]
    every = [*kept, *(pipeline for pipeline in made if pipeline is not None)]
    if every and None not in made and set(made) != gone:
        yield Strategy(tuple(sorted(every, key=lambda pipeline: min(pipeline.devices))), strategy.schedule)

"""Canonical order of ranks: nodes, their network cards and devices from fast to slow, however they are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from hydragraph.cost.costs import Costs
from hydragraph.planner.finalists import Finalists, Proposal
from hydragraph.planner.price_candidate import PricedPlan, Shortage
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.pipeline import Pipeline
from hydragraph.spec.strategy import Strategy

Key = tuple[object, ...]

TYPE = 4


def order_of(costs: Costs) -> list[int]:
    keyed_nodes = []
    for number, ranks in costs.cluster.ranks_by_node.items():
        ordered = _of_node(costs, ranks)
        devices = [_device(costs, rank) for rank in ordered]
        keyed_nodes.append((devices[0][:TYPE], _node(costs, number), devices, ordered))
    keyed_nodes.sort(key=lambda each: each[:3])
    return [rank for *_, ordered in keyed_nodes for rank in ordered]


def _of_node(costs: Costs, ranks: Sequence[int]) -> list[int]:
    cards = [
        sorted(card, key=lambda rank: _device(costs, rank)) for _, card in groupby(ranks, key=costs.cluster.card_of)
    ]
    sizes = [len(card) for card in cards]
    cards.sort(key=lambda each: [_device(costs, rank) for rank in each])
    by_size = {size: [card for card in cards if len(card) == size] for size in sizes}
    return [rank for size in sizes for rank in by_size[size].pop(0)]


def _node(costs: Costs, number: int) -> Key:
    node = costs.cluster.node(number)
    return -node.devices, _link(node.outer), _link(node.inner), -node.cards


def _link(link: Interconnect) -> Key:
    return -link.bytes_per_s, link.latency_s, link.points


def _device(costs: Costs, rank: int) -> Key:
    device = costs.cluster.devices[rank]
    home = costs.home
    owned = [shares[rank] for shares in (home.shares, *home.buckets.values(), home.nodes) if shares is not None]
    name = costs.cluster.type_of(rank)
    rate = costs.health.rate(rank)
    return -device.flops_per_s, -device.memory_bytes, -device.memory_bytes_per_s, name, rate, owned


def told(found: Finalists, order: Sequence[int]) -> Finalists:
    """Convert results from canonical to original rank numbers."""
    names = dict(enumerate(order))
    settled = tuple(as_told(plan, order) for plan in found.settled)
    passed = tuple(_proposal(proposal, names) for proposal in found.passed)
    short = tuple(Shortage(_named(e.strategy, names)[0], names[e.rank], e.bytes) for e in found.short)
    return Finalists(settled, passed, short)


def as_told(each: PricedPlan, order: Sequence[int]) -> PricedPlan:
    strategy, pipelines = _named(each.strategy, dict(enumerate(order)))
    places = places_of(order)
    return replace(
        each,
        strategy=strategy,
        home=each.home.reordered(places),
        assignments=tuple(_assigned(assignment, pipelines) for assignment in each.assignments),
        memory=tuple(each.memory[place] for place in places),
    )


def places_of(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _proposal(each: Proposal, names: dict[int, int]) -> Proposal:
    strategy, pipelines = _named(each.strategy, names)
    return replace(each, strategy=strategy, assignment=_assigned(each.assignment, pipelines), across=None)


def _named(strategy: Strategy, names: dict[int, int]) -> tuple[Strategy, list[int]]:
    named = strategy.renumbered(names)
    pipelines = [
        Pipeline(tuple(replace(stage, devices=tuple(sorted(stage.devices))) for stage in pipeline.stages))
        for pipeline in named.pipelines
    ]
    order = sorted(range(len(pipelines)), key=lambda p: min(pipelines[p].devices))
    return Strategy(tuple(pipelines[p] for p in order), strategy.schedule), order


def _assigned(assignment: Assignment, pipelines: Sequence[int]) -> Assignment:
    if not assignment.micro_batches:
        return assignment
    return replace(assignment, micro_batches=tuple(assignment.micro_batches[p] for p in pipelines))

"""Clusters, models and work as they may come, and every promise of a plan for them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import strategies as st

import hydragraph as hg
from hydragraph.cost.block_pieces import BlockPiece
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.model_sizes import ModelSizes
from hydragraph.planner.generators.symmetric import simple
from hydragraph.planner.plan import Plan
from hydragraph.planner.price_candidate import Shortage, owners, share_out
from hydragraph.spec.cluster import Cluster, DeviceType, Node
from tests.cost import priced

LENGTH = 700
METHODS = ("auto", "metis", "mixed", "search", "straggler")
TYPES = {"fast": 1.0, "slow": 2.5, "odd": 20.0}


def profile_of(layers: int, type_: str, degrees: Sequence[int], recompute: bool, ends: float) -> Profile:
    """Return a profile of some kinds of stages, whose embedding and head are `ends` times as large and slow."""
    made = priced.profile(layers, type_, TYPES[type_], 1000)
    kinds = {kind: dict(of) for kind, of in made.pieces.items() if kind.tp in degrees and recompute >= kind.recompute}
    for pieces in kinds.values():
        for name in ("embed", "head"):
            piece = pieces[name]
            held = piece.held if name == "embed" or piece.held is None else replace(piece.held, output=(4.0, 0.0))
            size = round(ends * piece.parameters)
            pieces[name] = BlockPiece(piece.forward.times(ends), piece.backward.times(ends), size, held=held)
    outer = round(4000 * ends)
    return replace(made, pieces=kinds, sizes=ModelSizes.rough((outer, *[1000] * layers, outer), priced.HIDDEN, 4))


@st.composite
def situations(draw: st.DrawFn, ranks: int | None = None) -> tuple[Costs, hg.Workload]:
    """Draw nodes of uneven sizes, types, memories, cards and rates, models with few layers or large ends, and work.

    Args:
        ranks: of all nodes; None: a few.
    """
    names = draw(st.sampled_from([("fast",), ("fast", "slow"), tuple(TYPES)]))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) if ranks is None else draw(_sizes(ranks))
    nodes = []
    for size in sizes:
        cards = draw(st.sampled_from([1, size]))
        nodes.append(Node(draw(st.sampled_from(names)), size, priced.FAST, priced.SLOW, cards=cards))
    memory = draw(st.sampled_from([2_000_000, 6_000_000, 20_000_000, 10**9]))
    parts = st.sampled_from([1, 1, 2, 0.1])  # one type may be much smaller
    types = {name: DeviceType(1e15, int(memory * draw(parts)), 1e12) for name in names}
    cluster = Cluster.of(types, tuple(nodes))
    ranks = len(cluster.devices)
    slow = st.one_of(st.sampled_from([1.01, 2.57, math.inf]), st.floats(1, 20))
    rates = draw(st.dictionaries(st.integers(0, ranks - 1), slow, max_size=min(ranks, 12)))
    if draw(st.booleans()):  # a whole node is as slow, or lost
        first = draw(st.sampled_from([0, sum(sizes[:-1])]))
        rates |= dict.fromkeys(range(first, first + sizes[0 if first == 0 else -1]), draw(slow))
    layers = draw(st.sampled_from([1, 2, 5, 13]))
    degrees = st.sampled_from([(1,), (1, 2), (1, 2, 4)])
    ends = draw(st.sampled_from([0.01, 1.0, 30.0]))
    # The measured kinds may differ by type.
    profiles = [profile_of(layers, name, draw(degrees), draw(st.booleans()), ends) for name in cluster.types]
    lengths = st.lists(st.sampled_from([16, LENGTH, 3000]), min_size=1, max_size=8)
    fixed = st.builds(hg.Workload, sequences=st.sampled_from([1, 2, 7, 20]), length=st.sampled_from([16, LENGTH, 3000]))
    varying = st.builds(lambda batches: hg.Workload(lengths=batches), st.lists(lengths, min_size=1, max_size=2))
    return Costs(hg.Profile.merge(profiles), cluster, hg.Health(rates)), draw(st.one_of(fixed, fixed, varying))


@st.composite
def _sizes(draw: st.DrawFn, ranks: int) -> list[int]:
    """Draw sizes of nodes that sum to `ranks`."""
    sizes: list[int] = []
    while sum(sizes) < ranks:
        sizes.append(min(draw(st.sampled_from([1, 2, 3, 4, 6, 8, 8])), ranks - sum(sizes)))
    return sizes


def keeps_every_promise(situation: tuple[Costs, hg.Workload], method: str, alone: bool = False) -> None:
    """Look at a plan's constraints, memory, seconds and bound; thousands at a time: `exhaustive.py`.

    Args:
        alone: neither plan again nor by the other methods.
    """
    costs, workload = situation
    others = [each for each in METHODS if method == "auto" and each != method and not alone]
    try:
        plan = hg.plan(costs, workload, method)  # pyrefly: ignore[bad-argument-type]
    except hg.Unsupported as error:
        words = r"nothing fits|all devices are lost|have enough memory|too many to try in every order"
        if not re.search(words, str(error)):
            raise
        for other in others:
            with pytest.raises(hg.Unsupported, match=words):
                hg.plan(costs, workload, other)  # pyrefly: ignore[bad-argument-type]
        return
    lost = set(costs.health.lost)
    strategy = plan.strategy
    for each in plan.strategies:
        each.check(costs.outline.layers, costs.ranks, costs.sizes.heads)
        assert not lost & set(each.devices)
        assert all(len({costs.cluster.node_of(d) for d in s.devices}) == 1 for p in each.pipelines for s in p.stages)
    # Every sequence once, on some pipeline.
    assigned = [i for p in plan.assignment.micro_batches for m in p for i in m]
    assert sorted(assigned) == list(range(len(workload.batches[0])))
    # Memory, by the exact walk of every rank's program.
    owned = costs.changed(home=plan.home)
    for rank, memory in enumerate(owned.memory(strategy, plan.assignment)):
        assert memory.total - memory.messages <= costs.memory_of(rank)
        assert plan.memory[rank] <= plan.limits[rank]
    assert not any(owned.owned(rank) for rank in lost)
    # Seconds are those of a simulation, and never below the bound.
    if not workload.lengths:
        assert plan.seconds == pytest.approx(owned.simulate(strategy, plan.assignment).seconds)
    assert plan.bound <= plan.seconds * (1 + 1e-9)
    assert plan.gap >= -1e-9
    assert not re.search(r"\b(inf|nan)%", plan.explain())
    _is_no_worse_than_greedy(costs, workload, plan)
    if alone:
        return
    again = hg.plan(costs, workload, method)  # pyrefly: ignore[bad-argument-type]
    assert (again.strategy, again.home, again.assignment) == (strategy, plan.home, plan.assignment)
    for other in others:
        with suppress(hg.Unsupported):  # that method alone may have no plan that fits
            assert plan.seconds <= hg.plan(costs, workload, other).seconds * (1 + 1e-9)  # pyrefly: ignore[bad-argument-type]


def _is_no_worse_than_greedy(costs: Costs, workload: hg.Workload, plan: Plan) -> None:
    """Look at what pipelines of one depth in node order take, and what the quickest rank alone takes, if that fits."""
    if workload.lengths:
        return
    lost = set(costs.health.lost)
    for each in simple(costs, workload.sequences, workload.length, [1])[:2]:
        assignment, last = share_out(costs, each.strategy, workload.batches[0], 1)
        if not isinstance(owners(costs, each.strategy, assignment), Shortage):
            assert costs.pipelines_end(plan.strategy, plan.assignment) <= last * 1.05 or plan.seconds <= (
                costs.simulate(each.strategy, assignment).seconds * 1.01
            )
    quickest = min(set(range(costs.ranks)) - lost, key=lambda r: (costs.rate(r), costs.cluster.type_of(r)))
    alone = hg.Strategy((hg.Pipeline((hg.Stage((quickest,), costs.outline.layers),)),))
    assignment, last = share_out(costs, alone, workload.batches[0], 1)
    if costs.memory(alone, assignment)[quickest].total <= costs.memory_of(quickest):
        assert costs.pipelines_end(plan.strategy, plan.assignment) <= last * 1.05

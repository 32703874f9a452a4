"""Bytes of pulls and pushes against an element by element count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from hydragraph.cost.link_bytes import Traffic, traffic
from hydragraph.frontend.capture import capture
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.layout import GradientKind, Layout
from hydragraph.ir.program import Program
from hydragraph.passes.variants import Variants
from hydragraph.passes.weight_layouts import layouts
from hydragraph.spec.home import EQUAL, Home
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy
from tests.models import llama
from tests.thorough import only

STRATEGIES = ["<tp1,pp1>", "<tp2,pp2>", "<tp4,pp1>", "2*<tp1,pp2>", "<[0,1]x3s,[2]x1> + <[3]x4>"]
HOMES = [EQUAL, Home((3, 0, 2, 1))]
TWICE = Home((3, 0, 2, 1), copies=2)


def homes(program: Program, ranks: int, home: Home = EQUAL) -> dict[str, Layout]:
    return HomeLayouts(home, ranks).by_name(program.buckets)


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(llama(layers=4, heads=4, kv=2), dtype=torch.bfloat16)


def held(program: Program, strategy: Strategy) -> dict[str, list[tuple[int, int, set[int]]]]:
    """Return for every bucket (pipeline, rank, elements) of all ranks that compute with it, by the rules."""
    found: dict[str, list[tuple[int, int, set[int]]]] = {b.name: [] for b in program.buckets}
    for rank in strategy.devices:
        place = strategy.place(rank)
        assert place is not None
        tp = strategy.pipelines[place.pipeline].stages[place.stage].tp
        blocks = {f"layer.{i}" for i in range(place.first_layer, place.last_layer)}
        blocks |= {program.blocks[0].name} if place.first_layer == 0 else set()
        blocks |= {program.blocks[-1].name} if place.last_layer == program.layers else set()
        for bucket in program.buckets:
            if blocks.isdisjoint(bucket.blocks):
                continue
            elements: set[int] = set()
            for parameter in bucket.parameters:
                at = bucket.offsets()[parameter.name]
                elements |= {at + e for lo, hi in parameter.intervals(tp, place.index) for e in range(lo, hi)}
            found[bucket.name].append((place.pipeline, rank, elements))
    return found


def test_state_that_lives_where_its_stage_is_does_not_travel(program: Program) -> None:
    strategy = Strategy.parse("<[0]x2,[1]x2>", program.layers)
    ends = {b.name: int(max(b.blocks) in ("layer.2", "layer.3", program.blocks[-1].name)) for b in program.buckets}
    home = Home(buckets={name: (1 - at, at) for name, at in ends.items()})
    for placed in layouts(program, strategy, homes(program, 2, home)):
        for way in ("pull", "push"):
            assert traffic(program, [placed], way).total == 0, placed.bucket.name


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("home", HOMES, ids=str)
def test_a_pull_brings_each_rank_what_it_lacks(program: Program, text: str, home: Home) -> None:
    strategy, ranks = Strategy.parse(text, program.layers), 4
    placed = layouts(program, strategy, homes(program, ranks, home))
    expected: Counter[tuple[int, int]] = Counter()
    needed = held(program, strategy)
    for each in placed:
        rows = zip(each.home.rank.tolist(), each.home.lo, each.home.hi, strict=True)
        owner = {element: rank for rank, lo, hi in rows for element in range(lo, hi)}
        for _, rank, elements in needed[each.bucket.name]:
            expected.update((owner[e], rank) for e in elements)
    found = traffic(program, placed, "pull")
    assert found.pairs == {pair: 2 * n for pair, n in expected.items() if pair[0] != pair[1]}
    assert found.local == sum(2 * n for (a, b), n in expected.items() if a == b)


@only("3,0,2,1 copies=2-<tp1,pp1>")
@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("home", [*HOMES, TWICE], ids=str)
def test_a_push_brings_each_owner_all_contributions_once(program: Program, text: str, home: Home) -> None:
    """One holder of a replicated gradient sends it (the owner itself, if it holds one); all holders of a partial one
    do.

    A second owner gets the sum from the first one.
    """
    strategy, ranks = Strategy.parse(text, program.layers), 4
    placed, users = layouts(program, strategy, homes(program, ranks, home)), held(program, strategy)
    incoming: Counter[int] = Counter()
    for each in placed:
        kinds = replicas(program, strategy, each.bucket.name)
        second = each.home.second
        for rank, elements in zip(second.rank.tolist(), (second.hi - second.lo).tolist(), strict=True):
            incoming[rank] += elements
        first = each.home.first
        for rank, lo, hi in zip(first.rank.tolist(), first.lo, first.hi, strict=True):
            for element in range(lo, hi):
                for pipeline in {p for p, _, _ in users[each.bucket.name]}:
                    holders = {r for p, r, there in users[each.bucket.name] if p == pipeline and element in there}
                    once = element in kinds.get(pipeline, set())
                    incoming[rank] += (rank not in holders) if once else len(holders - {rank})
    found = traffic(program, placed, "push")
    received: Counter[int] = Counter()
    for (_, target), size in found.pairs.items():
        received[target] += size
    assert received == Counter({rank: 4 * n for rank, n in incoming.items() if n})


def replicas(program: Program, strategy: Strategy, bucket_name: str) -> dict[int, set[int]]:
    """Return, by pipeline, the elements of a bucket whose gradient is the same on every holder in a stage."""
    bucket = next(b for b in program.buckets if b.name == bucket_name)
    block = next(b for b in program.blocks if b.name in bucket.blocks)
    found: dict[int, set[int]] = {}
    for index, pipeline in enumerate(strategy.pipelines):
        layer = int(block.name.split(".")[1]) if block.name.startswith("layer.") else 0
        layer = program.layers - 1 if block is program.blocks[-1] else layer
        ends = [sum(s.layers for s in pipeline.stages[: i + 1]) for i in range(len(pipeline.stages))]
        stage = pipeline.stages[next(i for i, end in enumerate(ends) if layer < end)]
        if stage.tp == 1:
            continue
        kinds = Variants(program).kinds(block, StagePart(StageKind(stage.tp, stage.sequence_parallel), 0))
        names = [n for n, kind in zip(block.parameters, kinds.values(), strict=True) if kind is GradientKind.REPLICA]
        whole = [p for p in bucket.parameters if p.name in names and p.rule is None]
        found[index] = {bucket.offsets()[p.name] + element for p in whole for element in range(p.size)}
    return found


def test_the_most_of_one_rank() -> None:
    found = Traffic.of({(0, 1): 5, (0, 2): 4, (2, 1): 7}, local=100)
    assert (found.total, found.most) == (16, 12)
    assert Traffic.of({}, 3).most == 0


def test_what_does_not_learn_is_pulled_and_never_pushed(program: Program) -> None:
    placed = layouts(program, Strategy.parse("<tp2,pp2>", program.layers), homes(program, 4))
    frozen = [replace(each, bucket=replace(each.bucket, learns=False)) for each in placed]
    assert traffic(program, frozen, "pull").total > 0
    pushed = traffic(program, frozen, "push")
    assert (pushed.pairs, pushed.total, pushed.local) == ({}, 0, 0)

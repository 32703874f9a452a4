"""What plans are compared with: simple plans are what they are called, and ideals are arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.plans import (
    Gain,
    Straggling,
    average_row,
    cluster_of,
    dealt,
    drawn_lengths,
    equal_parts,
    mean,
    mixed_cluster,
    node,
    situations,
    strategy_of,
    symmetric_pipelines,
)
from hydragraph.spec.stage_kind import StageKind


def costs(layers: int = 4) -> Any:
    cluster = cluster_of(node("A100", 4), node("H800", 2))
    sizes = SimpleNamespace(heads=(8,))
    return cast(Any, SimpleNamespace(ranks=6, cluster=cluster, sizes=sizes, outline=SimpleNamespace(layers=layers)))


def test_parts_are_as_equal_as_can_be() -> None:
    assert equal_parts(32, 5) == [6, 6, 7, 6, 7]
    assert equal_parts(4, 3) == [1, 1, 2]


def test_symmetric_pipelines_use_every_rank_once_and_keep_groups_in_nodes() -> None:
    found = list(symmetric_pipelines(costs(), by_stage=True))
    for pipelines in found:
        assert sorted(rank for p in pipelines for stage in p for rank in stage) == list(range(6))
        assert len({len(p) for p in pipelines}) == 1
        assert len({len(stage) for p in pipelines for stage in p}) == 1
    # Stages in node order: the first stage of both pipelines comes first. Four ranks at once would leave two over.
    assert (((0,), (2,), (4,)), ((1,), (3,), (5,))) in found
    assert {len(pipelines[0][0]) for pipelines in found} == {1, 2}
    assert (((0,), (1,), (2,)), ((3,), (4,), (5,))) in list(symmetric_pipelines(costs(), by_stage=False))


def test_sequences_are_dealt_in_equal_numbers() -> None:
    strategy = strategy_of([[(0,), (1,)], [(2,), (3,)]], [[2, 2], [2, 2]], [StageKind(1, False, False)] * 2)
    assignment = dealt(strategy, (128,) * 10, together=2)
    assert assignment.counts == (2, 3)
    assert sorted(i for p in assignment.micro_batches for m in p for i in m) == list(range(10))


def test_gains_are_averaged_beside_what_the_bounds_allow() -> None:
    plan: Any = SimpleNamespace(seconds=2.0, bound=1.6)
    rival: Any = SimpleNamespace(seconds=3.0)
    cells = [
        Gain("m", "g", "4 A100", 64, plan, rival, None, rival),
        Gain("m", "g", "8 A100", 64, plan, None, None, rival),
    ]
    row = average_row("m", "g", "64", cells, (1.38, None))
    assert row[4] == "1.50 of 1.88 (published 1.38)"
    assert row[5] == "nan of nan"
    assert row[6] == "1.50 of 1.88"


def test_the_ideal_is_malleus() -> None:
    assert Straggling("", {}).ideal(32) == 1
    assert Straggling("", {0: 2.0}).ideal(4) == pytest.approx(4 / 3.5)
    assert Straggling("", {0: math.inf}).ideal(4) == pytest.approx(4 / 3)
    assert all(1 <= len(case.rates) <= 8 for case in situations(64, quick=False))


def test_lengths_are_drawn_alike_for_a_seed() -> None:
    first = drawn_lengths(None, 5000, 2, 2048, seed=3)
    assert first == drawn_lengths(None, 5000, 2, 2048, seed=3)
    assert all(sum(batch) >= 5000 and max(batch) <= 2048 for batch in first)


def test_clusters_have_half_of_each_type() -> None:
    for devices in (16, 24, 64):
        types = [device.type for device in mixed_cluster(devices).devices]
        assert types.count("A100") == types.count("H800") == devices // 2


def test_a_mean_leaves_out_what_is_not_known() -> None:
    assert mean([1.0, math.nan, 3.0]) == 2.0
    assert math.isnan(mean([]))

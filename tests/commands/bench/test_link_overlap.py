"""The definition of overlap, and its simulation within its bounds."""

from __future__ import annotations

import pytest
import torch

from hydragraph.commands.bench.link_overlap import Leg, Overlap, simulated
from hydragraph.cost.link_bytes import traffic
from hydragraph.frontend.capture import capture
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.program import Program
from hydragraph.passes.weight_layouts import layouts
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.spec.home import EQUAL
from hydragraph.spec.strategy import Strategy
from tests.own_models import small


@pytest.fixture(scope="module")
def program() -> Program:
    return capture(small(2), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("alone", "exposed", "percent"), [(2.0, 0.5, 75), (2.0, 0.0, 100), (2.0, 2.0, 0), (2.0, 9.0, 0), (0.0, 0.0, 100)]
)
def test_percent_overlapped(alone: float, exposed: float, percent: float) -> None:
    assert Overlap(alone, exposed, 10.0).percent == percent


def test_simulation(program: Program) -> None:
    strategy, cluster = Strategy.parse("2*<tp1,pp2>", program.layers), default_cluster(4)
    placed = layouts(program, strategy, HomeLayouts(EQUAL, 4).by_name(program.buckets))
    for direction in ("pull", "push"):
        moved = traffic(program, placed, direction)
        found = simulated(program, Leg(direction, strategy, moved), cluster, 4096, 2)
        slowest = cluster.within_node
        assert moved.most / slowest.bytes_per_s < found.alone_s < found.step_s
        assert 0 <= found.exposed_s <= found.alone_s + 1e-12


def test_one_rank_sends_nothing(program: Program) -> None:
    strategy = Strategy.parse("<tp1,pp1>", program.layers)
    moved = traffic(program, layouts(program, strategy, HomeLayouts(EQUAL, 1).by_name(program.buckets)), "pull")
    assert moved.total == 0
    assert moved.local == 2 * sum(b.size for b in program.buckets)
    assert simulated(program, Leg("pull", strategy, moved), default_cluster(1), 64, 1).percent == 100

"""Pulls and pushes on real ranks: the bytes are those of the link."""

from __future__ import annotations

import pytest
import torch

from hydragraph.cluster.launch import launch
from hydragraph.commands.bench.bench_models import meta_model
from hydragraph.commands.bench.link_measure import LinkMeasurement, measure_rank, over_ranks
from hydragraph.commands.bench.link_overlap import Overlap
from hydragraph.cost.link_bytes import traffic
from hydragraph.frontend.capture import capture
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.passes.weight_layouts import layouts
from hydragraph.spec.home import EQUAL, Home
from hydragraph.spec.strategy import Strategy
from tests.thorough import first

TRIED = [(EQUAL, "<tp2,pp1>"), (EQUAL, "<tp1,pp2>"), (Home(copies=2), "<tp2,pp1>")]


@pytest.mark.parametrize(("home", "text"), first(TRIED[:1], TRIED), ids=str)
def test_what_ranks_send_is_what_the_link_says(home: Home, text: str) -> None:
    strategies = (Strategy.parse(text, 2),)
    per_rank = launch(measure_rank, 2, "tiny", strategies, 64, 1, home)
    program = capture(meta_model("tiny"), dtype=torch.float32)
    homes = HomeLayouts(home, 2).by_name(program.buckets)
    for i, strategy in enumerate(strategies):
        for direction in ("pull", "push"):
            expected = traffic(program, layouts(program, strategy, homes), direction)
            found = over_ranks([rank[i][direction] for rank in per_rank])
            assert found.sent == expected.total
            assert (found.sent > 0) is (direction == "push" or home == EQUAL)  # of two ranks, each has everything
            assert found.overlap.alone_s > 0
            assert found.overlap.step_s > 0


def test_ranks_are_joined() -> None:
    found = over_ranks([LinkMeasurement(3, Overlap(1.0, 0.5, 4.0)), LinkMeasurement(4, Overlap(3.0, 0.5, 6.0))])
    assert found == LinkMeasurement(7, Overlap(2.0, 0.5, 5.0))
    assert found.overlap.percent == pytest.approx(75)

"""The picture of a plan of devices that differ: which rows, bars and words it has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.report.device_picture import TALLEST, device_figure, write_device_picture
from hydragraph.spec.assignment import Assignment
from tests.cost import priced

LAYERS = 8


def plan(costs: Costs, text: str, counts: list[int]) -> hg.Plan:
    """Return a plan by hand, in which every rank holds half of what it may."""
    strategy = hg.Strategy.parse(text, LAYERS)
    limits = tuple(costs.memory_of(rank) for rank in range(costs.ranks))
    return hg.Plan(
        strategy=strategy,
        home=hg.Home(),
        strategies=(strategy,),
        seconds=2.2,
        choosing_s=2.2,
        memory=tuple(int(limit / 2) for limit in limits),
        limits=limits,
        bound=2.0,
        rivals=(),
        assignment=Assignment.even(counts, 64),
        moved_bytes=0,
        origin="by hand",
        simulated=False,
        took_s=0.0,
        text="",
    )


@pytest.fixture(scope="module")
def costs() -> Costs:
    return priced.costs(LAYERS, priced.mixed(), hg.Health({1: 2.57, 3: math.inf}))


def texts(figure: Any) -> list[str]:
    layers = figure.axes[0]
    return [*(t.get_text().strip() for t in layers.texts), *(t.get_text() for t in layers.get_yticklabels())]


def test_devices_have_their_stage_and_nodes_their_name(costs: Costs) -> None:
    figure = device_figure(plan(costs, "<[0,1]x6,[2]x2>", [5]), costs)
    shown = texts(figure)
    for text in ("node 0: 2 x fast", "p0 s0: 6 layers, tp2", "x2.57, rank 1", "node 1: 2 x slow", "lost, rank 3"):
        assert text in shown
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["p0: pipeline 0, 5 micro-batches", "lost"]
    assert "10.0% above" in figure.get_suptitle()


def test_bars_cover_the_rows_and_layers_of_their_stages(costs: Costs) -> None:
    axes = device_figure(plan(costs, "<[2]x1,[0]x7> + <[1]x8>", [2, 2]), costs).axes[0]
    bars = dict(zip(["late", "early", "whole"], axes.patches, strict=False))
    # Rows are node 0, ranks 0 and 1, node 1, ranks 2 and 3.
    assert bars["late"].get_bbox().intervalx == pytest.approx((0, 1))
    assert bars["late"].get_bbox().y0 < 4 < bars["late"].get_bbox().y1
    assert bars["early"].get_bbox().intervalx == pytest.approx((1, 8))
    assert bars["early"].get_bbox().y0 < 1 < bars["early"].get_bbox().y1 < 2
    assert bars["whole"].get_facecolor() != bars["early"].get_facecolor() == bars["late"].get_facecolor()
    # Rank 3 is lost: what is left is its hatched row.
    assert [patch.get_hatch() for patch in axes.patches[3:]] == ["////"]


def test_idle_ranks_are_told_from_lost_ones(costs: Costs) -> None:
    legend = device_figure(plan(costs, "<[0]x8>", [1]), costs).legends[0]
    assert [text.get_text() for text in legend.get_texts()][1:] == ["lost", "idle"]


def test_memory_stands_beside_its_limit(costs: Costs) -> None:
    memory = device_figure(plan(costs, "<[0,1]x6,[2]x2>", [5]), costs).axes[1]
    assert [text.get_text() for text in memory.texts] == ["0.5 of 1 (50%)"] * 4
    assert "(GB)" in memory.get_xlabel()


def test_large_clusters_fit_on_a_page() -> None:
    costs = priced.costs(LAYERS, priced.cluster(96, 8))
    found = plan(costs, "48*<tp2,pp1>", [1] * 48)
    assert len(device_figure(found, costs).axes[0].get_yticks()) <= TALLEST


def test_a_picture_is_written_whole(costs: Costs, tmp_path: Path) -> None:
    write_device_picture(plan(costs, "<[0]x8>", [1]), costs, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*.partial"))

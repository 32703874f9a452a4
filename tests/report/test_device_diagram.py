"""The diagram: every device with its layers, and equal pipelines of many once."""

from __future__ import annotations

from math import inf

from hydragraph.report.device_diagram import diagram, diagram_of
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from tests.cost.priced import cluster, mixed


def test_devices_that_differ() -> None:
    strategy = Strategy.parse("<[2]x1,[0,1]x3>", 4)
    found = diagram(strategy, mixed(), Health({1: 2.57, 3: inf}))
    assert [row.ranks for row in found.rows] == [(0,), (1,), (2,), (3,)]
    assert [row.node for row in found.rows] == [0, 0, 1, 1]
    assert [row.what for row in found.rows] == ["fast", "fast, 2.57 × as slow", "slow", "slow, lost"]
    assert [row.ok for row in found.rows] == [True, False, True, False]
    assert [[(part.first, part.last) for part in row.parts] for row in found.rows] == [[(1, 4)], [(1, 4)], [(0, 1)], []]
    assert found.rows[0].parts[0].text == "pipeline 0, stage 1, tensor parallel over 2"


def test_many_equal_pipelines_are_drawn_once() -> None:
    strategy = Strategy.parse("32*<tp2,pp2>", 4)
    found = diagram(strategy, cluster(128, 8), Health())
    assert [row.ranks for row in found.rows] == [(0, 1), (2, 3)]
    assert found.note == "31 of 32 pipelines are omitted because equal ones are shown."
    slow = diagram(strategy, cluster(128, 8), Health({5: 2.0}))
    assert [row.ranks for row in slow.rows] == [(0, 1), (2, 3), (4,), (5,), (6, 7)]


def test_a_stage_that_pipelines_share_is_drawn_once() -> None:
    strategy = Strategy.parse("<[0]x2,[2]x2> + <[1]x2,[2]x2>", 4)
    found = diagram_of(strategy, [0, 0, 0], ["", "", ""], [1, 1, 1])
    assert [len(row.parts) for row in found.rows] == [1, 1, 1]

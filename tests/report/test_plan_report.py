"""Reports of plans, from what their JSON file holds."""

from __future__ import annotations

from typing import Any

import pytest

from hydragraph.report.page import html
from hydragraph.report.plan_report import plan_report
from tests.report.made import plan_record


def test_a_plan_and_its_rivals() -> None:
    record = plan_record()
    found = plan_report("plan.json", record)
    assert found.contenders[0].name == record["strategy"] == "<[0]x1,[1]x3>"
    assert [row.why for row in found.contenders] == ["", "takes 100% longer", "does not fit"]
    assert [row.seconds for row in found.contenders] == [1.0, 2.0, None]
    assert [panel.name for panel in found.panels] == ["<[0]x1,[1]x3>", "<tp2,pp2>", "4*<tp1,pp1>"]
    assert found.panels[0].diagram is not None
    assert [row.what for row in found.panels[0].diagram.rows] == ["fast, 2.57 × as slow", "fast", "slow", "slow"]
    assert [each.peak for each in found.panels[0].held] == [10, 20, 30, 40]
    facts = {fact.label: (fact.value, fact.note) for fact in found.facts}
    assert facts["above the bound"] == ("25%", "800 ms")
    assert facts["slow or lost"] == ("1", "2 compute nothing")
    assert facts["most memory"] == ("40%", "rank 3: 40.0 B of 100 B")
    page = html(found)
    assert "2.57 × as slow" in page
    assert "the plan\nin words" in page


@pytest.mark.parametrize("change", [{"pipelines": 3}, {"rates": None}, {"rivals": [{}]}, {"nodes": []}])
def test_what_is_no_plan_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"not a plan for devices|pipelines|strategy"):
        plan_report("plan.json", {**plan_record(), **change})
    with pytest.raises(ValueError, match="not a plan for devices"):
        plan_report("plan.json", {})

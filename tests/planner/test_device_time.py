"""The seconds of devices by what they are spent on, on made-up devices."""

from __future__ import annotations

import pytest

from hydragraph.cost.costs import Costs
from hydragraph.planner.device_time import device_time, main_cause
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy
from tests.cost import priced


@pytest.mark.parametrize(
    ("slower", "cause"),
    [("<[0]x3,[1]x1>", "bubble"), ("<[0]x4>", "idle devices"), ("<tp2,pp1>", "computation and tensor-parallel sums")],
)
def test_what_a_strategy_spends_more_time_on(slower: str, cause: str) -> None:
    costs = priced.costs(4, priced.cluster(2))
    rival, spent = Strategy.parse(slower, 4), _spent(costs, slower)
    assert main_cause(rival, spent, _spent(costs, "2*<tp1,pp1>")) == cause
    assert sum(spent.values()) > sum(_spent(costs, "2*<tp1,pp1>").values())


def test_devices_that_neither_uses_explain_nothing() -> None:
    costs = priced.costs(8, priced.cluster(8))
    rival, spent, own = Strategy.parse("2*<tp1,pp1>r", 8), _spent(costs, "2*<tp1,pp1>r"), _spent(costs, "2*<tp1,pp1>")
    assert main_cause(rival, spent, own) == "idle devices"
    assert main_cause(rival, spent, own, unused=6 / 8) == "computation"


def _spent(costs: Costs, text: str) -> dict[str, float]:
    strategy = Strategy.parse(text, costs.outline.layers)
    counts = [8 // len(strategy.pipelines)] * len(strategy.pipelines)
    return device_time(costs, strategy, Home(), Assignment.even(counts, 700))

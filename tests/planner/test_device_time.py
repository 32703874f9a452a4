"""The seconds of devices by what they are spent on, on made-up devices."""

from __future__ import annotations

import pytest

from hydragraph.planner.device_time import device_time, main_cause
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy
from tests.cost import priced


@pytest.mark.parametrize(
    ("slower", "cause"), [("<[0]x3,[1]x1>", "bubble"), ("<[0]x4>", "idle devices"), ("<tp2,pp1>", "computation")]
)
def test_what_a_strategy_spends_more_time_on(slower: str, cause: str) -> None:
    costs = priced.costs(4, priced.cluster(2))
    spent = []
    for text in (slower, "2*<tp1,pp1>"):
        strategy = Strategy.parse(text, 4)
        counts = [8 // len(strategy.pipelines)] * len(strategy.pipelines)
        spent.append(device_time(costs, strategy, Home(), Assignment.even(counts, 700)))
    assert main_cause(*spent) == cause
    assert sum(spent[0].values()) > sum(spent[1].values())

"""Reports of small simulations on made-up costs, for the tests of the page."""

from __future__ import annotations

import json
import math
from typing import Any

from hydragraph.commands.plan_devices import _record
from hydragraph.cost.costs import Costs
from hydragraph.planner.explanation import Rival
from hydragraph.planner.plan import Plan
from hydragraph.report.facts import ReportContents
from hydragraph.report.simulation_price import PricedStrategy
from hydragraph.report.simulation_report import simulation_report
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy
from tests.cost.priced import cluster, costs, mixed

TOKENS = 900
LAYERS = 4
TEXTS = (("<tp2,pp2>", [6]), ("2*<tp1,pp2>", [3, 3]), ("<[0,1]x1,[2]x3>", [6]))
# Text that a page must never execute: between tags, in an attribute, in a script, and in a style.
EVIL = "</script><script>window.evil=1</script><img src=x onerror='window.evil=2'>\"'--></style>"


def plan_record() -> dict[str, Any]:
    """Return what the JSON file of a plan with two rivals holds: one is slower, one does not fit."""
    on = costs(LAYERS, mixed(), Health({0: 2.57}))
    strategy, slower, larger = (Strategy.parse(text, LAYERS) for text in ("<[0]x1,[1]x3>", "<tp2,pp2>", "4*<tp1,pp1>"))
    rivals = (Rival(slower, 2.0, "mixed", "takes 100% longer"), Rival(larger, math.inf, "auto", "does not fit"))
    plan = Plan(
        strategy=strategy,
        home=on.home,
        strategies=(strategy,),
        seconds=1.0,
        choosing_s=1.0,
        memory=(10, 20, 30, 40),
        limits=(100.0,) * 4,
        bound=0.8,
        rivals=rivals,
        assignment=Assignment.even([4], TOKENS),
        moved_bytes=0,
        origin="auto",
        simulated=True,
        took_s=0.5,
        text="the plan\nin words",
    )
    record: dict[str, Any] = json.loads(json.dumps(_record(plan, on, "made up")))
    return record


def four() -> Costs:
    """Return the costs of four layers on two nodes of two devices."""
    return costs(LAYERS, cluster(4, 2))


def simulated(on: Costs, text: str, counts: list[int]) -> PricedStrategy:
    """Return a strategy's simulated iteration."""
    strategy = Strategy.parse(text, on.outline.layers)
    assignment = Assignment.even(counts, TOKENS)
    return PricedStrategy(strategy, assignment, on.simulate(strategy, assignment))


def report(title: str = "small.yaml") -> ReportContents:
    """Return the report of three strategies."""
    on = four()
    return simulation_report(title, on, [simulated(on, text, counts) for text, counts in TEXTS])

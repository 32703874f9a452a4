"""Breakdown of an iteration's time by cause, averaged over devices.

computation  forwards and backwards, including tensor-parallel communication
traffic      exposed pulls, pushes and messages, and the update
bubble       waiting for other stages; "imbalance" if every pipeline has one stage
idle         devices without work
"""

from __future__ import annotations

from hydragraph.cost.accounts import TimeKind, predicted_accounts
from hydragraph.cost.costs import Costs
from hydragraph.spec.assignment import Assignment
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

_COMPUTATION = (TimeKind.FORWARD, TimeKind.BACKWARD)
_WAITING = (TimeKind.LATE, TimeKind.OTHER)


def device_time(costs: Costs, strategy: Strategy, home: Home, assignment: Assignment) -> dict[str, float]:
    timeline = costs.changed(home=home).simulate(strategy, assignment)
    accounts = predicted_accounts(timeline)
    staged = any(len(pipeline.stages) > 1 for pipeline in strategy.pipelines)
    waiting = "bubble" if staged else "imbalance"
    spent = {"computation": 0.0, "traffic": 0.0, waiting: 0.0, "idle devices": 0.0}
    for rank, account in enumerate(accounts):
        if rank not in strategy.devices:
            spent["idle devices"] += timeline.seconds
            continue
        for kind, seconds in account.seconds.items():
            what = "computation" if kind in _COMPUTATION else waiting if kind in _WAITING else "traffic"
            spent[what] += seconds
    return {what: seconds / len(accounts) for what, seconds in spent.items()}


def main_cause(slower: dict[str, float], faster: dict[str, float]) -> str:
    return max(slower, key=lambda kind: slower[kind] - faster.get(kind, 0.0))

"""Breakdown of an iteration's time by cause, averaged over devices.

computation  forwards and backwards, including tensor-parallel all-reduces
traffic      pulls, pushes and messages that delay computation, and the update
waiting      waiting for other stages or pipelines
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
    spent = dict.fromkeys(("computation", "traffic", "waiting", "idle"), 0.0)
    for rank, account in enumerate(accounts):
        if rank not in strategy.devices:
            spent["idle"] += timeline.seconds
            continue
        for kind, seconds in account.seconds.items():
            what = "computation" if kind in _COMPUTATION else "waiting" if kind in _WAITING else "traffic"
            spent[what] += seconds
    return {what: seconds / len(accounts) for what, seconds in spent.items()}


def main_cause(rival: Strategy, slower: dict[str, float], faster: dict[str, float], unused: float = 0.0) -> str:
    """Return the main reason why a rival strategy is slower than the plan, if both leave the fraction `unused` of
    devices idle.
    """
    more = {kind: slower[kind] - faster[kind] for kind in slower}
    more["idle"] -= unused * sum(more.values())
    stages = [stage for pipeline in rival.pipelines for stage in pipeline.stages]
    named = {
        "computation": "computation and tensor-parallel sums"
        if any(stage.tp > 1 for stage in stages)
        else "computation",
        "waiting": "bubble" if len(stages) > len(rival.pipelines) else "imbalance",
        "idle": "idle devices",
    }
    cause = max(more, key=lambda kind: more[kind])
    return named.get(cause, cause)

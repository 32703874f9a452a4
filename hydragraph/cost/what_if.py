"""Costs after a hypothetical change: slower devices, or other links."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.spec.cluster import Cluster

FORMS = '"device 3 x2.57" (it takes 2.57 times as long), "type l4 x2", "between_nodes x0.5" or "within_node x2"'

_FORM = re.compile(r"(?:(?P<kind>device|rank|type)\s+(?P<name>\S+)|(?P<link>\w+))\s+x\s*(?P<factor>[\d.eE+-]+)")


def slowed(cluster: Cluster, text: str) -> tuple[Cluster, dict[int, float]]:
    """Return the cluster after one change, and the slowdown of each changed rank.

    Args:
        text: "device 3 x2.57" or "type l4 x2" slows ranks down; "between_nodes x0.5" or "within_node x2" multiplies
            bandwidth.
    """
    change = _FORM.fullmatch(text.strip())
    try:
        factor = float(change["factor"]) if change else 0.0
    except ValueError:
        factor = 0.0
    if change is None or not factor > 0:
        raise ValueError(f"{text!r} is not a known change: write {FORMS}")
    if change["link"]:
        return cluster.scaled(change["link"], factor), {}
    count = len(cluster.devices)
    if change["kind"] == "type":
        if change["name"] not in cluster.types:
            raise ValueError(f"{text!r}: use one of the cluster's types, {', '.join(sorted(cluster.types))}")
        ranks = [r for r in range(count) if cluster.type_of(r) == change["name"]]
    else:
        if not change["name"].isdecimal() or int(change["name"]) >= count:
            raise ValueError(f"{text!r}: use one of the cluster's ranks, 0 to {count - 1}")
        ranks = [int(change["name"])]
    if factor < 1:
        raise ValueError(f"{text!r}: a device cannot be faster than a healthy one: give a factor of at least 1")
    return cluster, dict.fromkeys(ranks, factor)


def what_if(costs: Costs, text: str) -> Costs:
    cluster, factors = slowed(costs.cluster, text)
    rates = dict(costs.health.rates)
    slower = {rank: rates.get(rank, 1.0) * factor for rank, factor in factors.items()}
    return costs.changed(cluster=cluster, health=replace(costs.health, rates=rates | slower))

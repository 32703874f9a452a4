"""What-if changes of costs: a slower device, or other links."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs

FORMS = '"device 3 x2.57" (it takes 2.57 times as long), "type l4 x2", "between_nodes x0.5" or "within_node x2"'

_FORM = re.compile(r"(?:(?P<kind>device|rank|type)\s+(?P<name>\S+)|(?P<link>\w+))\s+x\s*(?P<factor>[\d.eE+-]+)")


def check_change(text: str) -> tuple[re.Match[str], float]:
    """Return the parts and the factor of a change; raise a ValueError if the text has none of the `FORMS`."""
    change = _FORM.fullmatch(text.strip())
    try:
        factor = float(change["factor"]) if change else 0.0
    except ValueError:
        factor = 0.0
    if change is None or not factor > 0:
        raise ValueError(f"{text!r} is not a known change: write {FORMS}")
    return change, factor


def what_if(costs: Costs, text: str) -> Costs:
    """Return the costs after one change.

    Args:
        text: "device 3 x2.57" or "type l4 x2" slows down ranks; "between_nodes x0.5" or "within_node x2" multiplies
            bandwidth.

    Raises:
        ValueError: the text has another form, or names a missing rank or type.
    """
    change, factor = check_change(text)
    if change["link"]:
        return costs.changed(cluster=costs.cluster.scaled(change["link"], factor))
    if change["kind"] == "type":
        if change["name"] not in costs.cluster.types:
            raise ValueError(f"{text!r}: use one of the cluster's types, {', '.join(sorted(costs.cluster.types))}")
        ranks = [r for r in range(costs.ranks) if costs.cluster.type_of(r) == change["name"]]
    else:
        if not change["name"].isdecimal() or int(change["name"]) >= costs.ranks:
            raise ValueError(f"{text!r}: use one of the cluster's ranks, 0 to {costs.ranks - 1}")
        ranks = [int(change["name"])]
    if factor < 1:
        raise ValueError(f"{text!r}: a device cannot be faster than a healthy one: give a factor of at least 1")
    rates = dict(costs.health.rates)
    return costs.changed(
        health=replace(costs.health, rates={**rates, **{r: rates.get(r, 1.0) * factor for r in ranks}})
    )

"""Tensor-parallel groups inside nodes: groups of one degree for equal devices, small groups for stragglers.

If k healthy devices take rho_k seconds, k devices with rates (slowdowns) x_g take y = rho_k max x_g (Malleus). For
given group sizes, it is optimal to cut a node's devices, from slow to fast, into groups of non-decreasing sizes
(theorem 1). Splits with the largest sum of 1 / y are tried first (theorem 2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from typing import TypeVar

from hydragraph.cost.costs import Costs
from hydragraph.planner.generators.group_prices import DeviceSite, LayerPrices, site_of

T = TypeVar("T")

# Maximum splits of a node with stragglers, and maximum combinations of degrees to try all.
SPLITS = 3
COMBINATIONS = 256


@dataclass(frozen=True)
class GroupForm:
    """Key that is equal for interchangeable groups; `rate` is the slowest device's."""

    site: DeviceSite
    tp: int
    rate: float


@dataclass(frozen=True)
class Group:
    """Devices of one node that share each layer."""

    devices: tuple[int, ...]
    form: GroupForm


@dataclass(frozen=True)
class NodeDevices:
    """Running devices of one node and type, the slowest first."""

    devices: tuple[int, ...]
    rates: tuple[float, ...]
    site: DeviceSite

    @property
    def uneven(self) -> bool:
        return self.rates[0] != self.rates[-1]


def nodes_of(costs: Costs) -> tuple[NodeDevices, ...]:
    by_node: dict[tuple[int, DeviceSite], list[int]] = {}
    for rank in range(costs.ranks):
        if math.isfinite(costs.health.rate(rank)):
            by_node.setdefault((costs.cluster.node_of(rank), site_of(costs, rank)), []).append(rank)
    nodes = []
    for (_, site), devices in by_node.items():
        slowest_first = sorted(devices, key=lambda rank: (-costs.health.rate(rank), rank))
        nodes.append(NodeDevices(tuple(slowest_first), tuple(map(costs.health.rate, slowest_first)), site))
    return tuple(nodes)


def splits(count: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the ways to split `count` devices into groups of non-decreasing sizes."""

    def rest(left: int, least: int) -> Iterator[tuple[int, ...]]:
        if left == 0:
            yield ()
        for size in sizes:
            if least <= size <= left:
                for following in rest(left - size, size):
                    yield (size, *following)

    return rest(count, 1)


def regular(count: int, degree: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return group sizes for one degree; leftover devices form smaller groups, listed first."""
    left = count
    groups: list[int] = []
    for size in sorted((s for s in sizes if s <= degree), reverse=True):
        groups += [size] * (left // size)
        left %= size
    return tuple(reversed(groups))


def power(node: NodeDevices, split: Sequence[int], seconds: Mapping[int, float]) -> float:
    return sum(1 / (rates[0] * seconds[len(rates)]) for rates in runs(node.rates, split))


def groupings(
    costs: Costs, prices: LayerPrices, nodes: Sequence[NodeDevices], *, split: bool = True, symmetric: bool = False
) -> list[tuple[Group, ...]]:
    """Return groupings: a degree per type of device, and the best splits of nodes with stragglers.

    `split` and `symmetric` are as in `malleus_autohet.SearchMethod`.
    """
    sites = list(dict.fromkeys(node.site for node in nodes))
    largest = {site: max(len(n.devices) for n in nodes if n.site == site) for site in sites}
    degrees = {site: prices.degrees(site, largest[site]) for site in sites}
    seconds = {site: {tp: min(o.layer_s for o in prices.options(site, tp)) for tp in degrees[site]} for site in sites}
    choices = _equal_degrees(degrees) if symmetric else _degrees(degrees)
    distinct_groupings: dict[tuple[Group, ...], None] = {}
    for degree in choices:
        # Place 0: equal groups; 1: most power; 2: fewer groups with nearly as much power.
        depth = SPLITS if split and any(node.uneven for node in nodes) else 1
        for place in range(depth):
            groups: list[Group] = []
            for node in nodes:
                shape = _split(node, degree[node.site], degrees[node.site], seconds[node.site], place, split)
                groups += _groups(node, shape)
            distinct_groupings[tuple(groups)] = None
    return list(distinct_groupings)


def _equal_degrees(degrees: Mapping[DeviceSite, Sequence[int]]) -> Iterator[dict[DeviceSite, int]]:
    for degree in sorted(set.intersection(*map(set, degrees.values()))):
        yield dict.fromkeys(degrees, degree)


def _degrees(degrees: Mapping[DeviceSite, Sequence[int]]) -> Iterator[dict[DeviceSite, int]]:
    """Yield combinations of the sites' degrees.

    If all combinations are too many, sites of one type share a limit of the degree. If these are still too many, at
    most one type's limit differs from the others'.
    """
    if math.prod(map(len, degrees.values())) <= COMBINATIONS:
        for choice in product(*degrees.values()):
            yield dict(zip(degrees, choice, strict=True))
        return
    if not all(degrees.values()):
        return
    limits: dict[str, list[int]] = {}
    for site, able in degrees.items():
        limits[site.type] = sorted({*limits.get(site.type, ()), *able})
    for of_type in _limits(limits):
        yield {
            site: max((d for d in able if d <= of_type[site.type]), default=able[0]) for site, able in degrees.items()
        }


def _limits(limits: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    if math.prod(map(len, limits.values())) <= COMBINATIONS:
        for choice in product(*limits.values()):
            yield dict(zip(limits, choice, strict=True))
        return
    for common in sorted({limit for able in limits.values() for limit in able}):
        equal = dict.fromkeys(limits, common)
        yield equal
        for name, able in limits.items():
            yield from ({**equal, name: limit} for limit in able if limit != common)


def _split(
    node: NodeDevices, degree: int, degrees: Sequence[int], seconds: Mapping[int, float], place: int, split: bool
) -> tuple[int, ...]:
    even = regular(len(node.devices), degree, degrees)
    if not (split and node.uneven) or place == 0:
        return even
    sizes = tuple(d for d in degrees if d <= degree)
    ranked = _ranked(node, sizes, tuple(seconds[d] for d in sizes))
    # Groups of these sizes cannot use all devices
    if not ranked:
        return even
    if place == 1:
        return ranked[0]
    # Fewer groups mean fewer stages and pipelines: use the fewest with 0.9 of the best power.
    best = power(node, ranked[0], seconds)
    near = [shape for shape in ranked if power(node, shape, seconds) >= 0.9 * best]
    return min(near, key=len)


@cache
def _ranked(node: NodeDevices, sizes: tuple[int, ...], seconds: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
    table = dict(zip(sizes, seconds, strict=True))
    shapes = list(splits(len(node.devices), sizes))
    return tuple(sorted(shapes, key=lambda shape: (-power(node, shape, table), len(shape))))


def _groups(node: NodeDevices, shape: Sequence[int]) -> list[Group]:
    every = zip(runs(node.devices, shape), runs(node.rates, shape), strict=True)
    return [Group(tuple(sorted(devices)), GroupForm(node.site, len(devices), rates[0])) for devices, rates in every]


def runs(items: Sequence[T], sizes: Iterable[int]) -> Iterator[tuple[T, ...]]:
    rest = iter(items)
    return (tuple(islice(rest, size)) for size in sizes)


def forms_of(groups: Sequence[Group]) -> Counter[GroupForm]:
    return Counter(group.form for group in groups)

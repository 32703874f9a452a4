"""Simple plans: pipelines with equal numbers of stages and degrees, and layers divided equally or by speed.

Megatron-LM (equal layers and batches) and Whale (batches by speed) make such plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.costs import Costs
from hydragraph.ir.schedules.schedule_kinds import in_flight
from hydragraph.planner.generators.device_groups import NodeDevices, nodes_of
from hydragraph.planner.generators.group_prices import SAFETY, DeviceSite, GroupPrices, LayerPrices, free_bytes
from hydragraph.planner.generators.pipeline_layers import spread
from hydragraph.planner.generators.pipeline_shares import least_seconds
from hydragraph.planner.generators.pipelines_of_groups import pipeline_of
from hydragraph.planner.generators.stage_layout import NUMBERS
from hydragraph.planner.price_candidate import Candidate
from hydragraph.spec.schedule_names import DEFAULT_SCHEDULE
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Strategy

Floats = NDArray[np.float64]
# Maximum plans of each category.
KEPT = 4


@dataclass(frozen=True)
class _Laid:
    layers: tuple[int, ...]
    kinds: tuple[StageKind, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class _Groups:
    ranks: tuple[tuple[int, ...], ...]
    sites: tuple[DeviceSite, ...]
    rates: Floats
    free: Floats


def simple(
    costs: Costs,
    sequences: int,
    length: int,
    sizes: Sequence[int],
    reach: int = 0,
    safety: float = SAFETY,
    group_prices: GroupPrices | None = None,
    apart: bool = False,
) -> list[Candidate]:
    """Return simple plans, the fastest by AutoHet's cost without traffic first.

    Args:
        sizes: possible numbers of sequences per micro-batch.
        apart: also return plans on only one node.
    """
    group_prices = group_prices or GroupPrices(costs)
    nodes = nodes_of(costs)
    # All nodes, then each kind's strongest node.
    sets = [nodes, *(((node,) for node in _strongest(nodes)) if apart and len(nodes) > 1 else ())]
    every: list[tuple[str, int, _Groups]] = []
    for number, some in enumerate(sets):
        for degree in common_degrees(costs):
            groups = _groups(costs, some, degree, sequences * length, safety)
            if groups is None:
                continue
            every.append(("a node" if number else "everything", degree, groups))
            if not number and len(groups.ranks) > 1:
                prices = group_prices.prices((length,) * sizes[0], reach)
                every.append(("a group", degree, _quickest(prices, groups, degree)))
    # layout -> best number of sequences per micro-batch.
    fastest: dict[tuple[str, _Groups, int, bool, bool], tuple[_Laid, int]] = {}
    for together in sizes:
        prices = group_prices.prices((length,) * together, reach)
        for category, degree, groups in every:
            for form, laid in _priced(prices, groups, degree, -(-sequences // together)):
                key = (category, groups, *form)
                if key not in fastest or laid.seconds < fastest[key][0].seconds:
                    fastest[key] = laid, together
    plans = []
    kept: Counter[tuple[str, bool]] = Counter()
    for (category, groups, depth, by_stage, by_speed), (laid, together) in sorted(
        fastest.items(), key=lambda one: one[1][0].seconds
    ):
        row = category, by_speed and category == "everything"
        kept[row] += 1
        if kept[row] <= KEPT:
            order = _order(len(groups.ranks), depth, by_stage)
            devices = ([groups.ranks[g] for g in row] for row in order.tolist())
            strategy = Strategy(tuple(pipeline_of(each, laid.layers, laid.kinds) for each in devices))
            plans.append(Candidate(strategy, "simple", laid.seconds, together))
    return plans


def _strongest(nodes: Sequence[NodeDevices]) -> list[NodeDevices]:
    by_site: dict[DeviceSite, NodeDevices] = {}
    for node in sorted(nodes, key=lambda each: -sum(1 / rate for rate in each.rates)):
        by_site.setdefault(node.site, node)
    return list(by_site.values())


def _quickest(prices: LayerPrices, groups: _Groups, degree: int) -> _Groups:
    layer_s = [min((o.layer_s for o in prices.options(site, degree)), default=math.inf) for site in groups.sites]
    g = int(np.argmin(groups.rates * np.array(layer_s)))
    return _Groups(groups.ranks[g : g + 1], groups.sites[g : g + 1], groups.rates[g : g + 1], groups.free[g : g + 1])


def common_degrees(costs: Costs) -> list[int]:

    measured = [{kind.tp for kind in costs.profile.of(name).pieces} for name in costs.cluster.types]
    return sorted(filter(costs.sizes.allows, set.intersection(*measured)))


def _groups(costs: Costs, nodes: Sequence[NodeDevices], degree: int, tokens: int, safety: float) -> _Groups | None:
    free = free_bytes(costs, tokens, safety)
    ranks: list[tuple[int, ...]] = []
    sites: list[DeviceSite] = []
    for node in nodes:
        devices = sorted(node.devices)
        if len(devices) % degree:
            return None
        ranks += [tuple(devices[i : i + degree]) for i in range(0, len(devices), degree)]
        sites += [node.site] * (len(devices) // degree)
    rates = np.array([max(costs.rate(rank) for rank in group) for group in ranks])
    least = np.array([min(free[rank] for rank in group) for group in ranks])
    return _Groups(tuple(ranks), tuple(sites), rates, least)


def _priced(
    prices: LayerPrices, groups: _Groups, degree: int, micro_batches: int
) -> Iterator[tuple[tuple[int, bool, bool], _Laid]]:
    count = len(groups.ranks)
    depths = [d for d in range(1, min(count, prices.layers) + 1) if count % d == 0 and count // d <= micro_batches]
    kinds, numbers = _options(prices, groups, degree)
    if not kinds:
        return
    for depth in depths:
        equal = np.diff(prices.layers * np.arange(depth + 1) // depth)
        for by_stage in (False, True) if 1 < depth < count else (False,):
            rows = _Rows(groups, kinds, numbers, _order(count, depth, by_stage), micro_batches, prices)
            # Kinds are sorted by time, so the first that fits (such as without recomputation) is
            # the fastest.
            for choice in range(len(kinds)):
                if rows.fit(equal, np.full(depth, choice)):
                    yield (depth, by_stage, False), rows.laid(equal, np.full(depth, choice))
                    break
            if depth > 1:
                layers, chosen = rows.balanced(prices.layers)
                if layers.any() and (layers != equal).any():
                    yield (depth, by_stage, True), rows.laid(layers, chosen)


class _Rows:
    def __init__(
        self,
        groups: _Groups,
        kinds: Sequence[StageKind],
        numbers: Mapping[str, Floats],
        order: NDArray[np.int64],
        micro_batches: int,
        prices: LayerPrices,
    ) -> None:
        width, depth = order.shape
        # Arrays are [kinds, pipelines, stages]; `order` [pipelines, stages] selects groups.
        of = {name: array[:, order] for name, array in numbers.items()}
        first = np.arange(depth) == 0
        last = np.arange(depth) == depth - 1
        rate = groups.rates[order]
        self._kinds = kinds
        self._micro_batches = micro_batches
        self._count = -(-micro_batches // width)
        self._layer_s = rate * of["layer_s"]
        self._extra_s = rate * (of["aux_s"] + first * of["first_s"] + last * of["last_s"])
        flying = np.array(in_flight(DEFAULT_SCHEDULE, depth, self._count))
        behind = 1 - (np.arange(depth) + 1) / depth
        bytes_per_byte = np.array([prices.held(1 - 1 / depth - b, b) for b in behind]).T
        # Layers that fit at the peak (with micro-batches in flight) and at the end (with all
        # messages).
        self._most = np.full(self._layer_s.shape, math.inf)
        for line, kept in zip(bytes_per_byte, (flying, np.zeros_like(flying)), strict=True):
            layer_bytes = line * of["state_bytes"] + kept * of["kept_bytes"]
            own = of["own_bytes"] + line * (first * of["first_bytes"] + last * of["last_bytes"])
            self._most = np.minimum(self._most, np.floor((groups.free[order] - own) / np.maximum(layer_bytes, 1e-9)))
        # Pipelines get equal layers, so the tightest decides.
        self._most = np.maximum(0, self._most).min(axis=1)

    def fit(self, layers: NDArray[np.int64], chosen: NDArray[np.int64]) -> bool:
        return bool((self._most[chosen, np.arange(len(layers))] >= layers).all())

    def balanced(self, layers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        most = np.minimum(self._most, layers).astype(np.int64)
        slowest = (np.ascontiguousarray(rows.max(axis=1).T) for rows in (self._layer_s, self._extra_s))
        total, stage_layers, chosen = spread(layers, self._count, *slowest, np.ascontiguousarray(most.T))
        return (stage_layers, chosen) if math.isfinite(total) else (np.zeros_like(stage_layers), chosen)

    def laid(self, layers: NDArray[np.int64], chosen: NDArray[np.int64]) -> _Laid:
        stages = np.arange(len(layers))
        stage_s = self._extra_s[chosen, :, stages] + layers[:, None] * self._layer_s[chosen, :, stages]
        alike = np.ones(stage_s.shape[1], np.int64)
        seconds = least_seconds(self._micro_batches, stage_s.sum(axis=0), stage_s.max(axis=0), alike)
        return _Laid(tuple(layers.tolist()), tuple(self._kinds[k] for k in chosen.tolist()), float(seconds))


def _options(prices: LayerPrices, groups: _Groups, degree: int) -> tuple[list[StageKind], dict[str, Floats]]:
    sites = list(dict.fromkeys(groups.sites))
    by_site = [{o.kind: o for o in prices.options(site, degree)} for site in sites]
    common = set.intersection(*map(set, by_site))
    kinds = sorted(common, key=lambda kind: (max(options[kind].layer_s for options in by_site), kind))
    which = [sites.index(site) for site in groups.sites]
    every = {name: np.array([[getattr(of[kind], name) for of in by_site] for kind in kinds]) for name in NUMBERS}
    return kinds, {name: table[:, which] if kinds else table for name, table in every.items()}


def _order(groups: int, depth: int, by_stage: bool) -> NDArray[np.int64]:
    every = np.arange(groups)
    return every.reshape(depth, -1).T if by_stage else every.reshape(-1, depth)

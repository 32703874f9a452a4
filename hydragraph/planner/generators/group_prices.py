"""Time and memory of an average layer on a healthy tensor-parallel group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.costs import Costs
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.rank_memory import batch_bytes
from hydragraph.cost.traffic_bytes import GRADIENT_BYTES, WEIGHT_BYTES
from hydragraph.planner.generators.stage_layout import NUMBERS, Option
from hydragraph.spec.cluster import Interconnect
from hydragraph.spec.health import Health
from hydragraph.spec.pipeline import Stage
from hydragraph.spec.stage_kind import StageKind, StagePart

# Usable fraction of memory; estimates may be slightly low.
SAFETY = 0.99


class DeviceSite(NamedTuple):
    """Devices of one type in nodes of one kind, with `cards` network cards per device."""

    type: str
    inner: Interconnect
    outer: Interconnect
    cards: float


class LayerPrices:
    """Prices of layers for micro-batches of given lengths.

    Args:
        lengths: tokens of each sequence in a micro-batch.
        reach: tokens that must fit in memory; default: the sum of `lengths`.
    """

    def __init__(self, costs: Costs, lengths: Sequence[int], reach: int = 0) -> None:
        self.costs = healthy(costs)
        self.lengths = tuple(lengths)
        self._held = MicroBatch(max(reach, sum(lengths)), max(1, len(lengths)))
        self.layers = costs.outline.layers
        self.options = cache(self._options)
        self.numbers = cache(self._rows)

    def held(self, ahead: float, behind: float) -> tuple[float, float]:
        """Return the memory of weights, gradients and messages per byte of weights and gradients, at the peak and end.

        With equal shares, an owner sends weights to earlier and later stages, which have the fractions `ahead` and
        `behind` of all layers. It receives later stages' gradients while it computes, and in the end has every
        pipeline's.
        """
        if self.costs.ranks == 1:
            return 1.0, 1.0
        pulled = self.costs.sizes.itemsize / (self.costs.sizes.itemsize + GRADIENT_BYTES)
        sent = pulled * (ahead + behind)
        return 1 + sent + (1 - pulled) * behind, 2 * (1 - pulled) + sent

    @cached_property
    def held_by_flight(self) -> NDArray[np.float64]:
        """`held` of equal stages [L + 1, 2, 2], by micro-batches in flight and by first or later stage."""
        rows = []
        for flying in range(1, self.layers + 1):
            behind = 1 - 1 / flying
            rows.append([self.held(ahead, behind) for ahead in (0.0, 1 / flying)])
        return np.array([rows[0], *rows])

    def _options(self, site: DeviceSite, tp: int) -> tuple[Option, ...]:
        kinds = sorted(kind for kind in self.costs.profile.of(site.type).pieces if kind.tp == tp)
        return tuple(self._option(site, kind) for kind in kinds) if self.costs.sizes.allows(tp) else ()

    def _rows(self, site: DeviceSite, tp: int) -> NDArray[np.float64]:
        return np.array([option[1:] for option in self.options(site, tp)]).reshape(-1, len(NUMBERS))

    def degrees(self, site: DeviceSite, most: int) -> tuple[int, ...]:
        measured = {kind.tp for kind in self.costs.profile.of(site.type).pieces}
        return tuple(tp for tp in sorted(measured) if tp <= most and self.options(site, tp))

    def within(self, site: DeviceSite) -> float:
        """Return the fraction of all ranks that one node of a site has."""
        return len(self._ranks[site]) / self.costs.ranks

    def _option(self, site: DeviceSite, kind: StageKind) -> Option:
        costs = self.costs
        devices = self._ranks[site][: kind.tp]
        stage = Stage.of(devices, 1, kind)
        templates = costs.profile.blocks
        pieces = costs.pieces(site.type, kind)
        # Seconds, state, activations
        rows: dict[str, tuple[float, float, float]] = {}
        working = 0.0
        early = 0.0
        part = StagePart(kind, 0)
        for index, template in enumerate(templates):
            if template in rows:
                continue
            alone = costs.stage(stage, (index, index + 1))
            early, *both = alone.apart(self.lengths)
            piece = pieces[template]
            learning = piece.parameters - piece.frozen
            state_bytes = costs.sizes.itemsize * piece.parameters + GRADIENT_BYTES * learning
            footprint = costs.blocks.footprint(costs.outline.blocks[index], part, self._held)
            rows[template] = sum(both), state_bytes, footprint.saved + footprint.output
            working = max(working, footprint.forward, footprint.backward + footprint.gradients)
        inner = [rows[template] for template in templates[1:-1] or templates]
        layer = [sum(column) / len(inner) for column in zip(*inner, strict=True)]
        seconds, state, kept = zip(layer, rows[templates[0]], rows[templates[-1]], strict=True)
        hidden = self._held.tokens * costs.sizes.hidden_bytes
        return Option(kind, early, *seconds, *state, kept[0], working + 2 * hidden)

    @cached_property
    def _ranks(self) -> dict[DeviceSite, tuple[int, ...]]:
        nodes = sorted(self.costs.cluster.ranks_by_node.values(), key=len)
        return {site_of(self.costs, ranks[0]): tuple(ranks) for ranks in nodes}


class GroupPrices:
    def __init__(self, costs: Costs) -> None:
        self.prices = cache(partial(LayerPrices, healthy(costs)))


def healthy(costs: Costs) -> Costs:
    return costs.changed(health=Health()) if any(True for _ in costs.health) else costs


def site_of(costs: Costs, rank: int) -> DeviceSite:
    cluster = costs.cluster
    node = cluster.node(cluster.node_of(rank))
    return DeviceSite(cluster.type_of(rank), node.inner, node.outer, node.cards / node.devices)


def state_bytes(costs: Costs) -> float:
    """Return the bytes of all state between steps."""
    learning = sum(bucket.size for bucket in costs.buckets if bucket.learns)
    frozen = sum(bucket.size for bucket in costs.buckets) - learning
    return float((costs.state_bytes + GRADIENT_BYTES) * learning + WEIGHT_BYTES * frozen)


def free_bytes(costs: Costs, tokens: int, safety: float) -> dict[int, float]:
    """Return the bytes that a mini-batch and a rank's share of the state leave free on each running rank."""
    usable = {r: costs.memory_of(r) for r in range(costs.ranks) if math.isfinite(costs.health.rate(r))}
    part = costs.home.copies * state_bytes(costs) / sum(usable.values())
    return {rank: safety * size - (part * size + batch_bytes(tokens, tokens)) for rank, size in usable.items()}

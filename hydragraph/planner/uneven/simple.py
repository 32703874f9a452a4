"""Simple plans: pipelines of one depth and one degree in node order, with equal layers; sequences by speed.

They are what a person would write down, and what Megatron-LM (equal batches, too) and Whale (batches by speed) make of
devices that differ. Among the candidates, they make sure that no plan loses to them; and they are there at once, so
that a search that is cut short has something to return.

Example: nodes of 2 and 2 ranks, 6 layers. Degree 1, two stages: <[0]x3,[1]x3> + <[2]x3,[3]x3>, and with the stages
across the nodes <[0]x3,[2]x3> + <[1]x3,[3]x3>.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.costs import Costs
from hydragraph.planner.uneven.groups import nodes_of
from hydragraph.planner.uneven.prices import SAFETY, Prices, Site, reserves
from hydragraph.planner.uneven.sharing import least_seconds
from hydragraph.spec.stage_kind import StageKind
from hydragraph.spec.strategy import Pipeline, Stage, Strategy

Floats = NDArray[np.float64]
# Of the simple plans, how many are looked at.
KEPT = 4
# Of a group's option (`prices.Option`).
NUMBERS = (
    *("aux_s", "layer_s", "first_s", "last_s"),
    *("state_bytes", "first_bytes", "last_bytes", "kept_bytes", "own_bytes"),
)


@dataclass(frozen=True)
class Simple:
    """A simple plan.

    Attributes:
        strategy: its pipelines.
        together: sequences in a micro-batch.
        seconds: of its slowest pipeline, by AutoHet's cost; traffic comes on top.
    """

    strategy: Strategy
    together: int
    seconds: float


@dataclass(frozen=True)
class _Groups:
    """Tensor-parallel groups of one degree, in node order: their ranks, sites, rates, and memory beside the state."""

    ranks: tuple[tuple[int, ...], ...]
    sites: tuple[Site, ...]
    rates: Floats
    free: Floats


def simple(costs: Costs, sequences: int, length: int, sizes: Sequence[int], reach: int = 0) -> list[Simple]:
    """Return the simple plans that should end first, the most promising first.

    Args:
        sequences: of an iteration.
        length: tokens of each.
        sizes: how many of them may make a micro-batch.
        reach: tokens that every micro-batch must be able to have; default: its own.
    """
    every = {degree: groups for degree in _degrees(costs) if (groups := _groups(costs, degree)) is not None}
    found: dict[tuple[int, int, bool], tuple[float, int, StageKind]] = {}
    for together in sizes:
        prices = Prices(costs, [length] * together, reach)
        for degree, groups in every.items():
            for depth, by_stage, kind, seconds in _priced(prices, groups, degree, -(-sequences // together)):
                key = (degree, depth, by_stage)
                if key not in found or seconds < found[key][0]:
                    found[key] = (seconds, together, kind)
    best = sorted(found.items(), key=lambda each: each[1][0])[:KEPT]
    plans = []
    for (degree, depth, by_stage), (seconds, together, kind) in best:
        layers = _equal(costs.outline.layers, depth)
        order = _order(len(every[degree].ranks), depth, by_stage)
        pipelines = tuple(
            Pipeline(
                tuple(
                    Stage(every[degree].ranks[g], int(n), kind.sequence_parallel, kind.recompute)
                    for g, n in zip(row, layers, strict=True)
                )
            )
            for row in order.tolist()
        )
        plans.append(Simple(Strategy(pipelines), together, seconds))
    return plans


def _degrees(costs: Costs) -> list[int]:
    """Return the degrees that were measured on all types of devices."""
    measured = [{kind.tp for kind in costs.profile.of(name).pieces} for name in costs.cluster.types]
    return sorted(tp for tp in set.intersection(*measured) if not any(heads % tp for heads in costs.sizes.heads))


def _groups(costs: Costs, degree: int) -> _Groups | None:
    """Return all running devices in groups of a degree; None, where some node's do not come out even."""
    state = reserves(costs)
    ranks = []
    sites = []
    for node in nodes_of(costs):
        devices = sorted(node.devices)
        if len(devices) % degree:
            return None
        ranks += [tuple(devices[i : i + degree]) for i in range(0, len(devices), degree)]
        sites += [node.site] * (len(devices) // degree)
    rates = np.array([max(costs.rate(rank) for rank in group) for group in ranks])
    free = np.array([min(SAFETY * costs.memory_of(rank) - state[rank] for rank in group) for group in ranks])
    return _Groups(tuple(ranks), tuple(sites), rates, free)


def _priced(
    prices: Prices, groups: _Groups, degree: int, micro_batches: int
) -> Iterator[tuple[int, bool, StageKind, float]]:
    """Yield depth, order, kind of stage and seconds of every way to make equal pipelines of all groups."""
    count = len(groups.ranks)
    depths = [d for d in range(1, min(count, prices.layers) + 1) if count % d == 0 and count // d <= micro_batches]
    kinds = _columns(prices, groups, degree)
    for depth in depths:
        for by_stage in (False, True) if 1 < depth < count else (False,):
            order = _order(count, depth, by_stage)
            # The quickest kind of stage that fits.
            for kind, columns in kinds:
                seconds = _seconds(prices, groups, columns, order, micro_batches)
                if seconds is not None:
                    yield depth, by_stage, kind, seconds
                    break


def _columns(prices: Prices, groups: _Groups, degree: int) -> list[tuple[StageKind, dict[str, Floats]]]:
    """Return kinds of stages that all groups know, the quickest first, each with its numbers as arrays [groups]."""
    by_site = {site: {o.kind: o for o in prices.options(site, degree)} for site in dict.fromkeys(groups.sites)}
    found = []
    for kind in set.intersection(*(set(options) for options in by_site.values())):
        rows = {site: [getattr(options[kind], name) for name in NUMBERS] for site, options in by_site.items()}
        table = np.array([rows[site] for site in groups.sites]).T
        found.append((kind, dict(zip(NUMBERS, table, strict=True))))
    return sorted(found, key=lambda each: (float(each[1]["layer_s"].max()), each[0]))


def _seconds(
    prices: Prices, groups: _Groups, of: dict[str, Floats], order: NDArray[np.int64], micro_batches: int
) -> float | None:
    """Return the seconds of an iteration; None, where memory does not suffice."""
    width, depth = order.shape
    layers = _equal(prices.layers, depth)
    first = np.arange(depth) == 0
    last = np.arange(depth) == depth - 1
    # Under 1F1B a stage keeps as many micro-batches as there are stages from it to the end.
    flying = np.minimum(depth - np.arange(depth), -(-micro_batches // width))
    held = layers * (of["state_bytes"][order] + flying * of["kept_bytes"][order]) + of["own_bytes"][order]
    held = held + first * of["first_bytes"][order] + last * of["last_bytes"][order]
    if (held > groups.free[order]).any():
        return None
    taken = of["aux_s"][order] + layers * of["layer_s"][order]
    taken = groups.rates[order] * (taken + first * of["first_s"][order] + last * of["last_s"][order])
    return float(least_seconds(micro_batches, taken.sum(axis=1), taken.max(axis=1), np.ones(width, np.int64)))


def _order(groups: int, depth: int, by_stage: bool) -> NDArray[np.int64]:
    """Return which group is which stage of which pipeline [pipelines, stages]: pipeline after pipeline, or by stage."""
    every = np.arange(groups)
    return every.reshape(depth, -1).T if by_stage else every.reshape(-1, depth)


def _equal(layers: int, stages: int) -> NDArray[np.int64]:
    """Return layers in parts that are as equal as can be."""
    ends = layers * np.arange(stages + 1) // stages
    return np.diff(ends)

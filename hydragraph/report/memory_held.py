"""Memory of ranks over a simulated iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

from hydragraph.cost.costs import Costs
from hydragraph.cost.rank_memory import Memory, MemoryCurve
from hydragraph.cost.timeline import Timeline
from hydragraph.report import number_format
from hydragraph.report.facts import Fact, RankMemory

# Maximum curves; each needs a walk through a program.
MOST_CURVES = 48
MOST_POINTS = 160


def held(costs: Costs, timeline: Timeline) -> tuple[tuple[RankMemory, ...], str]:
    """Return the memory of ranks, in groups with equal memory, and a note on omitted ranks."""
    ranks = list(range(costs.ranks))
    note = ""
    if len(ranks) > MOST_CURVES:
        ranks = sorted(actor.ranks[0] for actor in timeline.actors)
        step = max(1, -(-len(ranks) // MOST_CURVES))
        ranks = ranks[::step]
        note = (
            f"{len(ranks)} of {costs.ranks} ranks are shown: the first of each stage{', evenly spaced' * (step > 1)}."
        )
    groups: dict[object, tuple[MemoryCurve, list[int]]] = {}
    for rank in ranks:
        curve = timeline.memory[rank]
        key = (curve.peak, curve.points, costs.memory_of(rank))
        groups.setdefault(key, (curve, []))[1].append(rank)
    return tuple(_held(curve, who, costs.memory_of(who[0])) for curve, who in groups.values()), note


def most_memory(memory: Sequence[RankMemory]) -> Fact:
    tightest = max(memory, key=lambda each: each.peak / each.limit)
    note = f"rank {tightest.ranks[0]}: {number_format.size(tightest.peak)} of {number_format.size(tightest.limit)}"
    return Fact("most memory", number_format.share(tightest.peak / tightest.limit), note)


def _held(curve: MemoryCurve, ranks: Sequence[int], limit: float) -> RankMemory:
    peak = curve.peak
    names = (field.name for field in fields(Memory) if field.name != "host")
    parts = tuple((name.replace("_", " "), float(getattr(peak, name))) for name in names)
    points = thinned([(time, float(size)) for time, size in curve.points], MOST_POINTS)
    return RankMemory(tuple(ranks), float(peak.total), limit, parts, points)


def thinned(points: Sequence[tuple[float, float]], most: int) -> tuple[tuple[float, float], ...]:
    """Return at most `most` points, the highest of each interval."""
    if len(points) <= most:
        return tuple(points)
    # Keep the highest point of each interval, so that no peak is lost.
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    return tuple(max(points[a:b], key=lambda point: point[1]) for a, b in pairwise(edges))

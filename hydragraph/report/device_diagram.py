"""Diagram of devices and layers; equal adjacent devices are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from hydragraph.report.facts import DeviceRow, Diagram, DiagramStage
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health
from hydragraph.spec.strategy import Strategy

# Maximum ranks with separate rows.
EVERY = 64
MOST_ROWS = 160


def diagram(strategy: Strategy, cluster: Cluster, health: Health) -> Diagram:
    return diagram_of(
        strategy,
        [device.node for device in cluster.devices],
        [cluster.type_of(rank) for rank in range(len(cluster.devices))],
        [health.rate(rank) for rank in range(len(cluster.devices))],
    )


def diagram_of(strategy: Strategy, nodes: Sequence[int], types: Sequence[str], rates: Sequence[float]) -> Diagram:
    """Return the diagram; `rates` are slowdowns, infinite for lost ranks."""
    parts = [_parts(strategy, rank) for rank in range(len(nodes))]
    joined: Callable[[int], object] = lambda rank: (nodes[rank], types[rank], rates[rank], parts[rank])  # noqa: E731
    key = joined if len(nodes) > EVERY else lambda rank: rank
    rows = []
    for _, group in groupby(range(len(nodes)), key):
        ranks = tuple(group)
        first = ranks[0]
        rows.append(DeviceRow(ranks, nodes[first], _what(types[first], rates[first]), rates[first] <= 1, parts[first]))
    if len(nodes) <= EVERY:
        return Diagram(strategy.layers, tuple(rows))
    return _without_twins(strategy, rows)


def _without_twins(strategy: Strategy, rows: Sequence[DeviceRow]) -> Diagram:
    # shape: pipeline -> its rows without rank numbers; equal shapes look the same
    shape: dict[int, list[object]] = {i: [] for i in range(len(strategy.pipelines))}
    for row in rows:
        for part in row.parts:
            shape[part.pipeline].append((len(row.ranks), row.what, part.stage, part.first, part.last))
    first: dict[object, int] = {}
    twins = {i for i, stages in shape.items() if first.setdefault(tuple(stages), i) != i}
    kept = tuple(row for row in rows if not row.parts or any(part.pipeline not in twins for part in row.parts))
    note = f"{len(twins)} of {len(shape)} pipelines are omitted because equal ones are shown." if twins else ""
    if len(kept) > MOST_ROWS:
        note = f"{note} {len(kept) - MOST_ROWS} more rows are omitted.".strip()
    return Diagram(strategy.layers, kept[:MOST_ROWS], note)


def _parts(strategy: Strategy, rank: int) -> tuple[DiagramStage, ...]:
    stages = []
    seen = set()
    for place in strategy.places(rank):
        stage = strategy.pipelines[place.pipeline].stages[place.stage]
        # Shared by pipelines
        if (place.first_layer, place.last_layer) in seen:
            continue
        seen.add((place.first_layer, place.last_layer))
        marks = [f"pipeline {place.pipeline}", f"stage {place.stage}"]
        marks += [f"tensor parallel over {stage.tp}"] if stage.tp > 1 else []
        marks += stage.kind.marks
        stages.append(DiagramStage(place.pipeline, place.stage, place.first_layer, place.last_layer, ", ".join(marks)))
    return tuple(stages)


def _what(type_: str, rate: float) -> str:
    if rate == float("inf"):
        slow = "lost"
    else:
        slow = f"{rate:.3g} × as slow" if rate > 1 else ""
    return ", ".join(filter(None, (type_, slow)))

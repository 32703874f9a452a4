"""Division of device types whose devices' times differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

# Minimum relative differences in time between device types.
BETWEEN_NODES = 0.05
WITHIN_NODE = 0.25
# Minimum difference, as a multiple of the standard error
ERRORS = 3


def split_types(
    nodes: Sequence[str], types: Sequence[str], seconds: Sequence[float], errors: Sequence[float]
) -> tuple[str, ...]:
    names = list(types)
    for type_ in dict.fromkeys(types):
        of_node: dict[str, list[list[int]]] = {}
        for rank, node in enumerate(nodes):
            if types[rank] == type_:
                of_node.setdefault(node, []).append([rank])
        alike = [group for ranks in of_node.values() for group in _grouped(ranks, seconds, errors, WITHIN_NODE)]
        fastest, *slower = _grouped(alike, seconds, errors, BETWEEN_NODES)
        for group in slower:
            name = f"{type_}-{100 * _middle(fastest, seconds) / _middle(group, seconds):.3g}"
            while name in names:
                name += "-slow"
            for rank in group:
                names[rank] = name
    return tuple(names)


def _grouped(
    parts: Sequence[list[int]], seconds: Sequence[float], errors: Sequence[float], least: float
) -> list[list[int]]:
    groups: list[list[int]] = []
    for part in sorted(parts, key=lambda part: _middle(part, seconds)):
        if groups:
            before = _middle(groups[-1], seconds)
            noise = ERRORS * math.hypot(_middle(groups[-1], errors), _middle(part, errors))
            if _middle(part, seconds) - before <= max(least * before, noise):
                groups[-1] = groups[-1] + part
                continue
        groups.append(part)
    return groups


def _middle(ranks: Sequence[int], values: Sequence[float]) -> float:
    return median(values[rank] for rank in ranks)

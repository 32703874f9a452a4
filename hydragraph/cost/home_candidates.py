"""Candidate owners of one bucket, as fractions of the bucket by rank.

    by need   the fractions that ranks need under one strategy (1 / t in a stage of t ranks), or on average
    groups    equal fractions for one stage's ranks, or for the intersection or union of two strategies' ranks
    all       equal fractions for all ranks
    subsets   equal fractions for every set of ranks, for at most `FEW` ranks

Fractions are multiplied by the rank's ability, `Home.shares` / `Health.rates`. A second copy is on another node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Parts = NDArray[np.float64]
Stages = tuple[tuple[int, ...], ...]

FEW = 4
# Maximum stages, and second nodes, to try
MOST = 8
# Decimal places that are compared
PLACES = 9


def candidates(
    users: Mapping[int, Stages], weights: Sequence[float], ability: Parts, copies: int, nodes: Sequence[int], wide: bool
) -> list[Parts]:
    """Return distinct candidates, starting with the candidate by average need.

    Args:
        users: stages that use the bucket, by strategy index.
        wide: also return `groups`, `all` and `subsets`.
    """
    ranks = len(ability)
    needs = {number: needed(stages, ranks) for number, stages in users.items()}
    every: list[Parts] = [np.sum([weights[number] * need for number, need in needs.items()], axis=0), *needs.values()]
    if wide:
        every += _groups(users, needs, ranks)
        every.append(np.ones(ranks))
        if ranks <= FEW:
            every += subsets(ranks)
    able = [parts * ability for parts in every]
    fractions = [parts / parts.sum() for parts in able if parts.sum() > 0] or [ability / ability.sum()]
    if copies > 1:
        second = [twice for parts in fractions for twice in with_second_copy(parts, ability, nodes)]
        fractions = second or [ability / ability.sum()]
    return unlike(fractions)


def needed(stages: Stages, ranks: int) -> Parts:
    parts = np.zeros(ranks)
    for stage in stages:
        parts[list(stage)] += 1 / len(stage)
    return parts


def subsets(ranks: int) -> list[Parts]:
    sets = (chosen for size in range(1, ranks + 1) for chosen in combinations(range(ranks), size))
    return [_of(chosen, ranks) for chosen in sets]


def with_second_copy(parts: Parts, ability: Parts, nodes: Sequence[int]) -> Iterator[Parts]:
    """Yield fractions of both copies together, with at most half on each node."""
    places = np.asarray(nodes)
    numbers = np.unique(places)
    of_node = [float(parts[places == node].sum()) for node in numbers]
    most = numbers[int(np.argmax(of_node))]
    inside = places == most
    if max(of_node) <= 0.5:
        yield parts
        return
    others = np.where(inside, 0.0, parts)
    seconds = [others, np.where(inside, 0.0, ability)]
    seconds += [np.where(places == node, ability, 0.0) for node in numbers[:MOST] if node != most]
    for second in seconds:
        if second.sum() > 0:
            yield np.where(inside, parts / parts[inside].sum(), second / second.sum()) / 2


def unlike(every: Sequence[Parts]) -> list[Parts]:
    return list({tuple(np.round(parts, PLACES)): parts for parts in reversed(every)}.values())[::-1]


def _groups(users: Mapping[int, Stages], needs: Mapping[int, Parts], ranks: int) -> Iterator[Parts]:
    for stages in users.values():
        yield from (_of(stage, ranks) for stage in dict.fromkeys(stages[:MOST]))
    for one, other in combinations(needs.values(), 2):
        for both in (one * other > 0, one + other > 0):
            if both.any():
                yield both.astype(float)


def _of(chosen: Sequence[int], ranks: int) -> Parts:
    parts = np.zeros(ranks)
    parts[list(chosen)] = 1.0
    return parts

"""Choice, by rank or by block, of a home (owners of the state) that fits and balances the ranks' times.

Rank r needs s_r k_r seconds for its fraction s_r of the state. The fractions are s_r = min(room_r, T / k_r), with the
least T for which they add up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.costs import Costs
from hydragraph.cost.home_choice import choose_home
from hydragraph.planner.bisection import bisect
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

Floats = NDArray[np.float64]

# Shares are rounded to 1/32 of the largest, or to 1/1024 if room is tight.
STEPS = (32, 1024)
CORRECTED = 8
PRECISION = 1e-15
PLACES = 9
EXACT = 1e-9


def filled(seconds: Floats, room: Floats) -> Floats | None:
    """Return the ranks' fractions, which fit in `room`, add up to 1 and minimize the largest `seconds * fraction`
    (seconds above 0).
    """
    if room.sum() < 1:
        return None
    _, last = bisect(lambda s: bool(np.minimum(room, s / seconds).sum() >= 1), 0.0, float(seconds.max()), PRECISION)
    parts = np.minimum(room, last / seconds)
    return np.asarray(parts / parts.sum())


def filled_apart(seconds: Floats, room: Floats, nodes: Sequence[int]) -> Floats | None:
    """Return fractions as in `filled` for two copies, so that no node owns more than one copy.

    If a node would own more, it owns one whole copy, and the other nodes share the second.
    """
    parts = filled(seconds, room)
    if parts is None:
        return None
    of_node = _of_node(parts, nodes)
    if of_node.max() <= 0.5:
        return parts
    largest = np.array(nodes) == np.unique(nodes)[of_node.argmax()]
    for some in (largest, ~largest):
        # Each half of the nodes owns a copy, half of all state: 2 * room is its room in copies.
        half = filled(seconds[some], 2 * room[some])
        if half is None:
            return None
        parts[some] = half / 2
    return parts


def _of_node(parts: Floats, nodes: Sequence[int]) -> Floats:
    return np.asarray(np.bincount(np.unique(nodes, return_inverse=True)[1], parts), dtype=np.float64)


def seconds_of_shares(costs: Costs, strategy: Strategy) -> Floats:
    """Return the seconds k that each rank would need to own the whole state; infinite for lost ranks."""
    elements = sum(bucket.size for bucket in costs.buckets)
    replicas = len(strategy.pipelines)
    several = costs.ranks > 1
    seconds_by_rank = []
    for rank in range(costs.ranks):
        rate = costs.health.rate(rank)
        node = costs.cluster.node(costs.cluster.node_of(rank))
        link = node.outer.bytes_per_s * min(1.0, node.cards / node.devices)
        # An owner sends weights to every pipeline and receives gradients from each, simultaneously.
        moved = replicas * elements * max(costs.sizes.itemsize, costs.push_itemsize) / link if several else 0.0
        update = costs.piece_profile(rank).update
        updating = update[1] * elements if update is not None else 0.0
        seconds_by_rank.append(moved + rate * updating if math.isfinite(rate) else math.inf)
    seconds = np.array(seconds_by_rank)
    return np.where(seconds > 0, seconds, 1.0)


def home_of(costs: Costs, strategy: Strategy, room: Sequence[float], given: Home) -> Home | None:
    """Return a home with a share for each rank, and the copies and nodes of `given`, or None if there is too little
    room.
    """
    seconds = seconds_of_shares(costs, strategy)
    able = np.clip(np.array(room, dtype=np.float64), 0.0, 1.0)
    able[~np.isfinite(seconds)] = 0.0
    seconds = np.where(np.isfinite(seconds), seconds, 1.0)
    idle = np.ones(costs.ranks, dtype=np.bool_)
    idle[list(strategy.devices)] = False
    nodes = home_nodes(costs, given)
    # Idle ranks own state only if others have too little room, or if copies need another node.
    for free in (np.where(idle, 0.0, able), able):
        parts = filled(seconds, free) if given.copies == 1 else filled_apart(seconds, free, nodes)
        if parts is None:
            continue
        if given.copies > 1 and _of_node(parts, nodes).max() > 0.5 - EXACT:
            # Coarser rounding would not keep the node's exact half.
            shares = np.round(parts / parts.max(), PLACES)
        else:
            shares = _rounded(parts, free)
        if len({node for node, share in zip(nodes, shares, strict=True) if share}) >= given.copies:
            equal = float(shares.min()) == float(shares.max())
            return Home(None if equal else tuple(map(_plain, shares)), copies=given.copies, nodes=given.nodes)
    return None


def _rounded(parts: Floats, room: Floats) -> Floats:
    relative = parts / parts.max()
    for steps in STEPS:
        # Round nearly full ranks down, others to the nearest step.
        rounded = np.where(parts >= 0.98 * room, np.floor(relative * steps), np.round(relative * steps))
        for _ in range(CORRECTED):
            shares = rounded / steps
            # Rounding others down may raise a rank's fraction above its room.
            full = shares > room * shares.sum()
            if not full.any():
                return np.asarray(shares)
            rounded = np.where(full, np.floor(room * rounded.sum()), rounded)
    return np.asarray(relative)


def lacking(costs: Costs, room: Sequence[float], given: Home) -> float:
    """Return the fraction of the state that does not fit, if nodes own at most one of two copies."""
    able = np.clip(np.array(room, dtype=np.float64), 0.0, 1.0)
    able[list(costs.health.lost)] = 0.0
    most = 1.0 if given.copies == 1 else 0.5
    return max(0.0, float(1 - np.minimum(_of_node(able, home_nodes(costs, given)), most).sum()))


def home_nodes(costs: Costs, given: Home) -> Sequence[int]:
    """Return each rank's node or, if there is only one, the rank itself."""
    nodes = given.nodes or [device.node for device in costs.cluster.devices]
    return range(costs.ranks) if len(set(nodes)) == 1 else nodes


def fractions(costs: Costs, home: Home) -> list[float]:
    """Return each rank's fraction of the state; the sum is the number of copies."""
    ranks = range(costs.ranks)
    if home.buckets or home.rule is not None:
        owned = costs.changed(home=home)
        elements = sum(bucket.size for bucket in costs.buckets)
        return [owned.owned(rank) / elements for rank in ranks]
    return [fraction_of(home, rank, costs.ranks) for rank in ranks]


def needed_ranks(costs: Costs, strategy: Strategy, home: Home) -> list[int]:
    owners = (rank for rank, part in enumerate(fractions(costs, home)) if part)
    return sorted({*strategy.devices, *owners})


def homes_of(costs: Costs, strategy: Strategy) -> tuple[Home, ...]:
    """Return possible homes, ignoring memory."""
    alike = home_of(costs, strategy, [1.0] * costs.ranks, costs.home) or costs.home.without_rule
    if all(len(pipeline.stages) == 1 for pipeline in strategy.pipelines):
        # Every rank uses all blocks
        return (alike,)
    return tuple(dict.fromkeys((alike, home_by_block(costs, strategy, costs.home))))


def fraction_of(home: Home, rank: int, ranks: int) -> float:
    """Return a rank's fraction of the state under a home that has only shares."""
    if home.shares is None:
        return home.copies / ranks
    return home.copies * home.shares[rank] / math.fsum(home.shares)


def home_by_block(costs: Costs, strategy: Strategy, given: Home, room: Sequence[float] | None = None) -> Home:
    """Return a home chosen by block (`cost.home_choice`), with the copies and nodes of `given`.

    If there are fewer nodes than copies, return `given.without_rule`.

    Args:
        room: maximum elements per rank; None: no limit, and ranks own the blocks that they use.
    """
    nodes = home_nodes(costs, given)
    if given.copies > len({nodes[rank] for rank in range(costs.ranks) if rank not in costs.health.lost}):
        return given.without_rule
    home = Home(copies=given.copies, nodes=given.nodes, rule="stages" if room is None else "auto")
    return choose_home(costs.question((strategy,), home, room))


def _plain(share: float) -> float:
    return int(share) if share == int(share) else float(share)

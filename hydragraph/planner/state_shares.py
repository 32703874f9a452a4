"""Who owns how much of the state: as much as a device's memory leaves room for, and its speed and link are good for.

An owner of a part s of the state takes s k_r seconds for it: sending weights to the stages that use them, receiving
their gradients, updating. The largest of these counts, so s_r = min(room_r, T / k_r) for the least T by which the
parts come to 1: water filling. Ranks without layers own nothing, as long as the others have room.

Example: k = (1, 1, 2), room for a half on each: T = 0.4 gives (0.4, 0.4, 0.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.block_pieces import GRADIENT_BYTES
from hydragraph.cost.costs import Costs
from hydragraph.cost.home_choice import Question, choose_home
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

Floats = NDArray[np.float64]

# Shares are rounded to this part of the largest, so that equal devices are told in few words; or to the second, where
# rounding to the first would give some rank more than it has room for.
STEPS = (32, 1024)
# How often what rounding made too large is made smaller.
CORRECTED = 8
_HALVINGS = 80
# Decimal places of shares that are not rounded to steps, and what sums of them are exact to.
PLACES = 9
EXACT = 1e-9


def filled(seconds: Floats, room: Floats) -> Floats | None:
    """Return parts that come to 1, of which none exceeds its room and the largest `seconds * part` is least.

    Args:
        seconds: k of each rank, above 0.
        room: the part of the state that each can hold.

    Returns:
        the parts; None where there is not enough room.
    """
    if room.sum() < 1:
        return None
    low = 0.0
    high = float(seconds.max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if np.minimum(room, middle / seconds).sum() >= 1:
            high = middle
        else:
            low = middle
    parts = np.minimum(room, high / seconds)
    return np.asarray(parts / parts.sum())


def filled_apart(seconds: Floats, room: Floats, nodes: Sequence[int]) -> Floats | None:
    """Return parts as `filled` does, of two copies on different nodes: no node has more than half of all parts.

    A node that would have more owns the whole state once, and all others share the second copy (`ir.layout`).

    Args:
        nodes: of each rank.
    """
    parts = filled(seconds, room)
    if parts is None:
        return None
    of_node = _of_node(parts, nodes)
    if of_node.max() <= 0.5:
        return parts
    largest = np.array(nodes) == np.unique(nodes)[of_node.argmax()]
    for some in (largest, ~largest):
        half = filled(seconds[some], 2 * room[some])
        if half is None:
            return None
        parts[some] = half / 2
    return parts


def _of_node(parts: Floats, nodes: Sequence[int]) -> Floats:
    return np.asarray(np.bincount(np.unique(nodes, return_inverse=True)[1], parts), dtype=np.float64)


def seconds_of_shares(costs: Costs, strategy: Strategy) -> Floats:
    """Return what owning all of the state would take each rank, in seconds; infinite for a lost one."""
    elements = sum(bucket.size for bucket in costs.buckets)
    replicas = len(strategy.pipelines)
    several = costs.ranks > 1
    found = []
    for rank in range(costs.ranks):
        rate = costs.health.rate(rank)
        node = costs.cluster.node(costs.cluster.node_of(rank))
        # A rank that has a network card to itself sends over it; others share it.
        link = node.outer.bytes_per_s * min(1.0, node.cards / node.devices)
        moved = replicas * elements * max(costs.sizes.itemsize, GRADIENT_BYTES) / link if several else 0.0
        update = costs.piece_profile(rank).update
        updating = update[1] * elements if update is not None else 0.0
        found.append(moved + rate * updating)
    # Where nothing is known to cost anything, all owners are equally good.
    known = np.array(found)
    return np.where(known > 0, known, 1.0)


def home_of(costs: Costs, strategy: Strategy, room: Sequence[float], given: Home) -> Home | None:
    """Return who owns how much; None where ranks have no room for the state.

    Args:
        room: the part of the state that each rank can hold beside what its stage needs.
        given: whose copies are kept.
    """
    seconds = seconds_of_shares(costs, strategy)
    able = np.clip(np.array(room, dtype=np.float64), 0.0, 1.0)
    able[~np.isfinite(seconds)] = 0.0
    seconds = np.where(np.isfinite(seconds), seconds, 1.0)
    idle = np.ones(costs.ranks, dtype=np.bool_)
    idle[list(strategy.devices)] = False
    nodes = _nodes(costs, given)
    # Idle ranks own something where the others alone have no room, or are all on one node and copies are wanted.
    for free in (np.where(idle, 0.0, able), able):
        parts = filled(seconds, free) if given.copies == 1 else filled_apart(seconds, free, nodes)
        if parts is not None and given.copies > 1 and _of_node(parts, nodes).max() > 0.5 - EXACT:
            shares = np.round(parts / parts.max(), PLACES)  # in few steps, that node would get more than half, or less
        else:
            shares = None if parts is None else _rounded(parts, free)
        if (
            shares is not None
            and len({node for node, share in zip(nodes, shares, strict=True) if share}) >= given.copies
        ):
            if float(shares.min()) == float(shares.max()):
                return Home(copies=given.copies, nodes=given.nodes)
            return Home(tuple(map(_plain, shares)), copies=given.copies, nodes=given.nodes)
    return None


def _rounded(parts: Floats, room: Floats) -> Floats:
    """Return shares in few steps; rounding down what is nearly full keeps it within its room."""
    relative = parts / parts.max()
    shares: Floats = relative
    for steps in STEPS:
        rounded = np.where(parts >= 0.98 * room, np.floor(relative * steps), np.round(relative * steps))
        for _ in range(CORRECTED):
            shares = np.asarray(rounded / steps)
            # Rounding changed the sum as well, which the parts are of.
            full = shares > room * shares.sum()
            if not full.any():
                return np.asarray(shares)
            rounded = np.where(full, np.floor(room * rounded.sum()), rounded)
    # Where room is that tight, what each has is told in full.
    return np.asarray(relative)


def lacking(costs: Costs, room: Sequence[float], given: Home) -> float:
    """Return the part of the state that ranks have no room for; of two copies, a node takes one at most.

    Args:
        room, given: as of `home_of`.
    """
    able = np.clip(np.array(room, dtype=np.float64), 0.0, 1.0)
    most = 1.0 if given.copies == 1 else 0.5
    return float(1 - np.minimum(_of_node(able, _nodes(costs, given)), most).sum())


def _nodes(costs: Costs, given: Home) -> Sequence[int]:
    """Return the node of each rank; on one node each rank counts as a node."""
    nodes = given.nodes or [device.node for device in costs.cluster.devices]
    return range(costs.ranks) if len(set(nodes)) == 1 else nodes


def fractions(costs: Costs, home: Home) -> list[float]:
    """Return the part of the state that each rank owns; of two copies, the parts add up to 2."""
    ranks = range(costs.ranks)
    if home.buckets or home.rule is not None:
        owned = costs.changed(home=home)
        elements = sum(bucket.size for bucket in costs.buckets)
        return [owned.owned(rank) / elements for rank in ranks]
    return [fraction_of(home, rank, costs.ranks) for rank in ranks]


def homes_of(costs: Costs, strategy: Strategy) -> tuple[Home, ...]:
    """Return homes that a strategy may have where memory is no matter: parts of all blocks alike, and by block."""
    alike = home_of(costs, strategy, [1.0] * costs.ranks, costs.home) or costs.home.without_rule
    if all(len(pipeline.stages) == 1 for pipeline in strategy.pipelines):
        return (alike,)  # every rank uses all blocks
    return tuple(dict.fromkeys((alike, home_by_block(costs, strategy, costs.home))))


def fraction_of(home: Home, rank: int, ranks: int) -> float:
    """Return the part of the state that a rank owns under a home of shares alone."""
    if home.shares is None:
        return home.copies / ranks
    return home.copies * home.shares[rank] / math.fsum(home.shares)


def home_by_block(costs: Costs, strategy: Strategy, given: Home, room: Sequence[float] | None = None) -> Home:
    """Return a home that is chosen for each block (`cost.home_choice`).

    Args:
        given: whose copies are kept.
        room: elements that each rank has memory for; None: enough, and owners are those that use a block: what a
            search asks of many strategies.
    """
    asked = Question(
        costs.outline,
        costs.buckets,
        (strategy,),
        costs.cluster,
        Home(copies=given.copies, nodes=given.nodes, rule="stages" if room is None else "auto"),
        costs.sizes.itemsize,
        health=costs.health,
        room=None if room is None else tuple(room),
    )
    return choose_home(asked)


def _plain(share: float) -> float:
    return int(share) if share == int(share) else float(share)

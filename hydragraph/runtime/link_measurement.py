"""Measurement of links, in each node, between nodes, and of all pairs of two nodes at once.

A pair exchanges messages of growing size, there and back. If pairs between two nodes are slower together than alone,
they share network cards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hydragraph.cluster.communicators import Groups
from hydragraph.runtime.streams import synchronise
from hydragraph.spec.cluster import Interconnect

SIZES = tuple(4**n for n in range(5, 13))  # bytes: 1 KiB to 16 MiB
LONGEST_S = 0.1  # no larger messages after one that takes this long
REPEATS = 3
NODES = 8  # most nodes to measure; further ones are assumed to be like the last

Pair = tuple[int, int]
Messages = tuple[tuple[int, float], ...]  # bytes and seconds


@dataclass(frozen=True)
class MeasuredLinks:
    """Links by node, in the order of their first ranks.

    Attributes:
        inner: within each node; None if it has one rank.
        outer: between each node and the others; None if there is one node.
        cards: estimated number of network cards of each node.
    """

    inner: tuple[Interconnect | None, ...]
    outer: tuple[Interconnect | None, ...]
    cards: tuple[int, ...]
    messages: Messages = ()


def measure_links(groups: Groups, nodes: Sequence[str]) -> MeasuredLinks:
    """Measure the links between ranks on these nodes; all ranks call it."""
    ranks = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)}
    by_node = list(ranks.values())
    within = {i: (own[0], own[1]) for i, own in enumerate(by_node) if len(own) > 1}
    by_pair = exchange(groups, list(within.values()))
    inner = [link_of(by_pair.get(within[i], ())) if i in within else None for i in range(len(by_node))]
    first = next(iter(by_pair.values()), ())
    outer: list[Interconnect | None] = [None] * len(by_node)
    for i in range(1, min(len(by_node), NODES)):
        pair = (by_node[0][0], by_node[i][0])
        messages = exchange(groups, [pair])[pair]
        first = first or messages
        outer[i] = link_of(messages)
    outer = [outer_link or (outer[min(len(by_node), NODES) - 1] if i else None) for i, outer_link in enumerate(outer)]
    outer[0] = max(filter(None, outer), key=lambda link: link.bytes_per_s, default=None)
    cards = [1] * len(by_node)
    if len(by_node) > 1 and outer[1] is not None:
        pairs = list(zip(by_node[0], by_node[1], strict=False))
        together = exchange(groups, pairs)
        alone_s = outer[1].seconds(together[pairs[0]][-1][0])
        shared_s = max(messages[-1][1] for messages in together.values())
        cards = [cards_of(len(own), len(pairs), alone_s, shared_s) for own in by_node]
    return MeasuredLinks(tuple(inner), tuple(outer), tuple(cards), first)


def cards_of(ranks: int, pairs: int, alone_s: float, together_s: float) -> int:
    """Estimate the number of network cards of a node.

    Args:
        alone_s, together_s: seconds of a message of one pair alone, and of the slowest of all pairs at once.
    """
    if pairs < 2:  # cards cannot be distinguished
        return 1
    sharing = min(pairs, max(1, round(together_s / alone_s)))  # pairs of one card
    return max(1, round(ranks / sharing))


def exchange(groups: Groups, pairs: Sequence[Pair]) -> Mapping[Pair, Messages]:
    """Return the messages of disjoint pairs of ranks that exchange at the same time."""
    rank = groups.world.rank
    own = next((pair for pair in pairs if rank in pair), None)
    by_pair: dict[Pair, list[tuple[int, float]]] = {pair: [] for pair in pairs}
    for size in SIZES if pairs else ():
        seconds = 0.0 if own is None else round_trip(groups, own, size)
        everyone = groups.gather(seconds)
        for pair in pairs:
            by_pair[pair].append((size, max(everyone[pair[0]], everyone[pair[1]], 1e-9)))
        if max(everyone) > LONGEST_S:
            break
    return {pair: tuple(messages) for pair, messages in by_pair.items()}


def round_trip(groups: Groups, pair: Pair, size: int, repeats: int = REPEATS) -> float:
    """Return half the seconds of a round trip of `size` bytes between the ranks of a pair."""
    message = torch.zeros(size, dtype=torch.uint8, device=groups.world.device)
    rank = groups.world.rank
    other = pair[1] if rank == pair[0] else pair[0]
    times = []
    for turn in range(repeats + 1):
        synchronise(message.device)
        began = time.perf_counter()
        for sender in pair:
            work = groups.send(message, other, turn) if sender == rank else groups.receive(message, other, turn)
            groups.wait(work)
        synchronise(message.device)
        times.append((time.perf_counter() - began) / 2)
    return median(times[1:])


def link_of(messages: Messages) -> Interconnect:
    """Return a link with the smallest message's time as latency, and the largest's bandwidth.

    Buffers let short messages pass faster than the link's lasting bandwidth, so a fit over all sizes would overestimate
    it.
    """
    latency = messages[0][1]
    size, seconds = messages[-1]
    return Interconnect(size / max(seconds - latency, 0.1 * seconds), latency)

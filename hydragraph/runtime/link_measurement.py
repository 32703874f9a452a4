"""Measurement of links within and between nodes, and of network cards.

Pairs of ranks exchange messages of increasing size; the receiver answers with the smallest message, so that each
direction is timed separately. The fastest repetition counts. Pairs on two nodes share network cards if messages are
slower when all pairs send at once.
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

# Bytes, from 1 KiB to 16 MiB
SIZES = tuple(4**n for n in range(5, 13))
# If a message takes longer, larger ones are not sent
LONGEST_S = 0.1
REPEATS = 3
ROUNDS = 8
# Links are equal if bandwidths have at least the first ratio, and latencies at most the second
ALIKE = 0.8
LATER = 2.0

# Sender and receiver
Pair = tuple[int, int]
# Bytes and seconds
Messages = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class MeasuredLinks:
    """Links of each node; nodes are in the order of their first ranks.

    Attributes:
        inner: link within each node in its slower direction, or None for a node with one rank.
        outbound: link from each node, or None for a single node.
        inbound: as `outbound`, to each node.
        cards: each node's estimated number of network cards.
    """

    inner: tuple[Interconnect | None, ...]
    outbound: tuple[Interconnect | None, ...]
    inbound: tuple[Interconnect | None, ...]
    cards: tuple[int, ...]
    messages: Messages = ()

    @property
    def outer(self) -> tuple[Interconnect | None, ...]:
        return tuple(map(_slower, self.outbound, self.inbound))


def measure_links(groups: Groups, nodes: Sequence[str]) -> MeasuredLinks:
    """Measure links between ranks on these nodes; all ranks call this."""
    ranks = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)}
    by_node = list(ranks.values())
    # Within nodes: each node's first two ranks, all nodes at once.
    within = {i: (own[0], own[1]) for i, own in enumerate(by_node) if len(own) > 1}
    times = exchange(groups, list(within.values()))
    messages = next(iter(times.values()), ())
    inner: list[Interconnect | None] = [None] * len(by_node)
    for i, (one, other) in within.items():
        inner[i] = _slower(link_of(times[one, other]), link_of(times[other, one]))
    # Between nodes: two nodes' first ranks, in rounds of disjoint pairs.
    outbound: list[Interconnect | None] = [None] * len(by_node)
    inbound = list(outbound)
    cards = [1] * len(by_node)
    for number, games in enumerate(tournament(len(by_node))[:ROUNDS]):
        times = exchange(groups, [(by_node[a][0], by_node[b][0]) for a, b in games])
        messages = messages or next(iter(times.values()))
        for one, other in [*games, *((b, a) for a, b in games)]:
            link = link_of(times[by_node[one][0], by_node[other][0]])
            outbound[one] = _faster(outbound[one], link)
            inbound[other] = _faster(inbound[other], link)
        # These rounds pair every node at least once
        if number < 1 + len(by_node) % 2:
            _count_cards(groups, by_node, games, times, cards)
    return MeasuredLinks(tuple(inner), tuple(outbound), tuple(inbound), tuple(cards), messages)


def tournament(players: int) -> list[list[Pair]]:
    """Return rounds of disjoint pairs; any two players meet once, and with odd `players`, one pauses per round."""
    # Circle method: player 0 stays, the others move one place per round. Opposite places meet: in
    # the first round of 4 players, (0, 3) and (1, 2).
    even = players + players % 2
    turning = list(range(1, even))
    rounds = []
    for _ in turning:
        circle = [0, *turning]
        pairs = zip(circle[: even // 2], reversed(circle[even // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < players])
        turning = [turning[-1], *turning[:-1]]
    return rounds if players > 1 else []


def _count_cards(
    groups: Groups,
    by_node: Sequence[Sequence[int]],
    games: Sequence[Pair],
    alone: Mapping[Pair, Messages],
    cards: list[int],
) -> None:
    pairs = {(a, b): list(zip(by_node[a], by_node[b], strict=False)) for a, b in games}
    several = [game for game in games if len(pairs[game]) > 1]
    if not several:
        return
    together = exchange(groups, [pair for game in several for pair in pairs[game]])
    for game in several:
        sent = together[pairs[game][0]]
        alone_s = link_of(alone[pairs[game][0]]).seconds(sent[-1][0])
        shared_s = max(together[pair][-1][1] for pair in pairs[game])
        for node in game:
            cards[node] = max(cards[node], cards_of(len(by_node[node]), len(pairs[game]), alone_s, shared_s))


def cards_of(ranks: int, pairs: int, alone_s: float, together_s: float) -> int:
    """Estimate the number of network cards of a node.

    Args:
        alone_s: message time of one pair.
        together_s: slowest time if all pairs send.
    """
    if pairs < 2:
        return 1
    # pairs per card
    sharing = min(pairs, max(1, round(together_s / alone_s)))
    return max(1, round(ranks / sharing))


def exchange(groups: Groups, pairs: Sequence[Pair]) -> Mapping[Pair, Messages]:
    """Time messages in both directions between disjoint pairs, all pairs at once."""
    rank = groups.world.rank
    by_pair: dict[Pair, list[tuple[int, float]]] = {way: [] for pair in pairs for way in (pair, pair[::-1])}
    left = list(pairs)
    for size in SIZES:
        if not left:
            break
        own = next((pair for pair in left if rank in pair), None)
        ways = [own, own[::-1]] if own is not None else []
        # Only the sender's clock counts.
        seconds = sum(min(answered(groups, way, size, SIZES[0])) * (rank == way[0]) for way in ways)
        everyone = groups.gather(seconds)
        for one, other in left:
            for way in ((one, other), (other, one)):
                by_pair[way].append((size, one_way(everyone[way[0]], by_pair[way])))
        # All ranks know all times, and so skip the same pairs.
        left = [pair for pair in left if max(everyone[pair[0]], everyone[pair[1]]) <= LONGEST_S]
    return {pair: tuple(messages) for pair, messages in by_pair.items()}


def one_way(seconds: float, before: Sequence[tuple[int, float]]) -> float:
    """Return a message's time, given the time until its answer arrives.

    Args:
        before: bytes and seconds of smaller messages, of which the first takes as long as the answer. If empty, message
            and answer have the same size.
    """
    return max(seconds - before[0][1] if before else seconds / 2, 1e-9)


def round_trip(groups: Groups, pair: Pair, size: int, repeats: int = REPEATS) -> float:
    """Return half the round-trip seconds of `size` bytes."""
    return median(answered(groups, pair, size, size, repeats)) / 2


def answered(groups: Groups, pair: Pair, size: int, answer: int, repeats: int = REPEATS) -> list[float]:
    """Return the seconds of each message with its answer."""
    rank = groups.world.rank
    other = pair[1] if rank == pair[0] else pair[0]
    messages = [torch.zeros(n, dtype=torch.uint8, device=groups.world.device) for n in (size, answer)]
    times = []
    for turn in range(repeats + 1):
        synchronise(groups.world.device)
        began = time.perf_counter()
        for sender, message in zip(pair, messages, strict=True):
            work = groups.send(message, other, turn) if sender == rank else groups.receive(message, other, turn)
            groups.wait(work)
        synchronise(groups.world.device)
        times.append(time.perf_counter() - began)
    # The first is a warm-up.
    return times[1:]


def link_of(messages: Messages) -> Interconnect:
    """Return a link with the smallest message's latency and the largest message's bandwidth.

    A fit over all sizes would overestimate the bandwidth, because buffers make short messages faster.
    """
    latency = messages[0][1]
    size, seconds = messages[-1]
    return Interconnect(size / max(seconds - latency, 0.1 * seconds), latency)


def equalized(links: Sequence[Interconnect]) -> list[Interconnect]:
    """Give nearly equal links their slowest bandwidth and latency.

    A planner then treats nodes with equal links as interchangeable.
    """
    groups: list[list[Interconnect]] = []
    for link in sorted(links, key=lambda each: (-each.bytes_per_s, each.latency_s)):
        alike = (group for group in groups if _are_alike(link, group))
        group = next(alike, None)
        if group is None:
            groups.append([link])
        else:
            group.append(link)
    slowest = {
        link: Interconnect(min(g.bytes_per_s for g in group), max(g.latency_s for g in group))
        for group in groups
        for link in group
    }
    return [slowest[link] for link in links]


def _are_alike(link: Interconnect, group: Sequence[Interconnect]) -> bool:
    latencies = [other.latency_s for other in (link, *group)]
    return link.bytes_per_s >= ALIKE * group[0].bytes_per_s and max(latencies) <= LATER * min(latencies)


def _slower(*links: Interconnect | None) -> Interconnect | None:
    return min(filter(None, links), key=lambda link: link.bytes_per_s, default=None)


def _faster(*links: Interconnect | None) -> Interconnect | None:
    return max(filter(None, links), key=lambda link: link.bytes_per_s, default=None)

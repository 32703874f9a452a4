"""Time of concurrent messages, and the ports and cards that they occupy.

A rank receives messages one after another while it sends messages one after another. Ranks share a network card's
bandwidth. The slowest rank determines the time of a *group*, such as a stage. A rank's rate multiplies the latency of
its messages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

import numpy as np

from hydragraph.ir.layout import Bools, Floats, Ints
from hydragraph.spec.cluster import Cluster, Interconnect

if TYPE_CHECKING:
    from hydragraph.cost.message_rounds import LinkTable

Pair = tuple[int, int]  # (sender, receiver)


@dataclass(frozen=True, eq=False)
class Transfers:
    """Bytes sent between different ranks; each (sender, receiver) occurs once."""

    src: Ints
    dst: Ints
    size: Floats

    @classmethod
    def of(cls, pairs: Mapping[Pair, float]) -> Transfers:
        ranks = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
        return cls(ranks[:, 0], ranks[:, 1], np.array(list(pairs.values()), dtype=np.float64))

    def __len__(self) -> int:
        return len(self.src)

    @cached_property
    def pairs(self) -> Mapping[Pair, float]:
        return dict(zip(zip(self.src.tolist(), self.dst.tolist(), strict=True), self.size.tolist(), strict=True))

    @property
    def total(self) -> float:
        return float(self.size.sum())


@dataclass(frozen=True, eq=False)
class ExchangeTimes:
    """Times and resources of an exchange between groups.

    Attributes:
        seconds: time of each group without other traffic [G]; 0 if the group takes no part.
        partners: whether two groups exchange data [G, G]; on the diagonal, whether a group exchanges any.
        occupied: each group's pairs (resource, fraction of `seconds`).
    """

    seconds: Floats
    partners: Bools
    occupied: tuple[tuple[tuple[int, float], ...], ...]

    @cached_property
    def whole(self) -> bool:
        return bool(self.partners.all())


class RankLinks:
    """Links between a cluster's ranks, which form groups.

    Resources are numbered: outgoing ports of groups (0 .. G-1), incoming ports (G .. 2G-1), outgoing cards, incoming
    cards.

    Args:
        group: group of each rank [R].
        handling: factor of each rank's latency [R].
    """

    def __init__(self, cluster: Cluster, group: Ints, handling: Floats | None = None) -> None:
        self._cluster = cluster
        self._handling = np.ones(len(group)) if handling is None else handling
        self._group = group
        self._groups = int(group.max(initial=-1)) + 1
        nodes = [device.node for device in cluster.devices]
        self._node = np.array(nodes, dtype=np.int64)
        places = [(node, cluster.card_of(rank)) for rank, node in enumerate(nodes)]
        cards = {place: i for i, place in enumerate(dict.fromkeys(places))}
        self._card = np.array([cards[place] for place in places], dtype=np.int64)
        self._cards = len(cards)
        by_kind: dict[object, list[int]] = {}
        for number in dict.fromkeys(nodes):
            by_kind.setdefault(cluster.node(number), []).append(number)
        self._of_kind = list(by_kind.values())
        kinds = {number: kind for kind, numbers in enumerate(self._of_kind) for number in numbers}
        self._kind = np.array([kinds[node] for node in nodes], dtype=np.int64)
        self._kinds = len(self._of_kind)
        self._ways = cache(self._find_ways)

    @cached_property
    def _links(self) -> LinkTable:
        # Numba is imported only for exchanges
        from hydragraph.cost.message_rounds import LinkTable

        links = [
            self._link(a, b, across) for a in range(self._kinds) for b in range(self._kinds) for across in (False, True)
        ]
        points = [point for link in links if link is not None for point in link.points]
        counts = [0 if link is None else len(link.points) for link in links]
        return LinkTable(
            self._node,
            self._kind,
            self._card,
            self._kinds,
            self._cards,
            self._handling,
            np.array([0.0 if link is None else link.latency_s for link in links]),
            np.array([math.inf if link is None else link.bytes_per_s for link in links]),
            np.concatenate(([0], np.cumsum(counts))),
            np.log([size for size, _ in points]) if points else np.zeros(0),
            np.array([speed for _, speed in points], dtype=np.float64),
        )

    def _link(self, a: int, b: int, across: bool) -> Interconnect | None:
        one = self._of_kind[a][0]
        other = one if not across else next((n for n in self._of_kind[b] if n != one), None)
        return None if other is None or (a != b and not across) else self._cluster.link_between(one, other)

    def slowest_s(self, moved: Transfers) -> float:
        _, _, _, rank_s = self._exchanged(moved)
        return float(rank_s.max(initial=0.0))

    def passage(self, moved: Transfers) -> ExchangeTimes:
        groups = self._groups
        sent, moving, filling, rank_s = self._exchanged(moved)
        seconds = np.zeros(groups)
        np.maximum.at(seconds, self._group, rank_s)
        partners = np.zeros((groups, groups), dtype=np.bool_)
        one = self._group[sent.src]
        other = self._group[sent.dst]
        partners[one, other] = partners[other, one] = True
        taking = partners.any(1)
        partners[taking, taking] = True
        return ExchangeTimes(seconds, partners, self._occupied(sent, moving, filling, seconds))

    def _exchanged(self, moved: Transfers) -> tuple[Transfers, Floats, Floats, Floats]:
        from hydragraph.cost.message_rounds import together

        kept = moved.size > 0
        sent = Transfers(moved.src[kept], moved.dst[kept], moved.size[kept])
        moving, filling, rank_s = together(self._links, sent.src, sent.dst, sent.size)
        return sent, moving, filling, rank_s

    def _occupied(
        self, sent: Transfers, moving: Floats, filling: Floats, seconds: Floats
    ) -> tuple[tuple[tuple[int, float], ...], ...]:
        src, dst = sent.src, sent.dst
        across = self._node[src] != self._node[dst]
        groups = self._groups
        ranks = len(self._node)
        used: list[list[tuple[int, float]]] = [[] for _ in range(groups)]
        # Only a group's busiest port counts
        for base, at in ((0, src), (groups, dst)):
            busiest = np.zeros(groups)
            np.maximum.at(busiest, self._group, np.bincount(at, moving, ranks))
            for g in np.flatnonzero(busiest):
                used[g].append((base + int(g), float(busiest[g] / seconds[g])))
        for base, at in ((2 * groups, src), (2 * groups + self._cards, dst)):
            code, place = np.unique(self._group[at[across]] * self._cards + self._card[at[across]], return_inverse=True)
            for pair, busy in zip(code.tolist(), np.bincount(place, filling[across], len(code)).tolist(), strict=True):
                g, card = divmod(pair, self._cards)
                used[g].append((base + card, busy / float(seconds[g])))
        return tuple(map(tuple, used))

    def message(self, pairs: tuple[Pair, ...], size: float) -> tuple[float, tuple[tuple[int, float], ...]]:
        """Return the seconds of concurrent messages of `size` bytes, and the busy fraction of each resource."""
        seconds = 0.0
        used: dict[int, float] = {}
        for link, ports, cards in self._ways(pairs):
            moving = size / link.bandwidth(size) if size > 0 else 0.0
            seconds = max(seconds, link.latency_s + moving)
            for port in ports:
                used[port] = max(used.get(port, 0.0), moving)
            for card in cards:
                used[card] = used.get(card, 0.0) + size / max(link.bytes_per_s, link.bandwidth(size))
                seconds = max(seconds, link.latency_s + used[card])
        return seconds, tuple((resource, busy / seconds) for resource, busy in used.items() if busy > 0)

    def _find_ways(self, pairs: tuple[Pair, ...]) -> tuple[tuple[Interconnect, tuple[int, ...], tuple[int, ...]], ...]:
        ways = []
        groups = self._groups
        for a, b in pairs:
            link = self._cluster.link(a, b).handled(max(self._handling[a], self._handling[b]))
            ports = (int(self._group[a]), groups + int(self._group[b]))
            cards: tuple[int, ...] = ()
            if self._node[a] != self._node[b]:
                cards = (2 * groups + int(self._card[a]), 2 * groups + self._cards + int(self._card[b]))
            ways.append((link, ports, cards))
        return tuple(ways)

"""Time of messages that begin simultaneously, in compiled code for up to 10^6 pairs; see `cost.traffic`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hydragraph.ir.layout import Floats, Ints
from hydragraph.kernels.numba_compiler import compiled


class LinkTable(NamedTuple):
    """Links from nodes of kind a to kind b, at index 2 (a K + b) within a node, else at the next index.

    Attributes:
        node, kind, card: each rank's node, node kind and network card [R].
        kinds: K, the number of node kinds.
        handling: factor of each rank's latency [R].
        latency_s, bytes_per_s: of each link [2 K K].
        first: index of each link's first measured point, then the number of points [2 K K + 1].
        logs: logarithm of each measured point's bytes.
        speeds: bytes per second of each measured point.
    """

    node: Ints
    kind: Ints
    card: Ints
    kinds: int
    cards: int
    handling: Floats
    latency_s: Floats
    bytes_per_s: Floats
    first: Ints
    logs: Floats
    speeds: Floats


@compiled
def together(links: LinkTable, src: Ints, dst: Ints, size: Floats) -> tuple[Floats, Floats, Floats]:
    """Return each message's seconds without latency [M] and on a card [M], and each rank's seconds [R].

    Args:
        src, dst: ranks [M].
        size: bytes, above 0 [M].
    """
    node, card, handling, latency_s = links.node, links.card, links.handling, links.latency_s
    count = len(src)
    link = np.empty(count, np.int64)
    speed = np.empty(count)
    fastest = links.bytes_per_s.copy()
    for i in range(count):
        a, b = src[i], dst[i]
        link[i] = 2 * (links.kind[a] * links.kinds + links.kind[b]) + (node[a] != node[b])
        speed[i] = _speed(links, np.log(size[i]), link[i])
        fastest[link[i]] = max(fastest[link[i]], speed[i])
    moving = size / speed
    filling = size / fastest[link]
    sent = np.zeros(len(node))
    received = np.zeros(len(node))
    leave = np.zeros(links.cards)
    enter = np.zeros(links.cards)
    for i in range(count):
        a, b = src[i], dst[i]
        alone = latency_s[link[i]] * max(handling[a], handling[b]) + moving[i]
        sent[a] += alone
        received[b] += alone
        if node[a] != node[b]:
            leave[card[a]] += filling[i]
            enter[card[b]] += filling[i]
    rank_s = np.maximum(sent, received)
    # A card sends and receives simultaneously, and carries its ranks' messages to other nodes.
    for i in range(count):
        a, b = src[i], dst[i]
        if node[a] != node[b]:
            shared = max(leave[card[a]], enter[card[b]]) + latency_s[link[i]] * max(handling[a], handling[b])
            rank_s[a] = max(rank_s[a], shared)
            rank_s[b] = max(rank_s[b], shared)
    return moving, filling, rank_s


@compiled
def _speed(links: LinkTable, log: float, link: int) -> float:
    begin, end = links.first[link], links.first[link + 1]
    logs, speeds = links.logs, links.speeds
    if begin == end:
        return float(links.bytes_per_s[link])
    if log <= logs[begin]:
        return float(speeds[begin])
    for i in range(begin + 1, end):
        if log < logs[i]:
            part = (log - logs[i - 1]) / (logs[i] - logs[i - 1])
            return float(speeds[i - 1] + part * (speeds[i] - speeds[i - 1]))
    return float(speeds[end - 1])

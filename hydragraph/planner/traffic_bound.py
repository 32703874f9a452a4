"""Lower bound of an iteration from the traffic of network cards, for any owners of the state.

It requires that each tensor-parallel group is in one node. Each pipeline pulls every block's weights and pushes its
gradients once. Let its stages on node n take w_n of a block's bytes and g_n of its gradients', summed over pipelines (W
and G over nodes), and let n own a fraction f_n of that block's state. Then

    n takes in    (1 - f_n) w_n + f_n (G - g_n)
    n sends       (1 - f_n) g_n + f_n (W - w_n)

of it. The sums over blocks are limited by the node's cards, and the total taken in is limited by all cards
together. Owners are not known yet, and each block may have its own, so the minimum over all f of each block counts: the
terms are linear in f_n, so for a node the minimum is at f_n = 0 or 1, and for all nodes together it is reached if the
block is owned by the node that uses most of it.

A block that every rank uses whole counts as one use per node.

Example: two pipelines, each on a node of its own, w = g = (1, 1) GB and cards of 1 GB/s. A node takes in
(1 - f) + f = 1 GB for any f: at least 1 s. All together: 4 - 2 = 2 GB over 2 GB/s: the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.accounts import TimeKind
from hydragraph.cost.block_pieces import GRADIENT_BYTES
from hydragraph.cost.costs import Costs
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.strategy import Strategy

Floats = NDArray[np.float64]


def bytes_by_block(costs: Costs) -> tuple[Floats, Floats]:
    """Return the bytes of every block's weights and gradients; what several blocks use counts at the first of them."""
    first = {name: min(costs.outline.index[block] for block in users) for name, users in costs.outline.buckets}
    weights = np.zeros(len(costs.outline.blocks))
    gradients = np.zeros(len(costs.outline.blocks))
    for bucket in costs.buckets:
        weights[first[bucket.name]] += costs.sizes.itemsize * bucket.size
        gradients[first[bucket.name]] += GRADIENT_BYTES * bucket.size * bucket.learns
    return weights, gradients


class Cards:
    """Network cards of nodes, and the bytes of blocks that pass through them."""

    def __init__(self, costs: Costs) -> None:
        self._span = costs.outline.span
        self._copies = costs.home.copies
        weights, gradients = bytes_by_block(costs)
        self._weights = costs.corrections.factor(TimeKind.PULL) * weights
        self._gradients = costs.corrections.factor(TimeKind.PUSH) * gradients
        nodes = [device.node for device in costs.cluster.devices]
        places = {number: place for place, number in enumerate(dict.fromkeys(nodes))}
        self._node = [places[number] for number in nodes]
        self._speed = np.array([_speed(costs.cluster, number) for number in places])

    def least_s(self, strategy: Strategy) -> float:
        """Return a lower bound of an iteration, for pipelines that all run micro-batches and share no stage."""
        nodes = len(self._speed)
        if nodes == 1:
            return 0.0
        uses = np.zeros((nodes, len(self._weights)))  # number of uses of a block on a node
        for pipeline in strategy.pipelines:
            done = 0
            for stage in pipeline.stages:
                begin, end = self._span(done, done + stage.layers)
                done += stage.layers
                for rank in stage.devices:
                    uses[self._node[rank], begin:end] += 1 / stage.tp
        # A collective may bring a block that every rank uses whole, and it enters each node once.
        everywhere = uses.sum(0) == len(self._node)
        uses[:, everywhere] = np.minimum(uses[:, everywhere], 1.0)
        w, g = uses * self._weights, uses * self._gradients
        if self._copies > 1:  # weights come from the nearer owner, gradients go to the first
            far = w.sum(0) - np.sort(w, 0)[-self._copies :].sum(0) + g.sum(0) - g.max(0)
            return float(far.sum() / self._speed.sum())
        received = np.minimum(w, g.sum(0) - g).sum(1)
        sent = np.minimum(g, w.sum(0) - w).sum(1)
        together = (w.sum(0) + g.sum(0) - (w + g).max(0)).sum()
        return float(max((np.maximum(received, sent) / self._speed).max(), together / self._speed.sum()))


def _speed(cluster: Cluster, number: int) -> float:
    """Return the bytes/s that a node's cards can carry in one direction, over its fastest link."""
    node = cluster.node(number)
    types = {device.type for device in cluster.devices if device.node == number}
    links = [node.outer, *(pair.link for pair in cluster.pairs if not types.isdisjoint(pair.types))]
    return node.cards * max(max(link.bytes_per_s, *(speed for _, speed in link.points), 0.0) for link in links)

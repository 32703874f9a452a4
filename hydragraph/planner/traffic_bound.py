"""Lower bound on an iteration's time from the traffic of network cards, for any owners of the state.

Each tensor-parallel group must be in one node. For one block, let stages on node n pull w_n bytes of weights and push
g_n bytes of gradients, summed over pipelines; W and G are the sums over nodes. If n owns a fraction f_n of the block's
state,

    n receives    (1 - f_n) w_n + f_n (G - g_n)
    n sends       (1 - f_n) g_n + f_n (W - w_n)

A node's cards limit what the node receives or sends for all blocks, and all cards together limit the total. Each limit
uses the fractions of least traffic: f_n = 0 or 1 for one node, and for the total, the node that uses most of a block
owns it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.accounts import TimeKind
from hydragraph.cost.costs import Costs
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.strategy import Strategy

Floats = NDArray[np.float64]


def bytes_by_block(costs: Costs) -> tuple[Floats, Floats]:
    """Return every block's weight and gradient bytes; shared parameters are in their first block."""
    first = {name: min(costs.outline.index[block] for block in users) for name, users in costs.outline.buckets}
    weights = np.zeros(len(costs.outline.blocks))
    gradients = np.zeros(len(costs.outline.blocks))
    for bucket in costs.buckets:
        weights[first[bucket.name]] += costs.sizes.itemsize * bucket.size
        gradients[first[bucket.name]] += costs.push_itemsize * bucket.size * bucket.learns
    return weights, gradients


class CardBound:
    """Lower bound from nodes' network cards and blocks' bytes."""

    def __init__(self, costs: Costs) -> None:
        self._spans = costs.spans
        self._copies = costs.home.copies
        weights, gradients = bytes_by_block(costs)
        self._weights = costs.corrections.factor(TimeKind.PULL) * weights
        self._gradients = costs.corrections.factor(TimeKind.PUSH) * gradients
        nodes = [device.node for device in costs.cluster.devices]
        places = {number: place for place, number in enumerate(dict.fromkeys(nodes))}
        self._node = [places[number] for number in nodes]
        self._speed = np.array([_speed(costs.cluster, number) for number in places])

    def least_s(self, strategy: Strategy) -> float:
        """Return a lower bound on an iteration's time if every pipeline has work and no stage is shared."""
        nodes = len(self._speed)
        if nodes == 1:
            return 0.0
        # uses[n, b]: whole copies of block b that node n's ranks use.
        uses = np.zeros((nodes, len(self._weights)))
        for pipeline in strategy.pipelines:
            for stage, (begin, end) in zip(pipeline.stages, self._spans(pipeline), strict=True):
                for rank in stage.devices:
                    uses[self._node[rank], begin:end] += 1 / stage.tp
        # If every rank uses a whole block, a collective may send it to each node once.
        everywhere = uses.sum(0) == len(self._node)
        uses[:, everywhere] = np.minimum(uses[:, everywhere], 1.0)
        w, g = uses * self._weights, uses * self._gradients
        # Weights come from the nearer owner; gradients go to the first owner
        if self._copies > 1:
            far = w.sum(0) - np.sort(w, 0)[-self._copies :].sum(0) + g.sum(0) - g.max(0)
            return float(far.sum() / self._speed.sum())
        # A node receives a block's weights if it does not own the block, else other nodes'
        # gradients. The smaller is a lower bound; likewise for sent bytes.
        received = np.minimum(w, g.sum(0) - g).sum(1)
        sent = np.minimum(g, w.sum(0) - w).sum(1)
        # At best, the node that uses a block most owns it; others' weights and gradients cross a
        # card.
        together = (w.sum(0) + g.sum(0) - (w + g).max(0)).sum()
        return float(max((np.maximum(received, sent) / self._speed).max(), together / self._speed.sum()))


def _speed(cluster: Cluster, number: int) -> float:
    node = cluster.node(number)
    types = {device.type for device in cluster.devices if device.node == number}
    links = [node.outer, *(pair.link for pair in cluster.pairs if not types.isdisjoint(pair.types))]
    return node.cards * max(max(link.bytes_per_s, *(speed for _, speed in link.points), 0.0) for link in links)

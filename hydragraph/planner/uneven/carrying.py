"""What network cards must carry in an iteration, whoever owns the state: no iteration ends before they have.

That is, as long as a rank owns the same part of all buckets, as in all homes that planning makes, and a
tensor-parallel group is in one node. Each pipeline pulls all weights and pushes all gradients once. Let its stages on
node n take w_n of the weights' bytes and g_n of the gradients', summed over pipelines (W and G over nodes), and let n
own a part f_n of the state. Then

    n takes in    (1 - f_n) w_n + f_n (G - g_n)
    n sends       (1 - f_n) g_n + f_n (W - w_n)

and neither goes faster than its cards, nor all that is taken in faster than all cards together. Owners are not known
yet, so the least over all f counts: the parts are linear in f_n, so for a node at f_n = 0 or 1, and for all nodes
together where all is owned by the one that uses most.

Example: two pipelines, each on a node of its own, w = g = (1, 1) GB and cards of 1 GB/s. A node takes in
(1 - f) + f = 1 GB whatever it owns: 1 s at least. All together: 4 - 2 = 2 GB over 2 GB/s: the same.
"""

from __future__ import annotations

import numpy as np

from hydragraph.cost.accounts import Kind
from hydragraph.cost.costs import Costs
from hydragraph.cost.pieces import GRADIENT_BYTES
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.strategy import Strategy


class Cards:
    """Network cards of nodes, and what blocks weigh that go through them."""

    def __init__(self, costs: Costs) -> None:
        self._span = costs.outline.span
        self._copies = costs.home.copies
        blocks = len(costs.outline.blocks)
        first = {name: min(costs.outline.index[block] for block in users) for name, users in costs.outline.buckets}
        weights, gradients = np.zeros(blocks + 1), np.zeros(blocks + 1)
        pull, push = map(costs.corrections.factor, (Kind.PULL, Kind.PUSH))
        for bucket in costs.buckets:
            weights[first[bucket.name] + 1] += pull * costs.sizes.itemsize * bucket.size
            gradients[first[bucket.name] + 1] += push * GRADIENT_BYTES * bucket.size * bucket.learns
        # Of all blocks before each.
        self._weights: list[float] = np.cumsum(weights).tolist()
        self._gradients: list[float] = np.cumsum(gradients).tolist()
        nodes = [device.node for device in costs.cluster.devices]
        places = {number: place for place, number in enumerate(dict.fromkeys(nodes))}
        self._node = [places[number] for number in nodes]
        self._speed = np.array([_speed(costs.cluster, number) for number in places])

    def least_s(self, strategy: Strategy) -> float:
        """Return seconds that no iteration is below, of pipelines that all run micro-batches and share no stage."""
        nodes = len(self._speed)
        if nodes == 1:
            return 0.0
        used = [0.0] * nodes
        learned = [0.0] * nodes
        for pipeline in strategy.pipelines:
            done = 0
            for stage in pipeline.stages:
                begin, end = self._span(done, done + stage.layers)
                done += stage.layers
                weights = (self._weights[end] - self._weights[begin]) / stage.tp
                gradients = (self._gradients[end] - self._gradients[begin]) / stage.tp
                for rank in stage.devices:
                    used[self._node[rank]] += weights
                    learned[self._node[rank]] += gradients
        w, g = np.array(used), np.array(learned)
        if self._copies > 1:  # weights come from the nearer owner, gradients go to the first
            return float((w.sum() - np.sort(w)[-self._copies :].sum() + g.sum() - g.max()) / self._speed.sum())
        taken = np.minimum(w, g.sum() - g)
        sent = np.minimum(g, w.sum() - w)
        together = w.sum() + g.sum() - (w + g).max()
        return float(max((np.maximum(taken, sent) / self._speed).max(), together / self._speed.sum()))


def _speed(cluster: Cluster, number: int) -> float:
    """Return the bytes/s that a node's cards can carry in one direction, to whichever other node that is most."""
    node = cluster.node(number)
    types = {device.type for device in cluster.devices if device.node == number}
    links = [node.outer, *(pair.link for pair in cluster.pairs if not types.isdisjoint(pair.types))]
    return node.cards * max(max(link.bytes_per_s, *(speed for _, speed in link.points), 0.0) for link in links)

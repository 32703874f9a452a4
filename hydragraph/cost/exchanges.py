"""Elements and messages of a bucket's pull or push."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydragraph.cost.traffic import Transfers
from hydragraph.ir.instruction import Op
from hydragraph.ir.layout import GradientKind, Ints, Layout, propagation
from hydragraph.ir.parameter import Bucket
from hydragraph.spec.cluster import Cluster


def elements_sent(
    op: Op, bucket: Bucket, owners: Layout, stages: Sequence[tuple[int, ...]], splits_tokens: bool, ranks: int
) -> Ints:
    """Return how many elements each rank sends to each other rank in a pull or push [ranks, ranks].

    Args:
        stages: ranks of the stages that use the bucket, in tensor-parallel order.
        splits_tokens: whether each rank of a stage computes gradients for only a part of the tokens.
    """
    # Numba is imported only to price traffic
    from hydragraph.ir.link_volume import copied, reduced

    sums = GradientKind.PARTIAL if splits_tokens else GradientKind.REPLICA
    users = propagation(bucket, stages, {parameter.name: sums for parameter in bucket.parameters})
    return copied(owners, users, ranks) if op is Op.PULL else reduced(users, owners, ranks)


def transfers(sent: Ints, itemsize: float, cluster: Cluster) -> Transfers:
    """Return the messages of an exchange of `sent` elements [ranks, ranks].

    If every rank sends equally many bytes to every other rank on several nodes, the exchange is a collective, which
    NCCL and gloo run along one ring per network card.
    """
    # NumPy finds nonzero entries six times as fast in a flat boolean array.
    at = np.flatnonzero(sent != 0)
    src, dst = np.divmod(at, sent.shape[1])
    size = sent.ravel()[at].astype(np.float64) * itemsize
    ranks = len(sent)
    equal = len(at) == ranks * (ranks - 1) and bool((size == size[0]).all()) if len(at) else False
    if not equal or len({device.node for device in cluster.devices}) == 1:
        return Transfers(src, dst, size)
    return _along_rings(cluster, float(size[0]) * (ranks - 1))


def _along_rings(cluster: Cluster, size: float) -> Transfers:
    nodes = cluster.ranks_by_node
    rings = min(cluster.node(number).cards for number in nodes)
    pairs: dict[tuple[int, int], float] = {}
    for ring in range(rings):
        order: list[int] = []
        for local in nodes.values():
            first = ring * len(local) // rings
            order += local[first:] + local[:first]
        for pair in ring_pairs(order):
            pairs[pair] = pairs.get(pair, 0.0) + size / rings
    return Transfers.of(pairs)


def ring_pairs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(ranks, (*ranks[1:], ranks[0]), strict=True))

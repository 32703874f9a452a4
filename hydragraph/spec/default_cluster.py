"""Default clusters, used if no cluster is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hydragraph.spec.cluster import Cluster, Device, Interconnect


def default_cluster(ranks: int) -> Cluster:
    """Return H200s of 989 TFLOP/s, eight in a node, with NVLink and 400 Gb/s between nodes.

    NVLink 4 carries 450 GB/s in each direction; a node's eight network cards of 400 Gb/s give each GPU 50 GB/s.
    """
    return Cluster.homogeneous(
        ranks,
        device=Device(989e12, int(141e9), 4.8e12),
        within_node=Interconnect(450e9, 5e-6),
        between_nodes=Interconnect(50e9, 10e-6),
        ranks_per_node=8,
    )


def cluster_on(nodes: Sequence[int]) -> Cluster:
    """Return devices on these nodes, assuming only that links within a node are the faster ones.

    Links are nine times as fast within a node, as in `default_cluster`, and have no latency, which would set the cost
    of small messages.
    """
    usual = default_cluster(1)
    devices = tuple(replace(usual.devices[0], node=node) for node in nodes)
    return Cluster(devices, Interconnect(450e9, 0.0), Interconnect(50e9, 0.0))

"""The cluster that is assumed where none is named."""

from __future__ import annotations

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

"""Default clusters of H200 GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hydragraph.spec.cluster import Cluster, Device, Interconnect, type_of_sheet
from hydragraph.spec.known_devices import KNOWN

_H200 = type_of_sheet(KNOWN["h200"]).device(0, "")
_NVLINK = 450e9


def default_cluster(ranks: int, device: Device = _H200, link_bytes_per_s: float = _NVLINK) -> Cluster:
    """Return a cluster of nodes with eight GPUs, each with NVLink and a 400 Gb/s network card."""
    return Cluster.homogeneous(
        ranks,
        device=device,
        within_node=Interconnect(link_bytes_per_s, 5e-6),
        between_nodes=Interconnect(50e9, 10e-6),
        ranks_per_node=8,
    )


def cluster_on(nodes: Sequence[int]) -> Cluster:
    """Return a cluster with device i on node `nodes[i]`, and links without latency."""
    usual = default_cluster(1)
    devices = tuple(replace(usual.devices[0], node=node) for node in nodes)
    return Cluster(devices, Interconnect(450e9, 0.0), Interconnect(50e9, 0.0))

"""The default cluster."""

from __future__ import annotations

from hydragraph.spec.default_cluster import default_cluster


def test_it_has_eight_devices_in_a_node() -> None:
    cluster = default_cluster(16)
    assert len(cluster.devices) == 16
    assert cluster.node_of(7) == cluster.node_of(0) != cluster.node_of(8)
    assert len({device.flops_per_s for device in cluster.devices}) == 1

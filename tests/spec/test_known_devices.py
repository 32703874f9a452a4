"""GPUs that cluster files name by name alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydragraph.spec.cluster import Cluster
from hydragraph.spec.known_devices import KNOWN, known

LINK = "{bytes_per_s: 50e9, latency_s: 1e-5}"
FILE = f"""
nodes:
  - {{type: h100-sxm, devices: 2, inner: {LINK}, outer: {LINK}}}
  - {{type: mine, devices: 1, inner: {LINK}, outer: {LINK}}}
"""
MINE = "types: {mine: {flops_per_s: 1e12, memory_bytes: 8e9, memory_bytes_per_s: 1e11}}"


def test_a_built_in_type_needs_no_entry(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE + MINE)
    cluster = Cluster.load(path)
    assert cluster.types["h100-sxm"].flops_per_s == KNOWN["h100-sxm"].flops_per_s
    assert cluster.devices[2].flops_per_s == 1e12
    path.write_text(FILE)
    with pytest.raises(ValueError, match=r"unknown device type 'mine': use h100-sxm, or a built-in type: a100-40gb"):
        Cluster.load(path)


def test_devices_of_known_rates_are_recognised() -> None:
    assert known(312e12, 1.94e12) is None  # an A100 over PCIe has less bandwidth
    assert known(312e12, 2.0e12) is KNOWN["a100-80gb"]
    assert known(989e12, 3.35e12) is known(989e12, 3.35e12, "mine") is KNOWN["h100-sxm"]
    assert known(989e12, 3.35e12, "h800") is KNOWN["h800"]
    assert known(1e12, 1e11, "h800") is None
    assert all(0 < sheet.reached < 1 for sheet in KNOWN.values())


def test_the_bandwidth_to_the_host_is_known_or_given_or_that_of_pcie_4(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    node = "{type: %s, devices: 1, inner: {bytes_per_s: 1e9, latency_s: 0}, outer: {bytes_per_s: 1e9, latency_s: 0}}"
    types = MINE.replace("}}", ", host_bytes_per_s: 3e9}}") + "\n"
    path.write_text(types + f"nodes: [{node % 'mine'}, {node % 'h200'}, {node % 'a100-80gb'}]\n")
    cluster = Cluster.load(path)
    assert [device.host_bytes_per_s for device in cluster.devices] == [3e9, 50e9, 25e9]
    cluster.save(path)
    assert Cluster.load(path) == cluster

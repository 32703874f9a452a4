"""GPUs that cluster files name by name alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydragraph.spec.cluster import Cluster, Interconnect
from hydragraph.spec.known_devices import KNOWN, built_in, known

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


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("RTX 4090", "rtx-4090"),
        ("RTX4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("A100-80GB", "a100-80gb"),
        ("a100_80", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("H100", "h100-sxm"),
        ("A10G", "a10g"),
        ("a10", "a10"),
    ],
)
def test_a_built_in_type_may_be_written_as_people_write_it(written: str, name: str) -> None:
    assert built_in(written) is KNOWN[name]


@pytest.mark.parametrize("name", ["A100", "V100", "mine", "", "h", "h100-pciee"])
def test_a_name_of_several_types_or_of_none_is_unknown(name: str) -> None:
    assert built_in(name) is None


def test_a_machine_of_a_built_in_type_needs_only_its_name_and_number_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: [{type: H100, devices: 8}]")
    assert Cluster.load(path).nodes[0].inner == Interconnect(450e9, 5e-6)
    path.write_text(f"types: {{4090: }}\nnodes: [{{type: 4090, devices: 2, count: 2, outer: {LINK}}}]")
    cluster = Cluster.load(path)
    assert cluster.nodes[1].inner == Interconnect(25e9, 1e-5)
    assert cluster.types["4090"].flops_per_s == KNOWN["rtx-4090"].flops_per_s
    path.write_text("nodes: [{type: h100, devices: 8, count: 2}]")
    with pytest.raises(ValueError, match="missing field 'outer'"):
        Cluster.load(path)
    path.write_text("types: {A100: {}}\nnodes: [{type: A100, devices: 8}]")
    with pytest.raises(ValueError, match=r"types.A100: no built-in type has this name: .*or use a100-40gb, a100-80gb"):
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

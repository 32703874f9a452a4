"""Clusters from made-up reports and links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hydragraph.engine.discovery import DiscoveredCluster, cluster_of
from hydragraph.runtime.device_reports import DeviceReport, types_of
from hydragraph.runtime.link_measurement import MeasuredLinks
from hydragraph.spec.cluster import Cluster, Interconnect
from hydragraph.spec.known_devices import KNOWN, known

ONE = DeviceReport("n0", "host0", "a100", 40 * 10**9, 100.0, 1e12, 5e12, 1e12, 0, "", ())
SLOW = replace(ONE, products_per_s=40.0, flops_per_s=4e11)
INNER, OUTER = Interconnect(1e11, 1e-6), Interconnect(25e6, 1e-4)


def discovered(*reports: DeviceReport, cards: int = 1) -> DiscoveredCluster:
    nodes = len({report.node for report in reports})
    outer = (OUTER if nodes > 1 else None,) * nodes
    links = MeasuredLinks((INNER,) * nodes, outer, outer, (cards,) * nodes)
    types = types_of(reports)
    return DiscoveredCluster(reports, types, links, cluster_of(reports, types, links))


def other(report: DeviceReport) -> DeviceReport:
    return replace(report, node="n1", host="host1")


def test_nodes_have_their_links_and_cards(tmp_path: Path) -> None:
    found = discovered(ONE, ONE, other(SLOW), other(SLOW), cards=2)
    assert [found.cluster.type_of(rank) for rank in range(4)] == ["a100", "a100", "a100-40", "a100-40"]
    assert (found.cluster.link(0, 1), found.cluster.link(1, 2)) == (INNER, OUTER)
    assert [found.cluster.node(n).cards for n in (0, 1)] == [2, 2]
    assert found.links_text == ", 100 GB/s within nodes, 0.025 GB/s between nodes"
    found.cluster.save(tmp_path / "cluster.yaml")
    assert Cluster.load(tmp_path / "cluster.yaml") == found.cluster


def test_types_of_one_host_are_joined_as_its_ranks_are() -> None:
    found = discovered(ONE, ONE, SLOW)
    assert found.cluster.link(0, 1) == found.cluster.link(1, 2) == INNER
    assert [place.type for place in found.places] == ["a100", "a100", "a100-40"]
    assert found.links_text == ", 100 GB/s within it"


def test_ranks_that_alternate_between_types_are_listed_with_the_slowest_links(tmp_path: Path) -> None:
    found = discovered(ONE, SLOW, ONE, other(SLOW))
    assert [device.node for device in found.cluster.devices] == [0, 1, 0, 2]
    assert (found.cluster.link(0, 2), found.cluster.link(0, 3)) == (INNER, OUTER)
    found.cluster.save(tmp_path / "cluster.yaml")
    assert Cluster.load(tmp_path / "cluster.yaml") == found.cluster


def test_nodes_whose_links_are_measured_nearly_equal_have_equal_links() -> None:
    reports = tuple(replace(ONE, node=f"n{i // 2}", host=f"host{i // 2}") for i in range(8))
    outer = tuple(Interconnect(bandwidth, 1e-4) for bandwidth in (25e6, 24e6, 26e6, 5e6))
    inner = tuple(Interconnect(bandwidth, 1e-6) for bandwidth in (9e10, 1e11, 1e11, 1e11))
    cluster = cluster_of(reports, types_of(reports), MeasuredLinks(inner, outer, outer, (1,) * 4))
    assert [cluster.node(n).outer.bytes_per_s for n in range(4)] == [24e6, 24e6, 24e6, 5e6]
    assert {cluster.node(n).inner for n in range(4)} == {Interconnect(9e10, 1e-6)}


def test_a_gpu_has_its_datasheets_speed_only_if_it_nearly_reaches_it() -> None:
    sheet = KNOWN["h100-sxm"]
    reached = sheet.reached * sheet.flops_per_s
    h100 = replace(ONE, name="nvidia-h100-80gb-hbm3", half_flops_per_s=0.95 * reached)
    throttled = replace(h100, products_per_s=50.0, half_flops_per_s=0.5 * reached)
    types = discovered(h100, throttled, ONE).cluster.types
    healthy, slow, unknown = (types[name] for name in (h100.name, f"{h100.name}-50", "a100"))
    assert (healthy.flops_per_s, healthy.efficiency) == (sheet.flops_per_s, None)
    assert known(healthy.flops_per_s, healthy.memory_bytes_per_s) is sheet
    assert healthy.memory_bytes == ONE.memory_bytes, "what the rank may use"
    assert (slow.flops_per_s, slow.efficiency) == (throttled.half_flops_per_s, 1.0)
    assert (unknown.flops_per_s, unknown.efficiency) == (ONE.half_flops_per_s, 1.0)


def test_a_cpu_has_its_measured_speed() -> None:
    device = discovered(replace(ONE, half_flops_per_s=0.0)).cluster.devices[0]
    assert (device.flops_per_s, device.efficiency) == (ONE.flops_per_s, 1.0)

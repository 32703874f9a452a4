"""Discovery of devices, their types, and measured links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hydragraph.cluster.communicators import Groups
from hydragraph.runtime.device_reports import ALIKE, DeviceReport, report_devices, types_of
from hydragraph.runtime.link_measurement import MeasuredLinks, equalized, measure_links
from hydragraph.runtime.profile_measurement import DevicePlace
from hydragraph.spec.cluster import Cluster, Device, Interconnect, Node
from hydragraph.spec.known_devices import sheet_of


@dataclass(frozen=True)
class DiscoveredCluster:
    reports: tuple[DeviceReport, ...]
    types: tuple[str, ...]
    links: MeasuredLinks
    cluster: Cluster

    @property
    def places(self) -> tuple[DevicePlace, ...]:
        return tuple(DevicePlace(report.node, name) for report, name in zip(self.reports, self.types, strict=True))

    def divided(self, types: tuple[str, ...]) -> DiscoveredCluster:
        if types == self.types:
            return self
        return replace(self, types=types, cluster=cluster_of(self.reports, types, self.links))

    @property
    def links_text(self) -> str:
        parts = []
        for where, links in (("within", self.links.inner), ("between", self.links.outer)):
            measured = [link for link in links if link is not None]
            if measured:
                slowest = min(measured, key=lambda link: link.bytes_per_s)
                node = "nodes" if len(self.links.inner) > 1 else "it"
                parts.append(f"{slowest.bytes_per_s / 1e9:.3g} GB/s {where} {node}")
        return "".join(f", {part}" for part in parts)


def discover(groups: Groups, probe: Callable[[], float] | None = None) -> DiscoveredCluster:
    """Discover devices and links; all ranks call this.

    Args:
        probe: returns this device's matrix products per second.

    Raises:
        ValueError: hosts have different package versions.
    """
    reports = report_devices(groups, probe)
    types = types_of(reports)
    links = measure_links(groups, [report.node for report in reports])
    # Rounding may differ between ranks
    links = groups.gather(links)[0]
    return DiscoveredCluster(reports, types, links, cluster_of(reports, types, links))


def cluster_of(reports: Sequence[DeviceReport], types: Sequence[str], links: MeasuredLinks) -> Cluster:
    """Return a cluster with one node per device type and host.

    Unless ranks are numbered node by node, all nodes get the slowest links.
    """
    # hosts: node ids in rank order; host_of[rank]: index in `hosts`
    # places: (host, type) by rank; order: different places, which become the cluster's nodes
    hosts = list(dict.fromkeys(report.node for report in reports))
    host_of = [hosts.index(report.node) for report in reports]
    places = list(zip(host_of, types, strict=True))
    order = list(dict.fromkeys(places))
    devices = []
    for place, name in zip(places, types, strict=True):
        alike = [report for report, other in zip(reports, types, strict=True) if other == name]
        devices.append(_slowest(alike, order.index(place), name))
    # A host without a measured link gets its memory's bandwidth.
    inner: list[Interconnect] = []
    outer: list[Interconnect] = []
    for host, node in enumerate(hosts):
        local = Interconnect(min(report.memory_bytes_per_s for report in reports if report.node == node), 0.0)
        inner.append(links.inner[host] or local)
        # A single host has no network
        outer.append(links.outer[host] or inner[-1])
    inner = equalized(inner)
    outer = equalized(outer)
    numbers = [device.node for device in devices]
    # A `Cluster` with separate nodes numbers devices node by node.
    if numbers != sorted(numbers):
        within, between = (min(node_links, key=lambda link: link.bytes_per_s) for node_links in (inner, outer))
        return Cluster(tuple(devices), within, between)
    counts = Counter(places)
    nodes = []
    for place in order:
        host, name = place
        cards = counts[place] if len(hosts) == 1 else min(links.cards[host], counts[place])
        nodes.append(Node(name, counts[place], inner[host], outer[host], cards=cards))
    return Cluster(tuple(devices), None, None, tuple(nodes))


def _slowest(reports: Sequence[DeviceReport], node: int, name: str) -> Device:
    """Return a device of a type, with the least speed and memory of its reports."""
    flops, half, memory, bandwidth = (
        min(getattr(report, quantity) for report in reports)
        for quantity in ("flops_per_s", "half_flops_per_s", "memory_bytes", "memory_bytes_per_s")
    )
    sheet = sheet_of(reports[0].name.replace("-", " "))
    # A GPU that is nearly as fast as expected gets its datasheet's peak, so that the roofline predicts products of all
    # sizes. Other devices are assumed to reach their measured speed for all sizes.
    if sheet is not None and half >= ALIKE * sheet.reached * sheet.flops_per_s:
        host = sheet.host_bytes_per_s
        return Device(sheet.flops_per_s, memory, sheet.memory_bytes_per_s, node, name, host_bytes_per_s=host)
    return Device(half or flops, memory, bandwidth, node, name, efficiency=1.0)

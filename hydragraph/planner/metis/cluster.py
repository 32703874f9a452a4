"""A cluster's devices in Metis's terms."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hydragraph.spec import cluster as spec

_BANDWIDTH = 2**20 * 1000
_MEMORY = 2**30


@dataclass(frozen=True)
class MetisDeviceType:
    """A type of device.

    Attributes:
        bandwidth: inside a node, in 2^20 bytes per millisecond.
        memory_gb: in 2^30 bytes.
    """

    bandwidth: float
    memory_gb: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.memory_gb > 0):
            raise ValueError(f"bandwidth {self.bandwidth} and memory_gb {self.memory_gb}: both must be more than 0")


@dataclass(frozen=True)
class MetisCluster:
    """Nodes, each with devices of one type."""

    types: Mapping[str, MetisDeviceType]
    nodes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple((str(kind), int(devices)) for kind, devices in self.nodes))
        if not self.nodes:
            raise ValueError("the cluster has no nodes: give at least one")
        for kind, devices in self.nodes:
            if kind not in self.types:
                raise ValueError(f"a node is of unknown type {kind!r}: use one of {sorted(self.types)}")
            if devices < 1:
                raise ValueError(f"a node of type {kind!r} has {devices} devices: remove the node, or give it devices")

    @cached_property
    def counts(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for kind, devices in self.nodes:
            counts[kind] += devices
        return dict(counts)

    @property
    def devices(self) -> int:
        return sum(self.counts.values())

    @staticmethod
    def load(hosts: str | Path, types: str | Path) -> MetisCluster:
        """Read Metis's files: hosts as lines like `0.0.0.1 slots=4`, and types as JSON by address."""
        record = json.loads(Path(types).read_text(encoding="utf-8"))
        nodes = []
        for line in filter(str.strip, Path(hosts).read_text(encoding="utf-8").splitlines()):
            match = re.fullmatch(r"\s*(\S+)\s+slots=(\d+)\s*", line)
            if match is None:
                raise ValueError(f"{hosts}: {line!r} is not a host: write it like '0.0.0.1 slots=4'")
            if match[1] not in record:
                raise ValueError(f"{hosts} names {match[1]}, but {types} has no entry for this address: add one")
            nodes.append((record[match[1]]["instance_type"], int(match[2])))
        kinds = {e["instance_type"]: MetisDeviceType(e["intra_bandwidth"], e["memory"]) for e in record.values()}
        return MetisCluster(kinds, tuple(nodes))

    @staticmethod
    def of(cluster: spec.Cluster | MetisCluster) -> MetisCluster:
        """Convert a cluster, with each type's least bandwidth inside a node."""
        if isinstance(cluster, MetisCluster):
            return cluster
        types: dict[str, MetisDeviceType] = {}
        for rank, device in enumerate(cluster.devices):
            kind = cluster.type_of(rank)
            inner = cluster.node(device.node).inner.bytes_per_s / _BANDWIDTH
            least = min(inner, types[kind].bandwidth) if kind in types else inner
            types[kind] = MetisDeviceType(least, device.memory_bytes / _MEMORY)
        nodes = Counter((device.node, cluster.type_of(rank)) for rank, device in enumerate(cluster.devices))
        return MetisCluster(types, tuple((kind, devices) for (_, kind), devices in nodes.items()))


Cluster = MetisCluster
DeviceType = MetisDeviceType

"""The devices and links that a plan is priced on, as frozen data and YAML.

devices:
  - {flops_per_s: 9.89e14, memory_bytes: 80e9, memory_bytes_per_s: 3.35e12}
  - {flops_per_s: 3.12e14, memory_bytes: 40e9, memory_bytes_per_s: 1.55e12, node: 1}
within_node: {bytes_per_s: 450e9, latency_s: 5e-6}
between_nodes: {bytes_per_s: 50e9, latency_s: 10e-6}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from hydragraph.spec.record import flow_yaml, load_record, to_record


@dataclass(frozen=True)
class Link:
    """A way between two devices: sending n bytes takes latency_s + n / bytes_per_s seconds, in each direction.

    Attributes:
        bytes_per_s: more than 0.
        latency_s: 0 or more.
    """

    bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_s", float(_positive("bytes_per_s", self.bytes_per_s)))
        object.__setattr__(self, "latency_s", float(_number("latency_s", self.latency_s)))


@dataclass(frozen=True)
class Device:
    """One device, which is one rank.

    Attributes:
        flops_per_s: floating-point operations per second at the training's precision, a multiplication and an
            addition counting as two.
        memory_bytes: capacity in bytes; a whole number, which may be written 80e9.
        memory_bytes_per_s: bandwidth of that memory.
        node: the machine it is in; devices of one node are joined by the faster link.
    """

    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    node: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops_per_s", float(_positive("flops_per_s", self.flops_per_s)))
        object.__setattr__(self, "memory_bytes", _whole("memory_bytes", _positive("memory_bytes", self.memory_bytes)))
        object.__setattr__(self, "memory_bytes_per_s", float(_positive("memory_bytes_per_s", self.memory_bytes_per_s)))
        object.__setattr__(self, "node", _whole("node", _number("node", self.node)))


@dataclass(frozen=True)
class Cluster:
    """Devices, one per rank in rank order, and the two kinds of link between them."""

    devices: tuple[Device, ...]
    within_node: Link
    between_nodes: Link

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", tuple(self.devices))
        if not self.devices:
            raise ValueError("devices is empty: a cluster needs at least one device")
        for name, kind, values in (("devices", Device, self.devices), ("links", Link, self._links)):
            for value in values:
                if not isinstance(value, kind):
                    raise ValueError(f"{name} has {value!r}: use {kind.__name__}(...)")

    @property
    def _links(self) -> tuple[Link, Link]:
        return self.within_node, self.between_nodes

    @classmethod
    def homogeneous(
        cls,
        ranks: int,
        *,
        device: Device,
        within_node: Link,
        between_nodes: Link | None = None,
        ranks_per_node: int | None = None,
    ) -> Cluster:
        """Return `ranks` devices like `device`, filling nodes of `ranks_per_node` in order (None: one node for all).

        Raises:
            ValueError: when there are several nodes and `between_nodes` is not given.
        """
        per_node = ranks if ranks_per_node is None else ranks_per_node
        if ranks < 1 or per_node < 1:
            raise ValueError(f"ranks is {ranks}, ranks_per_node is {ranks_per_node}: both must be at least 1")
        if between_nodes is None and ranks > per_node:
            raise ValueError(f"{ranks} ranks at {per_node} per node are several nodes: give between_nodes a Link")
        devices = tuple(replace(device, node=rank // per_node) for rank in range(ranks))
        return cls(devices, within_node, between_nodes or within_node)

    def link(self, a: int, b: int) -> Link:
        """Return the link between two different devices, given by rank."""
        for rank in (a, b):
            if not 0 <= rank < len(self.devices):
                raise ValueError(f"device {rank} is unknown: the cluster has {len(self.devices)} devices (from 0)")
        if a == b:
            raise ValueError(f"device {a} has no link to itself: price a local copy by its memory_bytes_per_s")
        return self.within_node if self.devices[a].node == self.devices[b].node else self.between_nodes

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a YAML file; a ValueError names the file and the field."""
        return load_record(cls, path)

    def save(self, path: str | Path) -> None:
        """Write the YAML file that `load` reads back as an equal cluster; defaults are left out."""
        data = to_record(self)
        lines = ["devices:", *(f"  - {flow_yaml(device)}" for device in data.pop("devices"))]
        lines += [f"{name}: {flow_yaml(value)}" for name, value in data.items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _number(name: str, value: object) -> float:
    """Return a finite number of at least 0 as it is, an int for an int."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}: give a number of at least 0")
    return value


def _positive(name: str, value: object) -> float:
    if _number(name, value) == 0:
        raise ValueError(f"{name} is 0: give a number above 0")
    return _number(name, value)


def _whole(name: str, value: float) -> int:
    if value != int(value):
        raise ValueError(f"{name} is {value!r}: give a whole number")
    return int(value)

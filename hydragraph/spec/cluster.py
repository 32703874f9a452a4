"""Devices of a cluster, the links between them, and their YAML format.

types:
  h100: {flops_per_s: 9.89e14, memory_bytes: 80e9, memory_bytes_per_s: 3.35e12}
  l4: {flops_per_s: 1.2e14, memory_bytes: 24e9, memory_bytes_per_s: 3e11, host_bytes_per_s: 25e9}   # optional
  x86: {flops_per_s: 1e11, memory_bytes: 16e9, memory_bytes_per_s: 2e10, efficiency: 1}             # measured speed
nodes:                                  # ranks are numbered in this order
  - {type: h100, devices: 8, inner: {bytes_per_s: 450e9, latency_s: 5e-6}, outer: {bytes_per_s: 50e9, latency_s: 1e-5}}
  - {type: l4, devices: 4, count: 2, inner: {bytes_per_s: 16e9, latency_s: 1e-5},
     outer: {bytes_per_s: 3e9, latency_s: 2e-5, points: [[1e6, 1e9], [1e8, 3e9]]}}
pairs: [{types: [h100, l4], bytes_per_s: 2e9, latency_s: 3e-5}]     # optional

devices:                                # alternative: one entry per rank, and two links
  - {flops_per_s: 3.12e14, memory_bytes: 40e9, memory_bytes_per_s: 1.55e12, node: 1}
within_node: {bytes_per_s: 450e9, latency_s: 5e-6}
between_nodes: {bytes_per_s: 50e9, latency_s: 10e-6}
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from hydragraph.spec.known_devices import PCIE_4, Datasheet, built_in, similar
from hydragraph.spec.record import flow_yaml, from_record, load_yaml, to_record

MOST_DEVICES = 1 << 16
# Plausible range and unit of each field; values outside are assumed to have another unit.
_UNITS = {
    "flops_per_s": (1e7, math.inf, "FLOP/s, such as 989e12"),
    "memory_bytes": (1e5, math.inf, "bytes, such as 80e9"),
    "memory_bytes_per_s": (1e6, math.inf, "bytes per second, such as 3.35e12"),
    "bytes_per_s": (1e3, math.inf, "bytes per second, such as 12.5e9"),
    "latency_s": (-math.inf, 1, "seconds, such as 5e-6"),
}


@dataclass(frozen=True)
class Interconnect:
    """A link between two devices: in each direction, n bytes take latency_s + n / bytes_per_s seconds.

    Attributes:
        points: measured message sizes (bytes) and bandwidths (bytes/s), interpolated over the size's logarithm.
            `bytes_per_s` is then the total bandwidth of concurrent messages.
    """

    bytes_per_s: float
    latency_s: float
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        _set_positive(self, "bytes_per_s")
        object.__setattr__(self, "latency_s", float(_number("latency_s", self.latency_s)))
        object.__setattr__(self, "points", _points(self.points))

    def bandwidth(self, size: float) -> float:
        """Return the bandwidth for `size` bytes, in bytes/s."""
        if not self.points:
            return self.bytes_per_s
        sizes = [at for at, _ in self.points]
        i = bisect_left(sizes, size)
        # Smaller or larger than all measured messages.
        if i == 0 or i == len(sizes):
            return self.points[min(i, len(sizes) - 1)][1]
        low, slow = self.points[i - 1]
        high, fast = self.points[i]
        return slow + (fast - slow) * math.log(size / low) / math.log(high / low)

    def seconds(self, size: float) -> float:
        return self.latency_s + size / self.bandwidth(size)

    def handled(self, rate: float) -> Interconnect:
        return self if rate == 1 else replace(self, latency_s=rate * self.latency_s)

    def times(self, factor: float) -> Interconnect:
        points = tuple((size, speed * factor) for size, speed in self.points)
        return Interconnect(self.bytes_per_s * factor, self.latency_s, points)


def check_efficiency(value: object) -> None:
    """Raise ValueError unless `value` is a fraction of the peak FLOP/s."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"'efficiency' is {value!r}: give a fraction of the peak FLOP/s, above 0 and at most 1")


@dataclass(frozen=True)
class DeviceType:
    """A type of device.

    Attributes:
        flops_per_s: peak at training's precision; a multiply-add counts as two operations.
        host_bytes_per_s: bandwidth of copies to and from host memory; default: 16 lanes of PCIe 4.
        efficiency: fraction of `flops_per_s` that all operations reach, such as 1 for a measured speed; None: predicted
            by `cost.datasheet.Roofline`.
    """

    flops_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    host_bytes_per_s: float = field(default=PCIE_4, kw_only=True)
    efficiency: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _set_positive(self, "host_bytes_per_s", "flops_per_s", "memory_bytes", "memory_bytes_per_s")
        if self.efficiency is not None:
            check_efficiency(self.efficiency)
        object.__setattr__(self, "memory_bytes", _whole("memory_bytes", self.memory_bytes))

    def device(self, node: int, name: str) -> Device:
        return Device(**asdict(self), node=node, type=name)


@dataclass(frozen=True)
class Device(DeviceType):
    """A device, which runs one rank; `type` is its type's name in profiles, or "" if all devices are of one type."""

    node: int = 0
    type: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "node", _whole("node", _number("node", self.node)))
        if not isinstance(self.type, str):
            raise ValueError(f"'type' is {self.type!r}: give the name of a device type")


@dataclass(frozen=True)
class Node:
    """A machine with `devices` devices of one type.

    Attributes:
        inner: each device's link to the node's other devices.
        outer: each network card's link to other nodes.
        count: number of consecutive equal nodes.
        cards: number of network cards; neighboring devices may share one.
    """

    type: str
    devices: int
    inner: Interconnect
    outer: Interconnect
    count: int = 1
    cards: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.type, str | int | float):
            raise ValueError(f"'type' is {self.type!r}: give the name of a device type")
        # YAML reads 4090 as a number
        object.__setattr__(self, "type", str(self.type))
        for name in ("devices", "count", "cards"):
            object.__setattr__(self, name, _whole(name, _positive(name, getattr(self, name))))
        if self.cards > self.devices:
            raise ValueError(f"'cards' is {self.cards}, 'devices' is {self.devices}: use at most one card per device")
        for name in ("inner", "outer"):
            if not isinstance(getattr(self, name), Interconnect):
                raise ValueError(f"{name!r} is {getattr(self, name)!r}: use Interconnect(...)")


@dataclass(frozen=True)
class Pair:
    """A link between nodes of two device types, which replaces the slower of their `outer` links."""

    types: tuple[str, str]
    bytes_per_s: float
    latency_s: float
    points: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.types, (list, tuple)) or len(self.types) != 2:
            raise ValueError(f"'types' is {self.types!r}: name two types of devices")
        object.__setattr__(self, "types", (str(self.types[0]), str(self.types[1])))
        object.__setattr__(self, "points", self.link.points)

    @property
    def link(self) -> Interconnect:
        return Interconnect(self.bytes_per_s, self.latency_s, self.points)

    def times(self, factor: float) -> Pair:
        return Pair(self.types, **vars(self.link.times(factor)))


@dataclass(frozen=True)
class Cluster:
    """Devices, one per rank in rank order, and the links between them.

    Attributes:
        within_node: link between ranks of one node; None if `nodes` is set.
        between_nodes: link between ranks of different nodes; None if `nodes` is set.
        cards: index of each rank's network card in its node; if empty, devices share cards in rank order.
    """

    devices: tuple[Device, ...]
    within_node: Interconnect | None
    between_nodes: Interconnect | None
    nodes: tuple[Node, ...] = ()
    pairs: tuple[Pair, ...] = ()
    cards: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("devices", "nodes", "pairs", "cards"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.devices:
            raise ValueError("'devices' is empty: a cluster needs at least one device")
        links = () if self.nodes else (self.within_node, self.between_nodes)
        for name, kind, values in (("devices", Device, self.devices), ("links", Interconnect, links)):
            for value in values:
                if not isinstance(value, kind):
                    raise ValueError(f"{name!r} has {value!r}: use {kind.__name__}(...)")
        node = max(d.node for d in self.devices)
        if self.nodes and node >= len(self.nodes):
            raise ValueError(f"a device is in node {node}, but there are {len(self.nodes)} nodes, numbered from 0")
        for pair in self.pairs:
            for name in pair.types:
                if name not in self.types:
                    raise ValueError(f"pairs: unknown device type {name!r}: use {', '.join(sorted(self.types))}")
        links_per_pair = Counter(frozenset(pair.types) for pair in self.pairs)
        for pair in self.pairs:
            if links_per_pair[frozenset(pair.types)] > 1:
                a, b = pair.types
                raise ValueError(f"pairs: {a} and {b} have more than one link: give one link for both directions")

    @classmethod
    def of(cls, types: Mapping[str, DeviceType], nodes: tuple[Node, ...], pairs: tuple[Pair, ...] = ()) -> Cluster:
        """Return a cluster of nodes; ranks are numbered in the order of the nodes.

        Args:
            types: device types by name; those of `spec.known_devices`, such as "a100-80gb", need no entry.
        """
        total = sum(node.devices * node.count for node in nodes)
        if total > MOST_DEVICES:
            raise ValueError(f"nodes: {total:,} devices in all: list at most {MOST_DEVICES:,}")
        every = [replace(node, count=1) for node in nodes for _ in range(node.count)]
        sheets = {node.type: built_in(node.type) for node in nodes if node.type not in types}
        types = {**{name: type_of_sheet(sheet) for name, sheet in sheets.items() if sheet is not None}, **types}
        for i, node in enumerate(nodes):
            if node.type not in types:
                listed = ", ".join(sorted(types)) or "one that 'types' defines"
                raise ValueError(
                    f"nodes[{i}]: unknown device type {node.type!r}: use {listed}, or a built-in type: "
                    f"{', '.join(similar(node.type))}"
                )
        devices = [types[node.type].device(i, node.type) for i, node in enumerate(every) for _ in range(node.devices)]
        return cls(tuple(devices), None, None, tuple(every), tuple(pairs))

    @classmethod
    def homogeneous(
        cls,
        ranks: int,
        *,
        device: Device,
        within_node: Interconnect,
        between_nodes: Interconnect | None = None,
        ranks_per_node: int | None = None,
    ) -> Cluster:
        """Return a cluster of `ranks` copies of `device`, with `ranks_per_node` per node (None: one node)."""
        per_node = ranks if ranks_per_node is None else ranks_per_node
        if ranks < 1 or per_node < 1:
            raise ValueError(f"'ranks' is {ranks}, ranks_per_node is {ranks_per_node}: both must be at least 1")
        if between_nodes is None and ranks > per_node:
            raise ValueError(
                f"{ranks} ranks with {per_node} per node need several nodes: set between_nodes to an Interconnect"
            )
        devices = tuple(replace(device, node=rank // per_node) for rank in range(ranks))
        return cls(devices, within_node, between_nodes or within_node)

    @cached_property
    def types(self) -> Mapping[str, DeviceType]:
        names = [field.name for field in fields(DeviceType)]
        every = zip(self._names, self.devices, strict=True)
        return {type_: DeviceType(**{name: getattr(device, name) for name in names}) for type_, device in every}

    def type_of(self, rank: int) -> str:
        """Return the name of a rank's device type; types without a name are called "", "other 1", ..."""
        self._device(rank)
        return self._names[rank]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        # plain: device without its node -> name of its type.
        plain: dict[Device, str] = {}
        for device in self.devices:
            if not device.type:
                kind = replace(device, node=0)
                plain.setdefault(kind, f"other {len(plain)}" if plain else "")
        return tuple(d.type or plain[replace(d, node=0)] for d in self.devices)

    def node_of(self, rank: int) -> int:
        return self._device(rank).node

    @cached_property
    def ranks_by_node(self) -> Mapping[int, list[int]]:
        nodes: dict[int, list[int]] = {}
        for rank, device in enumerate(self.devices):
            nodes.setdefault(device.node, []).append(rank)
        return nodes

    def node(self, number: int) -> Node:
        """Return node `number`; without `nodes`, every device has its own network card."""
        return self._machines[number]

    def card_of(self, rank: int) -> int:
        return self._cards[rank]

    def link(self, a: int, b: int) -> Interconnect:
        if a == b:
            raise ValueError(f"device {a} has no link to itself: compute a local copy's time from memory_bytes_per_s")
        return self.link_between(self.node_of(a), self.node_of(b))

    def link_between(self, one: int, other: int) -> Interconnect:
        """Return the link between two nodes, or within one."""
        a = self._machines[one]
        b = self._machines[other]
        if one == other:
            return a.inner
        pair = self._pairs.get((a.type, b.type))
        if pair is not None:
            return pair
        return a.outer if a.outer == b.outer else _slower(a.outer, b.outer)

    def resources(self, a: int, b: int) -> tuple[tuple[str, int, int], ...]:
        """Return the ports and network cards that a message from rank `a` to rank `b` uses.

        Each entry is ("port out" | "port in", rank, 0) or ("card out" | "card in", node, card).
        """
        ports = (("port out", a, 0), ("port in", b, 0))
        one = self.node_of(a)
        other = self.node_of(b)
        if one == other:
            return ports
        return (*ports, ("card out", one, self.card_of(a)), ("card in", other, self.card_of(b)))

    def scaled(self, what: str, factor: float) -> Cluster:
        """Return the cluster with `factor` times the bandwidth of "within_node" or "between_nodes" links."""
        if what not in ("within_node", "between_nodes"):
            raise ValueError(f"{what!r} is not a link: scale 'within_node' or 'between_nodes'")
        within = what == "within_node"
        if self.nodes:
            name = "inner" if within else "outer"
            nodes = tuple(replace(n, **{name: getattr(n, name).times(factor)}) for n in self.nodes)
            pairs = self.pairs if within else tuple(pair.times(factor) for pair in self.pairs)
            return replace(self, nodes=nodes, pairs=pairs)
        return replace(self, **{what: getattr(self, what).times(factor)})

    def of_ranks(self, ranks: Sequence[int]) -> Cluster:
        devices = tuple(replace(self._device(rank), type=self.type_of(rank)) for rank in ranks)
        types = {device.type for device in devices}
        pairs = tuple(pair for pair in self.pairs if types.issuperset(pair.types))
        return replace(self, devices=devices, pairs=pairs, cards=tuple(self._cards[rank] for rank in ranks))

    def reordered(self, ranks: Sequence[int]) -> Cluster:
        same = self.of_ranks(ranks)
        # Nodes are numbered by their first ranks; nodes without ranks follow.
        used = dict.fromkeys(device.node for device in same.devices)
        numbers = {old: new for new, old in enumerate(dict.fromkeys([*used, *range(len(self.nodes))]))}
        devices = tuple(replace(device, node=numbers[device.node]) for device in same.devices)
        nodes = tuple(self.nodes[old] for old in numbers) if self.nodes else ()
        # cards: node -> old number of a card -> new number, by its first rank.
        cards: dict[int, dict[int, int]] = {device.node: {} for device in devices}
        for device, card in zip(devices, same.cards, strict=True):
            cards[device.node].setdefault(card, len(cards[device.node]))
        numbered = tuple(cards[device.node][card] for device, card in zip(devices, same.cards, strict=True))
        return replace(same, devices=devices, nodes=nodes, cards=numbered)

    def _occupied(self) -> list[Node]:
        numbers = [device.node for device in self.devices]
        if numbers != sorted(numbers):
            raise ValueError(
                f"ranks are on nodes {numbers}, but a file lists ranks node by node: reorder the ranks by node "
                "before saving"
            )
        sizes = Counter(numbers)
        cards = Counter(node for node, _ in set(zip(numbers, self._cards, strict=True)))
        return [replace(self.nodes[i], devices=n, cards=cards[i]) for i, n in sizes.items()]

    def _device(self, rank: int) -> Device:
        if not 0 <= rank < len(self.devices):
            raise ValueError(f"device {rank} is unknown: the cluster has {len(self.devices)} devices, numbered from 0")
        return self.devices[rank]

    @cached_property
    def _machines(self) -> Mapping[int, Node]:
        if self.nodes:
            return dict(enumerate(self.nodes))
        assert self.within_node is not None, "a cluster without `nodes` must set `within_node`"
        assert self.between_nodes is not None, "a cluster without `nodes` must set `between_nodes`"
        sizes = Counter(d.node for d in self.devices)
        types = {d.node: d.type for d in self.devices}
        return {
            number: Node(types[number], size, self.within_node, self.between_nodes, cards=size)
            for number, size in sorted(sizes.items())
        }

    @cached_property
    def _cards(self) -> tuple[int, ...]:
        if self.cards:
            return self.cards
        seen: Counter[int] = Counter()
        cards = []
        for device in self.devices:
            node = self._machines[device.node]
            # With 8 devices and 4 cards, devices 0 and 1 share card 0, 2 and 3 card 1.
            cards.append(seen[device.node] * node.cards // node.devices)
            seen[device.node] += 1
        return tuple(cards)

    @cached_property
    def _pairs(self) -> Mapping[tuple[str, str], Interconnect]:
        links = {}
        for pair in self.pairs:
            links[pair.types] = links[pair.types[::-1]] = pair.link
        return links

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster from a YAML file."""
        data = load_yaml(path)
        try:
            if data is None:
                raise ValueError("the file is empty: list nodes, as in docs/mixed_gpus.md")
            names = set(data) if isinstance(data, dict) else set()
            # One entry per rank, or one per node.
            if names & {"devices", "within_node", "between_nodes"} and not names & {"nodes", "types", "pairs"}:
                flat = from_record(_Devices, data, name="cluster")
                _check_units("", data)
                return cls(flat.devices, flat.within_node, flat.between_nodes)
            nodes = from_record(_Nodes, _with_built_in(data) if isinstance(data, dict) else data, name="cluster")
            _check_units("", data)
            return cls.of(nodes.types, nodes.nodes, nodes.pairs)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write a YAML file for `load`, without default values."""
        if self.nodes:
            grouped = [(node, len(list(same))) for node, same in groupby(self._occupied())]
            nodes = [to_record(replace(node, count=count)) for node, count in grouped]
            lines = ["types:", *(f"  {name}: {flow_yaml(to_record(kind))}" for name, kind in self.types.items())]
            lines += ["nodes:", *(f"  - {flow_yaml(node)}" for node in nodes)]
            lines += ["pairs:", *(f"  - {flow_yaml(to_record(p))}" for p in self.pairs)] if self.pairs else []
        else:
            lines = ["devices:", *(f"  - {flow_yaml(to_record(device))}" for device in self.devices)]
            links = (("within_node", self.within_node), ("between_nodes", self.between_nodes))
            lines += [f"{name}: {flow_yaml(to_record(value))}" for name, value in links]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Devices:
    devices: tuple[Device, ...]
    within_node: Interconnect
    between_nodes: Interconnect


@dataclass(frozen=True)
class _Nodes:
    nodes: tuple[Node, ...]
    types: Mapping[str, DeviceType] = field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()


def _check_units(where: str, data: object) -> None:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in items:
        if name in _UNITS and isinstance(value, int | float):
            least, most, unit = _UNITS[name]
            if not least <= value <= most:
                raise ValueError(f"{where}: {name!r} is {value:g}: give {unit}")
        place = f"{where}[{name}]" if isinstance(data, list) else f"{where}.{name}" if where else str(name)
        _check_units(place, value)


def _with_built_in(data: dict[str, Any]) -> dict[str, Any]:
    """Return a cluster file's content with built-in types' links, and without these types' empty entries."""
    types = data.get("types")
    nodes = data.get("nodes")
    if isinstance(types, dict):
        for name in map(str, types):
            if not types.get(name, True) and built_in(name) is None:
                listed = ", ".join(similar(name))
                raise ValueError(f"types.{name}: no built-in type has this name: give its datasheet, or use {listed}")
        data = {**data, "types": {name: sheet for name, sheet in types.items() if sheet}}
    if isinstance(nodes, list):
        data = {**data, "nodes": [_with_link(node, data) if isinstance(node, dict) else node for node in nodes]}
    return data


def _with_link(node: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    name = str(node.get("type"))
    sheet = built_in(name)
    if sheet is None or name in map(str, data.get("types") or ()):
        return node
    # Its link to other nodes is never used
    only = len(data["nodes"]) == 1 and node.get("count", 1) == 1
    return {"inner": sheet.peers, **({"outer": sheet.peers} if only else {}), **node}


def type_of_sheet(sheet: Datasheet) -> DeviceType:
    rates = (sheet.flops_per_s, int(sheet.memory_bytes), sheet.memory_bytes_per_s)
    return DeviceType(*rates, host_bytes_per_s=sheet.host_bytes_per_s)


def _slower(one: Interconnect, other: Interconnect) -> Interconnect:
    # The slower link may depend on the message's size.
    sizes = sorted({size for link in (one, other) for size, _ in link.points})
    points = tuple((size, min(one.bandwidth(size), other.bandwidth(size))) for size in sizes)
    return Interconnect(min(one.bytes_per_s, other.bytes_per_s), max(one.latency_s, other.latency_s), points)


def _points(rows: object) -> tuple[tuple[float, float], ...]:
    if not isinstance(rows, (list, tuple)):
        raise ValueError(f"'points' is {rows!r}: give a list of [bytes, bytes_per_s]")
    points = []
    for point in rows:
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise ValueError(f"'points' has {point!r}: give [bytes, bytes_per_s]")
        points.append((float(_positive("bytes", point[0])), float(_positive("bytes_per_s", point[1]))))
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise ValueError("points: sort them by bytes, and give each size once")
    return tuple(points)


def _set_positive(record: object, *names: str) -> None:
    for name in names:
        object.__setattr__(record, name, float(_positive(name, getattr(record, name))))


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name!r} is {value!r}: give a finite number of at least 0")
    return value


def _positive(name: str, value: object) -> float:
    with suppress(ValueError):
        if number := _number(name, value):
            return number
    wanted = _UNITS[name][-1] if isinstance(value, str) and name in _UNITS else "a finite number above 0"
    raise ValueError(f"{name!r} is {value!r}: give {wanted}")


def _whole(name: str, value: float) -> int:
    if value != int(value):
        raise ValueError(f"{name!r} is {value!r}: give a whole number")
    return int(value)

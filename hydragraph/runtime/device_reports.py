"""Reports of every rank's device, and their grouping into types.

From fastest to slowest, a rank joins a type if its speed is at least `ALIKE` times the type's median, or else begins a
new type.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

from hydragraph.cluster.communicators import Groups
from hydragraph.private.process_groups import nvlink_peers
from hydragraph.runtime.profile_measurement import device_memories, type_name
from hydragraph.runtime.speed_probe import MOST_S, SIZES, SpeedProbe
from hydragraph.runtime.streams import synchronise
from hydragraph.version import __version__

# Minimum ratio of a rank's speed to its type's median, and of memory sizes within a type
ALIKE = 0.8
# Maximum probes per device if equally named devices differ in speed; the fastest counts
PROBES = 6
COPIED = 1 << 25
# Rows and columns of the 16-bit products
LARGE = 4096
# Packages whose versions must be equal on all hosts
PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class DeviceReport:
    """Report of one rank's device.

    Attributes:
        node: node whose ranks share memory and network cards.
        memory_bytes: the rank's share of its device's or host's memory.
        products_per_s: small matrix products per second.
        flops_per_s: speed of these products, in fp32.
        half_flops_per_s: speed of large 16-bit matrix products on a GPU; 0 on a CPU.
        threads: compute threads on a CPU; 0 on a GPU.
        details: a GPU's compute capability, PCI address and peers, or a CPU's cores; NUMA nodes; network interfaces.
    """

    node: str
    host: str
    name: str
    memory_bytes: int
    products_per_s: float
    flops_per_s: float
    half_flops_per_s: float
    memory_bytes_per_s: float
    threads: int
    details: str
    versions: tuple[tuple[str, str], ...]


def report_devices(groups: Groups, probe: Callable[[], float] | None = None) -> tuple[DeviceReport, ...]:
    """Measure all ranks' devices simultaneously; return the reports on all ranks.

    Args:
        probe: returns products per second.

    Raises:
        ValueError: hosts have different package versions.
    """
    device = groups.world.device
    memory = device_memories(groups)[groups.world.rank]
    measured = probe or (lambda: _products_per_s(device))
    per_s = measured()
    size = SIZES[device.type]
    own = DeviceReport(
        groups.world.node or platform.node(),
        platform.node(),
        type_name(device),
        int(memory),
        per_s,
        2 * size**3 * per_s,
        0.0 if device.type == "cpu" else product_flops_per_s(device, _half_type(), LARGE),
        _bandwidth(device),
        torch.get_num_threads() if device.type == "cpu" else 0,
        _details(device),
        _versions(),
    )
    reports = tuple(groups.gather(own))
    check_versions(reports)
    for _ in range(PROBES - 1):
        # All ranks have the same reports, and leave the loop together.
        if not _differ_in_speed(reports):
            break
        per_s = max(own.products_per_s, measured())
        own = replace(own, products_per_s=per_s, flops_per_s=2 * size**3 * per_s)
        reports = tuple(groups.gather(own))
    return reports


def check_versions(reports: Sequence[DeviceReport]) -> None:
    first = reports[0]
    for rank, other in enumerate(reports):
        for (name, here), (_, there) in zip(first.versions, other.versions, strict=True):
            if here != there:
                raise ValueError(
                    f"rank {rank} on {other.host} has {name} {there}, and rank 0 on {first.host} has {name} {here}: "
                    "install the same version on every host"
                )


def types_of(reports: Sequence[DeviceReport]) -> tuple[str, ...]:
    types: dict[str, list[DeviceReport]] = {}
    names = [""] * len(reports)
    for rank in sorted(range(len(reports)), key=lambda rank: (-reports[rank].products_per_s, rank)):
        own = reports[rank]
        name = next((name for name, members in types.items() if _belongs(own, members)), None)
        if name is None:
            name = _new_name(own, types)
        types.setdefault(name, []).append(own)
        names[rank] = name
    return tuple(names)


def _differ_in_speed(reports: Sequence[DeviceReport]) -> bool:
    # Speeds differ if equal speeds would result in fewer types.
    equally_fast = [replace(report, products_per_s=1.0) for report in reports]
    return len(set(types_of(reports))) > len(set(types_of(equally_fast)))


def _belongs(own: DeviceReport, members: Sequence[DeviceReport]) -> bool:
    leader = members[0]
    memories = sorted((own.memory_bytes, leader.memory_bytes))
    if own.name != leader.name or memories[0] < ALIKE * memories[1]:
        return False
    return own.products_per_s >= ALIKE * median(member.products_per_s for member in members)


def _new_name(own: DeviceReport, types: Mapping[str, Sequence[DeviceReport]]) -> str:
    fastest = next((members[0] for members in types.values() if members[0].name == own.name), None)
    if fastest is None:
        return own.name
    name = f"{own.name}-{round(100 * own.products_per_s / fastest.products_per_s)}"
    # Equally fast devices that differ in memory
    if name in types:
        name = f"{name}-{own.memory_bytes / 1e9:.0f}gb"
    return name


def _products_per_s(device: torch.device) -> float:
    probe = SpeedProbe(device)
    probe.most_s = MOST_S
    return max(probe().per_s, 1e-9)


def _half_type() -> torch.dtype:
    # Before Ampere, GPUs only emulate bfloat16
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def product_flops_per_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the speed of products of two [size, size] matrices, in FLOP/s."""
    factor = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(factor)
    # The first run warms up; the last is measured.
    for _ in range(2):
        count = 0
        began = ended = time.perf_counter()
        while ended < began + MOST_S / 2:
            torch.mm(factor, factor, out=out)
            synchronise(device)
            count += 1
            ended = time.perf_counter()
    return 2 * size**3 * count / (ended - began)


def _bandwidth(device: torch.device) -> float:
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        synchronise(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        best = min(best, time.perf_counter() - began)
    return 2 * COPIED / best


def _details(device: torch.device) -> str:
    if device.type == "cpu":
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        parts = [f"{len(cores)} core{'s' * (len(cores) != 1)}"]
        near = {
            int(node.name[4:])
            for core in cores
            for node in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")
        }
    else:
        parts, near = _gpu_details(device)
    parts += [f"NUMA node {', '.join(map(str, sorted(near)))}"] * bool(near)
    networks = [name for _, name in socket.if_nameindex() if name != "lo" and _is_up(name)]
    return ", ".join([*parts, *[f"network {' and '.join(networks)}"] * bool(networks)])


def _gpu_details(device: torch.device) -> tuple[list[str], set[int]]:
    properties = torch.cuda.get_device_properties(device)
    parts = [f"compute capability {properties.major}.{properties.minor}"]
    near: set[int] = set()
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in address:
        pci = f"{address[0]:04x}:{address[1]:02x}:{address[2]:02x}"
        parts.append(f"PCI {pci}")
        with suppress(OSError, ValueError):
            near = {int(Path(f"/sys/bus/pci/devices/{pci}.0/numa_node").read_text())} - {-1}  # -1: unknown
    own = device.index or 0
    by_nvlink = nvlink_peers(own)
    peers = [n for n in range(torch.cuda.device_count()) if n != own and torch.cuda.can_device_access_peer(own, n)]
    for link, linked in (("NVLink", by_nvlink), ("PCIe", set(peers) - by_nvlink)):
        parts += [f"{link} to GPU {' and '.join(map(str, sorted(linked)))}"] * bool(linked)
    return parts, near


def _is_up(interface: str) -> bool:
    try:
        return Path(f"/sys/class/net/{interface}/operstate").read_text().strip() != "down"
    except OSError:
        return False


def _versions() -> tuple[tuple[str, str], ...]:
    versions = [("hydragraph", __version__), ("Python", platform.python_version())]
    for name in PACKAGES:
        try:
            versions.append((name, version(name)))
        except PackageNotFoundError:
            versions.append((name, "none"))
    return tuple(versions)

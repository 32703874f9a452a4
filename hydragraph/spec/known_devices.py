"""Datasheets of GPUs that a cluster file can name; peaks are dense, for 16-bit products summed in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

UNKNOWN = 0.65  # assumed fraction of the peak in large products
# Bytes per second between a GPU and pinned host memory over 16 lanes, about 80 % of the published rate.
PCIE_3, PCIE_4, PCIE_5 = 12e9, 25e9, 50e9
_NEAR = 0.03  # relative difference of peak and bandwidth to a known device


@dataclass(frozen=True)
class Datasheet:
    """A GPU; see `spec.cluster.Device`.

    Attributes:
        reached: fraction of the peak reached by large products in training: from published runs for A100, H100, V100
            and T4 (`benchmarks/published_runs.py`), for others assumed from similar GPUs.
    """

    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    reached: float = UNKNOWN
    host_bytes_per_s: float = PCIE_4


KNOWN: Mapping[str, Datasheet] = MappingProxyType(
    {
        "a100-40gb": Datasheet(312e12, 40e9, 1.555e12, 0.75),
        "a100-80gb": Datasheet(312e12, 80e9, 2.039e12, 0.75),
        "h100-sxm": Datasheet(989e12, 80e9, 3.35e12, 0.64, host_bytes_per_s=PCIE_5),
        "h100-pcie": Datasheet(756e12, 80e9, 2.0e12, 0.64, host_bytes_per_s=PCIE_5),
        "h200": Datasheet(989e12, 141e9, 4.8e12, 0.64, host_bytes_per_s=PCIE_5),
        "b200": Datasheet(2250e12, 180e9, 8.0e12, 0.6, host_bytes_per_s=PCIE_5),
        "v100-16gb": Datasheet(125e12, 16e9, 0.9e12, 0.5, host_bytes_per_s=PCIE_3),
        "v100-32gb": Datasheet(125e12, 32e9, 0.9e12, 0.5, host_bytes_per_s=PCIE_3),
        "t4": Datasheet(65e12, 16e9, 0.32e12, 0.25, host_bytes_per_s=PCIE_3),
        "l4": Datasheet(121e12, 24e9, 0.3e12, 0.4),
        "a10g": Datasheet(70e12, 24e9, 0.6e12),
        "rtx-3090": Datasheet(71e12, 24e9, 0.936e12, 0.75),
        "rtx-4090": Datasheet(165e12, 24e9, 1.008e12, 0.75),
        "mi300x": Datasheet(1307e12, 192e9, 5.3e12, 0.45, host_bytes_per_s=PCIE_5),
    }
)


def reached(flops_per_s: float, memory_bytes_per_s: float) -> float:
    """Return the fraction of its peak that a device of this peak and bandwidth reaches."""
    for sheet in KNOWN.values():
        pairs = ((flops_per_s, sheet.flops_per_s), (memory_bytes_per_s, sheet.memory_bytes_per_s))
        if all(abs(device_speed - sheet_speed) <= _NEAR * sheet_speed for device_speed, sheet_speed in pairs):
            return sheet.reached
    return UNKNOWN

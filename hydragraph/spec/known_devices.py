"""Datasheets of GPUs. `flops_per_s` is the peak of dense 16-bit matrix products with fp32 accumulation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

UNKNOWN = 0.65
# Bytes/s to pinned host memory over 16 PCIe lanes: about 80 % of the published rate.
PCIE_3, PCIE_4, PCIE_5 = 12e9, 25e9, 50e9
# Drivers' words for slower or faster variants
_VARIANTS = {"laptop", "ti", "d", "super", "mig"}
# Maximum relative difference from a datasheet's rates
_NEAR = 0.03


@dataclass(frozen=True)
class Datasheet:
    """Datasheet of a GPU, with fields as in `spec.cluster.DeviceType`.

    Attributes:
        reached: fraction of the peak that large matrix products reach; for A100 and H100, fitted to published runs
            (`benchmarks/published_runs.py --fit`), else assumed.
        published: the GPU's name in published runs, or "".
        nvlink_bytes_per_s: bandwidth to the machine's other GPUs, per direction; 0: PCIe.
        bfloat16: whether the peak also holds for bfloat16.
    """

    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    reached: float = UNKNOWN
    host_bytes_per_s: float = PCIE_4
    published: str = ""
    bfloat16: bool = True
    nvlink_bytes_per_s: float = 0

    @property
    def peers(self) -> dict[str, float]:
        """Default link to the machine's other GPUs, as in a cluster file."""
        if self.nvlink_bytes_per_s:
            return {"bytes_per_s": self.nvlink_bytes_per_s, "latency_s": 5e-6}
        return {"bytes_per_s": self.host_bytes_per_s, "latency_s": 1e-5}


KNOWN: Mapping[str, Datasheet] = MappingProxyType(
    {
        "a100-40gb": Datasheet(312e12, 40e9, 1.555e12, 0.795, published="A100", nvlink_bytes_per_s=300e9),
        "a100-80gb": Datasheet(312e12, 80e9, 2.039e12, 0.795, published="A100", nvlink_bytes_per_s=300e9),
        "h100-sxm": Datasheet(
            989e12, 80e9, 3.35e12, 0.66, host_bytes_per_s=PCIE_5, published="H100", nvlink_bytes_per_s=450e9
        ),
        # With HBM2e; published runs limited it to 500 W.
        "h100-96gb": Datasheet(
            989e12, 96e9, 2.4e12, 0.5, host_bytes_per_s=PCIE_5, published="H100", nvlink_bytes_per_s=450e9
        ),
        "h100-pcie": Datasheet(756e12, 80e9, 2.0e12, 0.615, host_bytes_per_s=PCIE_5),
        "h100-nvl": Datasheet(835e12, 94e9, 3.9e12, 0.615, host_bytes_per_s=PCIE_5),
        "h800": Datasheet(989e12, 80e9, 3.35e12, 0.66, host_bytes_per_s=PCIE_5, nvlink_bytes_per_s=200e9),
        "h20": Datasheet(148e12, 96e9, 4.0e12, host_bytes_per_s=PCIE_5, nvlink_bytes_per_s=450e9),
        "h200": Datasheet(989e12, 141e9, 4.8e12, 0.66, host_bytes_per_s=PCIE_5, nvlink_bytes_per_s=450e9),
        "b200": Datasheet(2250e12, 180e9, 8.0e12, 0.6, host_bytes_per_s=PCIE_5, nvlink_bytes_per_s=900e9),
        "a800": Datasheet(312e12, 80e9, 2.039e12, 0.795, nvlink_bytes_per_s=200e9),
        "v100-16gb": Datasheet(
            125e12,
            16e9,
            0.9e12,
            0.5,
            host_bytes_per_s=PCIE_3,
            published="V100",
            bfloat16=False,
            nvlink_bytes_per_s=150e9,
        ),
        "v100-32gb": Datasheet(
            125e12, 32e9, 0.9e12, 0.5, host_bytes_per_s=PCIE_3, bfloat16=False, nvlink_bytes_per_s=150e9
        ),
        "t4": Datasheet(65e12, 16e9, 0.32e12, 0.25, host_bytes_per_s=PCIE_3, published="T4", bfloat16=False),
        "l4": Datasheet(121e12, 24e9, 0.3e12, 0.4),
        "l40s": Datasheet(362e12, 48e9, 0.864e12),
        "a10": Datasheet(125e12, 24e9, 0.6e12),
        "a10g": Datasheet(70e12, 24e9, 0.6e12),
        "rtx-3090": Datasheet(71e12, 24e9, 0.936e12, 0.795),
        "rtx-4090": Datasheet(165e12, 24e9, 1.008e12, 0.795),
        "rtx-5090": Datasheet(209e12, 32e9, 1.792e12, 0.795, host_bytes_per_s=PCIE_5),
        "rtx-a6000": Datasheet(155e12, 48e9, 0.768e12, 0.795),
        "mi300x": Datasheet(1307e12, 192e9, 5.3e12, 0.45, host_bytes_per_s=PCIE_5, nvlink_bytes_per_s=448e9),
    }
)


def built_in(name: str) -> Datasheet | None:
    """Return the datasheet for a type's name in a cluster file, such as "a100-80gb", or None."""
    plain = _plain(name)
    for known_name, sheet in KNOWN.items():
        if plain in (_plain(known_name), _plain(known_name).removeprefix("rtx")):
            return sheet
    return None


def similar(name: str) -> list[str]:
    """Return the built-in names that begin with `name`, or else the most similar name, or else all names."""
    beginning = [known_name for known_name in KNOWN if _plain(known_name).startswith(_plain(name))]
    return beginning or get_close_matches(name.lower(), KNOWN, n=1) or [*KNOWN]


def _plain(name: str) -> str:
    """Return a name without vendor, form factor, unit and separators: "a10080" for "NVIDIA A100-SXM4-80GB"."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "".join(re.sub(r"^(\d\d)gb?$|^(nvidia|amd|geforce|tesla|instinct|sxm\d?)$", r"\1", word) for word in words)


def known(flops_per_s: float, memory_bytes_per_s: float, name: str = "") -> Datasheet | None:
    for _, sheet in sorted(KNOWN.items(), key=lambda item: item[0] != name):
        pairs = ((flops_per_s, sheet.flops_per_s), (memory_bytes_per_s, sheet.memory_bytes_per_s))
        if all(abs(device_speed - sheet_speed) <= _NEAR * sheet_speed for device_speed, sheet_speed in pairs):
            return sheet
    return None


def sheet_of(gpu: str) -> Datasheet | None:
    """Return the datasheet for a driver's GPU name, such as "NVIDIA H100 80GB HBM3", or None."""
    words = set(gpu.lower().replace("-", " ").split())
    if words & _VARIANTS:
        return None
    # Drivers do not write "SXM" as a word. The name that matches most words is the most specific.
    matches = [name for name in KNOWN if set(name.split("-")) - {"sxm"} <= words]
    return KNOWN[max(matches, key=lambda name: len(words & set(name.split("-"))))] if matches else None

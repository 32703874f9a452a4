"""Maximum speeds of a device, measured by a large copy and a large matrix product."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from hydragraph.commands.bench.interleaved_timing import timed
from hydragraph.train.model_flops import peak_flops_per_s

ROUNDS = 7


@dataclass(frozen=True)
class DeviceCeilings:
    """Measured copy bandwidth (bytes read and written), and measured and datasheet FLOP/s."""

    device: str
    dtype: torch.dtype
    copy_bytes_per_s: float
    product_flops_per_s: float
    nominal_flops_per_s: float | None = None

    @property
    def peak_flops_per_s(self) -> float:
        return self.nominal_flops_per_s or self.product_flops_per_s

    @property
    def peak_name(self) -> str:
        kind = "nominal" if self.nominal_flops_per_s else "measured"
        return f"{kind} {self.peak_flops_per_s / 1e12:.3g} TFLOP/s"

    def __str__(self) -> str:
        copy = self.copy_bytes_per_s / 1e9
        product = self.product_flops_per_s / 1e12
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.device}: copy {copy:.4g} GB/s, {name} products {product:.4g} TFLOP/s"


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> DeviceCeilings:
    cuda = device.type == "cuda"
    source = torch.zeros((1024 if cuda else 64) * 2**18, device=device)
    target = torch.empty_like(source)
    copy_s = min(timed(lambda _: target.copy_(source), i, device) for i in range(ROUNDS))
    n = 8192 if cuda else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product_s = min(timed(lambda _: a @ b, i, device) for i in range(ROUNDS))
    name = device_name(device)
    peak = peak_flops_per_s(name, dtype)
    return DeviceCeilings(name, dtype, 2 * source.nbytes / copy_s, 2 * n**3 / product_s, peak)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def choose_device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device {name}: PyTorch finds no such device on this machine: omit --device, or use cpu")
    return device

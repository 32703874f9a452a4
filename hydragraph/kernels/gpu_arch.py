"""GPU architectures and their published specifications."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuArch:
    """Architecture of an NVIDIA GPU.

    Attributes:
        gpu: the driver's name for the GPU with these specifications.
        shared_bytes: maximum shared memory per thread block.
        flops_per_s: speed of dense bf16 matrix products.
        link_bytes_per_s: bandwidth of NVLink in each direction.
    """

    name: str
    gpu: str
    multiprocessors: int
    shared_bytes: int
    memory_bytes: int
    cache_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0) for sm_90."""
        return divmod(int(self.name.removeprefix("sm_")), 10)


# From datasheets; shared memory from the CUDA C programming guide, "Compute Capabilities".
ARCHS = {
    arch.name: arch
    for arch in (
        GpuArch("sm_80", "NVIDIA A100-SXM4-80GB", 108, 166_912, 80 << 30, 40 << 20, 3.12e14, 2.039e12, 3e11),
        GpuArch("sm_90", "NVIDIA H100 80GB HBM3", 132, 232_448, 80 << 30, 50 << 20, 9.89e14, 3.35e12, 4.5e11),
        GpuArch("sm_100", "NVIDIA B200", 148, 232_448, 180 << 30, 126 << 20, 2.25e15, 8e12, 9e11),
    )
}


def arch_of(name: str) -> GpuArch:
    if name not in ARCHS:
        raise ValueError(f"unknown --arch {name}: use {', '.join(ARCHS)}")
    return ARCHS[name]

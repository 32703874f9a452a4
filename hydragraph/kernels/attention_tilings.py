"""Tile sizes of the Triton attention kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

LARGEST = 256  # head size


@dataclass(frozen=True)
class Tiling:
    """Query rows and key columns of a tile of scores.

    Attributes:
        stages: number of tiles that are loaded before they are used.
        exact: whether to use one fp32 product, not three tf32 products, which need more registers.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None
    exact: bool = False

    def options(self) -> dict[str, object]:
        common: dict[str, object] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return common if self.registers is None else common | {"maxnreg": self.registers}


@dataclass(frozen=True)
class Tilings:
    """Tilings of the forward kernel and both backward kernels."""

    forward: Tiling
    queries: Tiling
    keys: Tiling


# For each padded head size, tilings that neither spill registers nor exceed shared memory: 227 KB on Hopper and
# Blackwell data center GPUs, at least 99 KB on others since Ampere.
_HOPPER = {
    64: Tilings(Tiling(128, 128, 8, 3), Tiling(128, 64, 8, 2), Tiling(64, 128, 8, 2)),
    128: Tilings(Tiling(128, 128, 8, 2), Tiling(128, 64, 8, 2), Tiling(32, 128, 8, 2)),
    256: Tilings(Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2), Tiling(32, 32, 8, 1)),
}
_ANY = {
    64: Tilings(Tiling(128, 64, 8, 2), Tiling(64, 32, 4, 2), Tiling(32, 64, 8, 1)),
    128: Tilings(Tiling(128, 32, 8, 2), Tiling(64, 32, 8, 2), Tiling(32, 64, 8, 2)),
    256: Tilings(Tiling(64, 32, 8, 1), Tiling(32, 32, 8, 1), Tiling(32, 32, 8, 1)),
}
_ANY_FP32 = {
    128: Tilings(Tiling(32, 32, 8, 1), Tiling(32, 16, 8, 1), Tiling(16, 16, 4, 1)),
    256: Tilings(*3 * (Tiling(16, 16, 8, 1, registers=255, exact=True),)),
}
# Windows and caps need more registers.
_ANY_FP32_LIMITED = {
    128: Tilings(Tiling(32, 32, 8, 1), Tiling(16, 16, 4, 1), Tiling(16, 16, 8, 1)),
    256: _ANY_FP32[256],
}
INTERPRETED = Tilings(Tiling(32, 32, 4, 1), Tiling(32, 16, 4, 1), Tiling(16, 32, 4, 1))


def tilings(dtype: torch.dtype, capability: tuple[int, int], plain: bool) -> Mapping[int, Tilings]:
    """Return the tilings of each padded head size; `plain` means without window and cap."""
    if dtype == torch.float32:
        return _ANY_FP32 if plain else _ANY_FP32_LIMITED
    return _HOPPER if plain and (9, 0) <= capability < (12, 0) else _ANY


def padded(size: int, dtype: torch.dtype) -> int:
    return max(128 if dtype == torch.float32 else 64, 1 << (size - 1).bit_length())

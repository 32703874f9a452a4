"""How the Triton attention kernels are cut into tiles, by head size, element type and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

LARGEST = 256  # head size


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut: query rows and key columns of a tile of scores, warps, and stages of the load pipeline.

    Attributes:
        rows: of queries in a tile.
        columns: of keys in a tile.
        warps: that compute a tile together.
        stages: tiles of keys and values that are loaded ahead of their use.
        registers: of a thread at most; None: as many as the assembler finds best, which may spill a few.
        exact: of fp32, whether products are fp32's own and not three of tf32, which are faster and take more registers.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None
    exact: bool = False

    def options(self) -> dict[str, object]:
        """Return the launch options."""
        common: dict[str, object] = {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}
        return common if self.registers is None else common | {"maxnreg": self.registers}


@dataclass(frozen=True)
class Tilings:
    """The tilings of the three kernels for one head size."""

    forward: Tiling
    queries: Tiling
    keys: Tiling


# Padded head size -> tilings that neither spill registers nor exceed the shared memory of a multiprocessor: 227 KB on
# Hopper and Blackwell data centre GPUs; 99 KB is what every GPU from Ampere on has. Each was compiled to find out.
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
INTERPRETED = Tilings(Tiling(32, 32, 4, 1), Tiling(32, 16, 4, 1), Tiling(16, 32, 4, 1))  # small: tests are


def tilings(dtype: torch.dtype, capability: tuple[int, int]) -> Mapping[int, Tilings]:
    """Return padded head size -> tilings for one element type on GPUs of one compute capability."""
    if dtype == torch.float32:
        return _ANY_FP32
    return _HOPPER if (9, 0) <= capability < (12, 0) else _ANY


def padded(size: int, dtype: torch.dtype) -> int:
    """Return the head size that a tile has: the next for which there is a tiling, a power of two."""
    return max(128 if dtype == torch.float32 else 64, 1 << (size - 1).bit_length())

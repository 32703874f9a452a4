"""FLOPs of a step and peak FLOP/s of GPUs, for MFU (PaLM, 2022, appendix B)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from hydragraph.cost.datasheet import operations
from hydragraph.cost.reach import Reach
from hydragraph.ir.program import Program

# Dense bf16 FLOP/s from NVIDIA's datasheets. The first entry whose words are all in the GPU's name is used.
_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250e12),
    (("H200",), 989e12),
    (("H100", "PCIe"), 756e12),
    (("H100", "NVL"), 835e12),
    (("H100",), 989e12),
    (("H800",), 989e12),
    (("A100",), 312e12),
    (("A800",), 312e12),
    (("L40S",), 362e12),
    (("L4",), 121e12),
    (("A10",), 125e12),
)


def peak_flops_per_s(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU by its `torch.cuda` name; None if unknown, or if `dtype` is not bfloat16."""
    words = name.replace("-", " ").split()
    if dtype is not torch.bfloat16:
        return None
    return next((peak for entry, peak in _PEAKS if all(word in words for word in entry)), None)


def step_flops(program: Program, lengths: Sequence[int]) -> float:
    """Return the FLOPs of a step without recomputation; a backward pass counts as two forward passes."""
    blocks = [operations(program, block, 1) for block in program.blocks]
    linear = sum(block.linear for block in blocks)
    attention = Counter[Reach]()
    for block in blocks:
        attention.update(block.attention)  # type: ignore[arg-type]
    pairs = sum(per_pair * sum(map(reach.pairs, lengths)) for reach, per_pair in attention.items())
    return 3 * float(pairs + linear * sum(lengths))

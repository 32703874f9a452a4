"""FLOPs of a step and peak FLOP/s of GPUs, for MFU (PaLM, 2022, appendix B)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from hydragraph.cost.datasheet import operations
from hydragraph.cost.reach import Reach
from hydragraph.ir.program import Program
from hydragraph.spec.known_devices import sheet_of


def peak_flops_per_s(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of a GPU by its `torch.cuda` name; None if unknown, or if `dtype` is not bfloat16."""
    sheet = sheet_of(name)
    return sheet.flops_per_s if sheet is not None and sheet.bfloat16 and dtype is torch.bfloat16 else None


def step_flops(program: Program, lengths: Sequence[int]) -> float:
    """Return the FLOPs of a step without recomputation; a backward pass counts as two forward passes."""
    blocks = [operations(program, block, 1) for block in program.blocks]
    linear = sum(block.linear for block in blocks)
    attention = Counter[Reach]()
    for block in blocks:
        attention.update(block.attention)  # type: ignore[arg-type]
    pairs = sum(per_pair * sum(map(reach.pairs, lengths)) for reach, per_pair in attention.items())
    return 3 * float(pairs + linear * sum(lengths))

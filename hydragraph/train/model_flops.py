"""FLOPs of a step and peak FLOP/s of GPUs, for model FLOPs utilization (MFU; PaLM, 2022, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from hydragraph.cost.datasheet import linear, operations
from hydragraph.ir.program import Program
from hydragraph.spec.known_devices import sheet_of


def peak_flops_per_s(name: str, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak bfloat16 FLOP/s by its `torch.cuda` name; None if unknown, or if `dtype` is not bfloat16."""
    sheet = sheet_of(name)
    return sheet.flops_per_s if sheet is not None and sheet.bfloat16 and dtype is torch.bfloat16 else None


def step_flops(program: Program, lengths: Sequence[int], scored: bool = False) -> float:
    """Return the FLOPs of a step, without recomputation and gradients of frozen weights.

    A backward pass counts as two forward passes.

    Args:
        scored: whether answers are scored by another forward pass.
    """
    pairs = cache(lambda reach: sum(map(reach.pairs, lengths)))
    flops = 0.0
    # Blocks before the first trainable weight have no backward pass
    times = 1
    for block in program.blocks:
        work = operations(program, block, 1)
        times = 3 if work.parameters > work.frozen else times
        per_token = (times + scored) * linear(work.products)
        per_token -= linear(work.frozen_products) if times > 1 else 0.0
        attention = sum(per_pair * pairs(reach) for reach, per_pair in work.attention.items())
        flops += per_token * sum(lengths) + (times + scored) * attention
    return flops

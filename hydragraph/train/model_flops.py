"""FLOPs of a step and peak FLOP/s of GPUs, for model FLOPs utilization (MFU; PaLM, 2022, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from hydragraph.cost.datasheet import linear, operations
from hydragraph.ir.program import Program
from hydragraph.spec.known_devices import sheet_of


def peak_flops_per_s(name: str, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak bfloat16 FLOP/s; None if unknown or for other dtypes."""
    sheet = sheet_of(name)
    return sheet.flops_per_s if sheet is not None and sheet.bfloat16 and dtype is torch.bfloat16 else None


def step_flops(program: Program, lengths: Sequence[int], scored: bool = False) -> float:
    """Return a step's FLOPs, without recomputation and gradients of frozen weights.

    Args:
        scored: whether another forward pass scores answers.
    """
    pairs = cache(lambda reach: sum(map(reach.pairs, lengths)))
    flops = 0.0
    # No backward pass before the first trainable weight
    times = 1
    for block in program.blocks:
        work = operations(program, block, 1)
        times = 3 if work.parameters > work.frozen else times
        per_token = (times + scored) * linear(work.products)
        per_token -= linear(work.frozen_products) if times > 1 else 0.0
        attention = sum(per_pair * pairs(reach) for reach, per_pair in work.attention.items())
        flops += per_token * sum(lengths) + (times + scored) * attention
    return flops

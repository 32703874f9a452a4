"""Operations of a step, and what GPUs reach at most: what MFU (PaLM, 2022, appendix B) is worked out from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydragraph.cost.datasheet import operations
from hydragraph.ir.program import Program

# NVIDIA's datasheets: dense bf16 FLOP/s of tensor cores. A GPU's name has all words of its entry; the first one counts.
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
    """Return what a GPU reaches at most, by its datasheet; None where that is not known here.

    Args:
        name: as `torch.cuda.get_device_name` gives it, such as "NVIDIA A100-SXM4-80GB".
        dtype: that it computes in; peaks are known of bfloat16.
    """
    words = name.replace("-", " ").split()
    if dtype is not torch.bfloat16:
        return None
    return next((peak for entry, peak in _PEAKS if all(word in words for word in entry)), None)


def step_flops(program: Program, lengths: Sequence[int]) -> float:
    """Return the operations of one step's forwards and backwards, without what is recomputed.

    Backward takes twice as many as forward: it computes the gradients of both operands of a product.

    Args:
        program: of the model.
        lengths: tokens of every sequence.
    """
    blocks = [operations(program, block, 1)[:2] for block in program.blocks]
    squared, linear = (sum(parts) for parts in zip(*blocks, strict=True))
    return 3 * (squared * sum(n * n for n in lengths) + linear * sum(lengths))

"""Weights to compare with: none of them zero or all alike, so that every gradient says something.

A fresh model's weights would hide much: a matrix that starts at zero (LoRA's B, a layer scale) hides what stands behind
it. The noise is one vector of prime length, laid end to end from a place that the parameter's name chooses: it costs
as much as copying, where drawing billions of random numbers takes a minute.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from hydragraph.check.wide import widened

_LENGTH = 131_071  # a prime, so that rows of a matrix are no multiples of one another
_NOISE = 0.3  # of a parameter's own deviation
_LEAST = 0.05  # of what deviation a new matrix has, or of 1 for vectors
_VECTOR = 0.1  # deviation of a new vector around 1: most are the weights of norms


def drawn(value: Tensor, name: str, seed: int, wide: torch.dtype, copied: bool) -> Tensor:
    """Return a tensor to compute with instead of a parameter, on the CPU.

    Args:
        value: the parameter; if it is on the meta device, only its shape counts.
        name: chooses the numbers, as `seed` does.
        wide: the dtype of the result, if the parameter is floating.
        copied: start from its values; otherwise from new ones.
    """
    fan = value.shape[-1] if value.dim() > 1 else 1
    if value.is_meta or not copied:
        kind = wide if value.is_floating_point() else value.dtype
        made = torch.zeros(value.shape, dtype=kind)  # memory that is not touched until noise is added
        scale = _VECTOR if value.dim() < 2 else 1 / math.sqrt(fan)
        if value.dim() < 2:
            made += 1
    else:
        made = widened(value, wide)
        spread = float(made.std(correction=0)) if made.is_floating_point() and made.numel() else 0.0
        scale = max(_NOISE * spread, _LEAST / math.sqrt(fan))
    if made.is_floating_point():
        _add_noise(made, name, seed, scale)
    return made


def _add_noise(made: Tensor, name: str, seed: int, scale: float) -> None:
    """Add numbers of the given deviation to a contiguous tensor, in place."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_LENGTH, generator=generator, dtype=torch.float32).to(made.dtype) * scale
    start = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) % _LENGTH
    noise, flat = noise.roll(start), made.view(-1)
    whole = len(flat) // _LENGTH * _LENGTH
    flat[:whole].view(-1, _LENGTH).add_(noise)
    flat[whole:].add_(noise[: len(flat) - whole])

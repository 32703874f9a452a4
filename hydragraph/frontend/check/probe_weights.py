"""Random weights for the numeric check, never zero or all equal, so that every gradient reveals errors.

Every tensor repeats one noise vector, from an offset that depends on the parameter's name.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hydragraph.frontend.check import scratch_pages

# A prime number of noise values: all rows of a matrix get different noise
_LENGTH = 131_071
_NOISE = 0.3  # ratio of the noise's standard deviation to the parameter's standard deviation
# Minimum standard deviation of the noise; for matrices, as a fraction of a new matrix's.
_LEAST = 0.05
# Standard deviation of new vectors, whose mean is 1
_VECTOR = 0.1
# New matrices of at least this many elements share memory
_SHARED = 1 << 22


@dataclass(frozen=True)
class DrawnWeights:
    """Random weights in the dtype `wide`; large matrices share memory and must not be modified."""

    seed: int
    wide: torch.dtype
    copied: bool
    _shared: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def drawn(self, value: Tensor, name: str) -> Tensor:
        kind = self.wide if value.is_floating_point() else value.dtype
        new = value.is_meta or not self.copied
        if new and kind.is_floating_point and value.dim() > 1 and value.numel() >= _SHARED:
            return self._part(value, name)
        weights = scratch_pages.zeros(value.shape, kind)
        if new:
            scale = _VECTOR if value.dim() < 2 else 1 / math.sqrt(value.shape[-1])
            if value.dim() < 2:
                weights += 1
        else:
            weights.copy_(value.detach())
            spread = float(weights.std(correction=0)) if kind.is_floating_point and weights.numel() else 0.0
            scale = max(_NOISE * spread, _LEAST / math.sqrt(value.shape[-1] if value.dim() > 1 else 1))
        if kind.is_floating_point:
            _add_noise(weights.view(-1), _start(name), self.seed, scale)
        return weights

    def _part(self, value: Tensor, name: str) -> Tensor:
        # Widths around 16**e share noise with the deviation 4**-e: 1/64 = 1/sqrt(4096) for 16**3.
        exponent = round(math.log(value.shape[-1], 16))
        start = _start(name)
        end = start + value.numel()
        if end > len(self._shared.get(exponent, ())):
            self._shared[exponent] = scratch_pages.zeros(torch.Size([_LENGTH + value.numel()]), self.wide)
            _add_noise(self._shared[exponent], 0, self.seed, 0.25**exponent)
        return self._shared[exponent][start:end].view(value.shape)


def _start(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) % _LENGTH


def _add_noise(flat: Tensor, start: int, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_LENGTH, generator=generator, dtype=torch.float32).to(flat.dtype).mul(scale).roll(start)
    whole = len(flat) // _LENGTH * _LENGTH
    flat[:whole].view(-1, _LENGTH).add_(noise)
    flat[whole:].add_(noise[: len(flat) - whole])

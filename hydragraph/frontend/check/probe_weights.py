"""Weights to compare with: none of them zero or all alike, so that every gradient says something.

A fresh model's weights would hide much: a matrix that starts at zero (LoRA's B, a layer scale) hides what stands behind
it. The noise is one vector of prime length, laid end to end from a place that the parameter's name chooses: it costs
as much as copying, where drawing billions of random numbers takes a minute.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hydragraph.frontend.check import scratch_pages

# A prime, so that no two rows of a matrix hold the same part of the noise.
_LENGTH = 131_071
# The noise, as a part of a parameter's own deviation;
_NOISE = 0.3
# and at least this part of what deviation a new matrix has, or of 1 for vectors.
_LEAST = 0.05
# The deviation of a new vector around 1: most are the weights of norms.
_VECTOR = 0.1


# From so many elements on, matrices that are new lie in memory that they share.
_SHARED = 1 << 22


@dataclass(frozen=True)
class DrawnWeights:
    """Weights of one model, or of one block.

    Large new matrices lie in shared memory, each from another place on: no two are alike, and none may be written to.

    Attributes:
        seed: chooses the numbers, as each parameter's name does.
        wide: the dtype of the weights, if the parameter is floating.
        copied: start from the parameters' values; otherwise from new ones.
    """

    seed: int
    wide: torch.dtype
    copied: bool
    _shared: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def drawn(self, value: Tensor, name: str) -> Tensor:
        """Return a tensor to compute with instead of a parameter, on the CPU.

        Args:
            value: the parameter; if it is on the meta device, only its shape counts.
            name: of the parameter.
        """
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
        """Return a part of the shared memory whose deviation is about that of a new matrix, within a factor of 2."""
        # One noise for each of the deviations 1, 1/4, 1/16, ...
        exponent = round(math.log(value.shape[-1], 16))
        start = _start(name)
        size = value.numel()
        noise = self._shared.get(exponent)
        if noise is None or len(noise) < start + size:
            noise = scratch_pages.zeros(torch.Size([_LENGTH + size]), self.wide)
            _add_noise(noise, 0, self.seed, 0.25**exponent)
            self._shared[exponent] = noise
        return noise[start : start + size].view(value.shape)


def _start(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest()) % _LENGTH


def _add_noise(flat: Tensor, start: int, seed: int, scale: float) -> None:
    """Add numbers of the given deviation to a flat tensor, in place."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(_LENGTH, generator=generator, dtype=torch.float32).to(flat.dtype) * scale
    noise = noise.roll(start)
    whole = len(flat) // _LENGTH * _LENGTH
    flat[:whole].view(-1, _LENGTH).add_(noise)
    flat[whole:].add_(noise[: len(flat) - whole])

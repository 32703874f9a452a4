"""16-bit copies of master weights, written by the optimizer's kernel for the next pull."""

from __future__ import annotations

import torch
from torch import Tensor

from hydragraph.kernels.adamw import AdamW
from hydragraph.private.hooks_and_overrides import version_of
from hydragraph.runtime.home_state import HomeState


class RoundedWeights:
    """Trained shards in the compute dtype; frozen weights have no copy."""

    def __init__(self, home: HomeState, dtype: torch.dtype) -> None:
        self._home = home
        self._copies = {name: torch.empty_like(home.weights[name], dtype=dtype) for name in home.gradients}
        self._versions: dict[str, int] = {}

    def of(self, bucket: str) -> Tensor:
        """Return a frozen bucket's weights, or a trained bucket's copy, rounded again if weights have changed."""
        weights = self._home.weights[bucket]
        if bucket not in self._copies:
            return weights
        if self._versions.get(bucket) != version_of(weights):
            self._copies[bucket].copy_(weights)
            self._versions[bucket] = version_of(weights)
        return self._copies[bucket]

    def by_parameter(self) -> dict[Tensor, Tensor]:
        """Return each parameter's part of the copies."""
        kept = {name: piece for name, piece in self._home.pieces.items() if piece.bucket in self._copies}
        return {self._home.parameters[name]: piece.of(self._copies) for name, piece in kept.items()}


def rounded(home: HomeState, dtype: torch.dtype, optimizer: torch.optim.Optimizer | None) -> RoundedWeights | None:
    if not isinstance(optimizer, AdamW) or dtype not in (torch.bfloat16, torch.float16):
        return None
    kept = RoundedWeights(home, dtype)
    optimizer.copy_to(kept.by_parameter())
    return kept

"""Saved views of streamed weights, stored as sizes and strides because the stage pulls the weights again.

A real view would keep the pulled buffer alive, or show other data after the buffer is reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightView:
    """View of a bucket's pulled weights; `at` is the view's offset in elements."""

    bucket: str
    size: torch.Size
    stride: tuple[int, ...]
    at: int


def let_go(saved: Sequence[Any], weights: Mapping[str, Tensor]) -> list[Any]:
    """Return saved values with views of weights (bucket -> 1-D tensor) replaced by `WeightView`s."""
    storages = {flat.untyped_storage().data_ptr(): name for name, flat in weights.items() if flat.numel()}

    def replaced(value: Any) -> Any:
        name = storages.get(value.untyped_storage().data_ptr()) if isinstance(value, Tensor) else None
        if name is None:
            return value
        return WeightView(name, value.size(), value.stride(), value.storage_offset() - weights[name].storage_offset())

    return [replaced(value) for value in saved]


def restored(saved: Sequence[Any], weights: Mapping[str, Tensor]) -> list[Any]:
    def view(value: Any) -> Any:
        if not isinstance(value, WeightView):
            return value
        flat = weights[value.bucket]
        return flat.as_strided(value.size, value.stride, flat.storage_offset() + value.at)

    return [view(value) for value in saved]

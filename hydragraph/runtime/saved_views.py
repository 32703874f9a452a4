"""Views of freed data (streamed weights, offloaded storages), stored as sizes and strides.

Real views would keep buffers alive, or show other data in reused buffers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SavedView:
    """View of the 1-D tensor `key` at an offset in elements."""

    key: Hashable
    size: torch.Size
    stride: tuple[int, ...]
    at: int


def let_go(saved: Sequence[Any], weights: Mapping[str, Tensor]) -> list[Any]:
    """Replace views of weights (1-D tensors by bucket) by `SavedView`s."""
    storages = {flat.untyped_storage().data_ptr(): name for name, flat in weights.items() if flat.numel()}

    def replaced(value: Any) -> Any:
        name = storages.get(value.untyped_storage().data_ptr()) if isinstance(value, Tensor) else None
        if name is None:
            return value
        return SavedView(name, value.size(), value.stride(), value.storage_offset() - weights[name].storage_offset())

    return [replaced(value) for value in saved]


def restored(saved: Sequence[Any], tensors: Mapping[Any, Tensor]) -> list[Any]:
    """Replace `SavedView`s by real views of `tensors`."""

    def view(value: Any) -> Any:
        if not isinstance(value, SavedView) or value.key not in tensors:
            return value
        flat = tensors[value.key]
        return flat.as_strided(value.size, value.stride, flat.storage_offset() + value.at)

    return [view(value) for value in saved]

"""Views of freed data (streamed weights, offloaded storages), stored as sizes and strides.

A real view would keep the data's buffer alive, or show other data after the buffer is reused.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SavedView:
    """View of a 1-D tensor.

    Attributes:
        key: identifier of the tensor.
        at: offset in elements.
    """

    key: Hashable
    size: torch.Size
    stride: tuple[int, ...]
    at: int


def let_go(saved: Sequence[Any], weights: Mapping[str, Tensor]) -> list[Any]:
    """Return saved values in which `SavedView`s replace views of weights (1-D tensors by bucket)."""
    storages = {flat.untyped_storage().data_ptr(): name for name, flat in weights.items() if flat.numel()}

    def replaced(value: Any) -> Any:
        name = storages.get(value.untyped_storage().data_ptr()) if isinstance(value, Tensor) else None
        if name is None:
            return value
        return SavedView(name, value.size(), value.stride(), value.storage_offset() - weights[name].storage_offset())

    return [replaced(value) for value in saved]


def restored(saved: Sequence[Any], tensors: Mapping[Any, Tensor]) -> list[Any]:
    """Return saved values in which real views of `tensors` replace `SavedView`s."""

    def view(value: Any) -> Any:
        if not isinstance(value, SavedView) or value.key not in tensors:
            return value
        flat = tensors[value.key]
        return flat.as_strided(value.size, value.stride, flat.storage_offset() + value.at)

    return [view(value) for value in saved]

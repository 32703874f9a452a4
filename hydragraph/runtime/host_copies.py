"""Copies of saved tensors in host memory, one per storage.

Fetched tensors keep sizes, strides and bytes, so offloading does not change results.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydragraph.passes.offload import moves
from hydragraph.runtime.saved_views import SavedView, restored
from hydragraph.runtime.streams import DeviceStreams, Mark

# Address and dtype
Key = tuple[int, torch.dtype]


@dataclass(frozen=True)
class HostCopy:
    """Saved values, with views of the 1-D host `storages` for copied tensors."""

    saved: tuple[Any, ...]
    storages: Mapping[Key, Tensor]

    def fetch(self, onto: Mapping[Key, Tensor]) -> list[Any]:
        """Copy the storages to `onto` on the current stream; return saved values that view `onto`."""
        for key, there in self.storages.items():
            onto[key].copy_(there, non_blocking=True)
        return restored(self.saved, onto)

    def room(self, device: torch.device) -> dict[Key, Tensor]:
        return {key: torch.empty_like(there, device=device) for key, there in self.storages.items()}


@dataclass(frozen=True, eq=False)
class CopiedTensors:
    """Tensors that another stream copies; a call makes the current stream wait and returns them."""

    streams: DeviceStreams
    mark: Mark
    tensors: Sequence[Any]

    def __call__(self) -> Sequence[Any]:
        self.streams.wait(self.mark)
        return self.tensors


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copy_to_host(saved: Sequence[Any], staying: Container[int]) -> HostCopy:
    """Copy saved tensors on the current stream, except small ones and storages in `staying`."""
    storages: dict[Key, Tensor] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor) or storage_address(value) in staying:
            return value
        size = value.untyped_storage().nbytes()
        if not moves(size) or size % value.element_size():
            return value
        # Tensors of one storage share a copy, restored with their strides.
        key = (storage_address(value), value.dtype)
        if key not in storages:
            whole = value.as_strided((size // value.element_size(),), (1,), 0)
            # Pinned if the tensor is on a GPU.
            storages[key] = whole.to("cpu", non_blocking=True, copy=True)
        return SavedView(key, value.size(), value.stride(), int(value.storage_offset()))

    return HostCopy(tuple(moved(value) for value in saved), storages)

"""Planners that tell torch.distributed.checkpoint (DCP) which boxes (rectangular parts) of tensors this rank owns."""

from __future__ import annotations

import io
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hydragraph.runtime.shard_boxes import OwnedBoxes


class ShardedSave(DefaultSavePlanner):
    """Writes the boxes of `OwnedBoxes` values."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, value in self.state_dict.items() for item in _write_items(name, value)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        value: OwnedBoxes | bytes = self.state_dict[write_item.index.fqn]
        if isinstance(value, bytes):
            return io.BytesIO(value)
        assert write_item.index.offset is not None
        return value.boxes[write_item.index.offset].contiguous()


class ShardedLoad(LoadPlanner):
    """Fills the boxes of `OwnedBoxes` values from stored tensors."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._contents: dict[str, OwnedBoxes | bytes] = state_dict
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, value in self._contents.items():
            if isinstance(value, bytes):
                nothing = torch.Size((0,))
                index = MetadataIndex(name)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
            else:
                stored = cast(TensorStorageMetadata, self._stored[name])
                items += create_read_items_for_chunk_list(name, stored, _chunks(value))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self._contents[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        value = self._contents[read_item.dest_index.fqn]
        offset = read_item.dest_index.offset
        assert isinstance(value, OwnedBoxes)
        assert offset is not None
        tensor = value.boxes[offset]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing."""


def _write_items(name: str, value: OwnedBoxes | bytes) -> list[WriteItem]:
    if isinstance(value, bytes):
        return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)]
    properties = TensorProperties(dtype=value.dtype)
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, value.shape),
        )
        for chunk in _chunks(value)
    ]


def _chunks(value: OwnedBoxes) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(offsets, tensor.size()) for offsets, tensor in value.boxes.items()]

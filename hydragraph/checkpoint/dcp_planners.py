"""Planners that tell torch.distributed.checkpoint (DCP) which boxes (rectangular parts) of tensors this rank owns."""

from __future__ import annotations

import io
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
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
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from hydragraph.runtime.shard_boxes import OwnedBoxes


class ShardedSave(DefaultSavePlanner):
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


class ShardedLoad(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, bytes):
                nothing = torch.Size((0,))
                index = MetadataIndex(name)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
            else:
                stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[name])
                items += create_read_items_for_chunk_list(name, stored, _chunks(value))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        boxes: OwnedBoxes = self.state_dict[index.fqn]
        return boxes.boxes[index.offset]


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

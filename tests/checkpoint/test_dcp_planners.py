"""Boxes go through DCP's files: written cut in one way and read cut in another, every element is the tensor's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hydragraph.checkpoint.dcp_planners import ShardedLoad, ShardedSave
from hydragraph.runtime.shard_boxes import OwnedBoxes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def cut(tensor: Tensor, rows: int, columns: int) -> OwnedBoxes:
    """Cut a matrix into boxes of so many rows and columns."""
    boxes = {
        torch.Size([i * rows, j * columns]): box
        for i, band in enumerate(tensor.split(rows))
        for j, box in enumerate(band.split(columns, dim=1))
    }
    return OwnedBoxes(tensor.shape, tensor.dtype, boxes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (5, 1)), ((5, 7), (1, 1)), ((1, 2), (5, 7)), ((3, 7), (2, 7))])
def test_any_cut_reads_what_any_other_wrote(
    saved: tuple[int, int], loaded: tuple[int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = torch.arange(35).view(5, 7).to(dtype)
    writer = dcp.FileSystemWriter(tmp_path)
    dcp.save({"t": cut(tensor, *saved), "entry": b"bytes"}, storage_writer=writer, planner=ShardedSave(), no_dist=True)
    room = torch.zeros_like(tensor)
    contents: dict[str, OwnedBoxes | bytes] = {"t": cut(room, *loaded), "entry": b""}
    dcp.load(contents, storage_reader=dcp.FileSystemReader(tmp_path), planner=ShardedLoad(), no_dist=True)
    assert torch.equal(room, tensor)
    assert contents["entry"] == b"bytes"


def test_a_rank_without_a_box_reads_nothing(tmp_path: Path) -> None:
    tensor = torch.ones(2, 2)
    dcp.save(
        {"t": cut(tensor, 1, 1)}, storage_writer=dcp.FileSystemWriter(tmp_path), planner=ShardedSave(), no_dist=True
    )
    nothing = OwnedBoxes(tensor.shape, tensor.dtype, {})
    dcp.load({"t": nothing}, storage_reader=dcp.FileSystemReader(tmp_path), planner=ShardedLoad(), no_dist=True)
    assert not nothing.boxes

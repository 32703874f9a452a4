"""Checkpoints in pieces: written whole, read in part, listed from the existing files, kept as long as requested."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydragraph.checkpoint.piece_sources import Piece, Tier
from hydragraph.checkpoint.state_pieces import DiskShelf, MemoryShelf, Pieces, Shelf, StoreShelf, encoded
from hydragraph.runtime.state_movement import OwnedState
from tests.runtime.homes import ALONE, MODEL, trained


def state() -> OwnedState:
    return OwnedState.of(*trained(ALONE, "adamw"))


def shelf(kind: str, root: Path) -> Shelf:
    if kind == "memory":
        return MemoryShelf()
    return DiskShelf(root) if kind == "disk" else StoreShelf(f"file://{root}" if kind == "file" else "memory://pieces")


@pytest.mark.parametrize("kind", ["memory", "disk", "file", "fsspec"])
def test_a_shelf_gives_back_what_it_was_given(kind: str, tmp_path: Path) -> None:
    place = shelf(kind, tmp_path / "not yet there")
    assert list(place.names()) == []
    place.drop("step-1")
    place.put("step-1/a%2Fb/0-8.safetensors", b"0123456789")
    place.put("step-2/c", b"x")
    place.put("step-2/c", b"yz")
    assert sorted(place.names()) == ["step-1/a%2Fb/0-8.safetensors", "step-2/c"]
    assert place.get("step-1/a%2Fb/0-8.safetensors") == b"0123456789"
    assert place.get("step-1/a%2Fb/0-8.safetensors", 2, 5) == b"234"
    assert place.get("step-2/c") == b"yz"
    place.drop("step-1")
    assert list(place.names()) == ["step-2/c"]
    with pytest.raises(FileNotFoundError):
        place.get("step-1/a%2Fb/0-8.safetensors")


@pytest.mark.parametrize("tier", Tier)
def test_any_part_of_a_piece_can_be_read(tier: Tier, tmp_path: Path) -> None:
    pieces = Pieces(memory=True, disk=tmp_path / "disk", store=f"file://{tmp_path}/store")
    own = state()
    pieces.put(7, own, MODEL.buckets, own.columns, b"common")
    pieces.wait()
    assert pieces.common(tier, 7) == b"common"
    held = pieces.held(tier)
    assert held == {7: sorted(Piece(bucket.name, 0, bucket.size) for bucket in MODEL.buckets)}
    layer = next(piece for piece in held[7] if piece.bucket == "layer.0")
    for whole in (True, False):
        file = pieces.reader(tier, 7, layer, whole)
        for name in ("layer.0.qkv", "layer.0.norm", "layer.0.scale"):
            for column, dtype in own.columns[name].items():
                expected = own.column(name, column)
                size = len(expected)
                for lo, hi in {(0, size), (size // 3, size), (0, (size + 1) // 2)}:
                    assert torch.equal(file.read(name, column, lo, hi, dtype), expected[lo:hi])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    pieces = Pieces(disk=tmp_path, keep=2)
    own = state()
    for step in (4, 9, 12):
        pieces.put(step, own, MODEL.buckets, own.columns, b"")
    assert [sorted(pieces.held(tier)) for tier in (Tier.MEMORY, Tier.DISK, Tier.STORE)] == [[9, 12], [9, 12], []]


def test_a_step_without_its_common_part_does_not_count(tmp_path: Path) -> None:
    pieces = Pieces(memory=False, disk=tmp_path)
    own = state()
    pieces.put(4, own, MODEL.buckets, own.columns, b"")
    (tmp_path / "step-4" / "common.pt").unlink()
    (tmp_path / "notes.txt").write_text("of mine")
    assert pieces.held(Tier.DISK) == {}


def test_damage_is_told(tmp_path: Path) -> None:
    own = state()
    place = DiskShelf(tmp_path)
    pieces = Pieces(memory=False, disk=tmp_path)
    pieces.put(4, own, MODEL.buckets, own.columns, b"")
    tiny = Piece("tiny", 0, 2)
    name = "step-4/tiny/0-2.safetensors"
    data = place.get(name)
    for damaged, how in (
        (data[:-8] + bytes(8), r"tiny\|\w* has another checksum"),
        (data[:-30], r"tiny\|\w* is cut off"),
        (data[:4] + b"x" + data[5:], ""),
        (b"", ""),
    ):
        place.put(name, damaged)
        with pytest.raises(ValueError, match=rf"checkpoint piece {name} is damaged \(.*{how}"):
            read_all(pieces, tiny, own)


def read_all(pieces: Pieces, piece: Piece, own: OwnedState) -> None:
    for column, dtype in own.columns["tiny"].items():
        pieces.reader(Tier.DISK, 4, piece, whole=True).read("tiny", column, 0, 2, dtype)


def test_what_a_store_raises_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, where a directory would be")
    pieces = Pieces(memory=True, store=f"file://{tmp_path}/store")
    own = state()
    pieces.put(4, own, MODEL.buckets, own.columns, b"")
    with pytest.raises(OSError, match="store"):
        pieces.wait()
    pieces.wait()
    assert sorted(pieces.held(Tier.MEMORY)) == [4]


def test_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory=False.*give a place"):
        Pieces(memory=False)
    with pytest.raises(ValueError, match="keep=0"):
        Pieces(keep=0)


def test_a_piece_is_a_safetensors_file() -> None:
    from safetensors.torch import load

    own = state()
    found = {piece.bucket: load(data) for piece, data in encoded(own, MODEL.buckets, own.columns)}
    assert torch.equal(found["tiny"]["tiny|"], own.column("tiny", ""))

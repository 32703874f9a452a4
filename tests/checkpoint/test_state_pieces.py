"""Checkpoints in pieces: written whole, read in part, listed from the existing files, kept as long as requested."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from hydragraph.checkpoint import state_pieces
from hydragraph.checkpoint.piece_sources import StatePiece, StorageTier
from hydragraph.checkpoint.state_pieces import (
    DiskStorage,
    MemoryStorage,
    PieceCopy,
    PieceFile,
    Pieces,
    PieceStorage,
    StoredCheckpoint,
    StoreStorage,
    copied,
)
from hydragraph.runtime.state_movement import OwnedState
from tests.runtime.homes import ALONE, MODEL, trained


def kept(step: int, series: str = "-a1") -> StoredCheckpoint:
    return StoredCheckpoint(step, series)


def state() -> OwnedState:
    return OwnedState.of(*trained(ALONE, "adamw"))


def shelf(kind: str, root: Path) -> PieceStorage:
    if kind == "memory":
        return MemoryStorage()
    return (
        DiskStorage(root) if kind == "disk" else StoreStorage(f"file://{root}" if kind == "file" else "memory://pieces")
    )


@pytest.mark.parametrize("kind", ["memory", "disk", "file", "fsspec"])
def test_a_shelf_gives_back_what_it_was_given(kind: str, tmp_path: Path) -> None:
    place = shelf(kind, tmp_path / "not yet there")
    assert list(place.names()) == []
    place.drop("step-1.-a1")
    place.put("step-1.-a1/a%2Fb/0-8.safetensors", b"0123456789")
    place.put("step-2.-a1/c", b"x")
    place.put("step-2.-a1/c", b"yz")
    assert sorted(place.folders()) == ["step-1.-a1", "step-2.-a1"]
    assert sorted(place.names()) == ["step-1.-a1/a%2Fb/0-8.safetensors", "step-2.-a1/c"]
    assert place.get("step-1.-a1/a%2Fb/0-8.safetensors") == b"0123456789"
    assert place.get("step-1.-a1/a%2Fb/0-8.safetensors", 2, 5) == b"234"
    assert place.get("step-2.-a1/c") == b"yz"
    place.drop("step-1.-a1")
    assert list(place.names()) == ["step-2.-a1/c"]
    with pytest.raises(FileNotFoundError):
        place.get("step-1.-a1/a%2Fb/0-8.safetensors")


def test_a_part_of_a_large_piece_is_read_with_its_blocks_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_pieces, "_BLOCK", 16)
    tensor = torch.arange(50, dtype=torch.float32)
    data = PieceCopy(StatePiece("b", 10, 60), {"p|weight": tensor}, {"p": 10}).encoded()
    shelf = MemoryStorage({"f": data})
    for lo, hi in ((10, 60), (10, 11), (13, 14), (13, 19), (14, 18), (59, 60)):
        assert torch.equal(
            PieceFile(shelf, "f", False).read("p", "weight", lo, hi, torch.float32), tensor[lo - 10 : hi - 10]
        )
    shelf.put("f", data[:-60] + b"\1" + data[-59:])  # in block 8, elements 42 to 45
    PieceFile(shelf, "f", False).read("p", "weight", 10, 42, torch.float32)
    with pytest.raises(ValueError, match=r"p\|weight has a wrong checksum"):
        PieceFile(shelf, "f", False).read("p", "weight", 44, 46, torch.float32)
    with pytest.raises(ValueError, match=r"p\|weight is truncated"):
        PieceFile(shelf, "f", False).read("p", "weight", 59, 61, torch.float32)


@pytest.mark.parametrize("tier", StorageTier)
def test_any_part_of_a_piece_can_be_read(tier: StorageTier, tmp_path: Path) -> None:
    pieces = Pieces(memory=True, disk=tmp_path / "disk", store=f"file://{tmp_path}/store")
    own = state()
    pieces.put(kept(7), own, MODEL.buckets, own.columns, lambda: b"common")
    pieces.wait()
    assert pieces.common(tier, kept(7)) == b"common"
    held = pieces.held(tier)
    assert held == {kept(7): sorted(StatePiece(bucket.name, 0, bucket.size) for bucket in MODEL.buckets)}
    layer = next(piece for piece in held[kept(7)] if piece.bucket == "layer.0")
    for whole in (True, False):
        file = pieces.reader(tier, kept(7), layer, whole)
        for name in ("layer.0.qkv", "layer.0.norm", "layer.0.scale"):
            for column, dtype in own.columns[name].items():
                expected = own.column(name, column)
                size = len(expected)
                for lo, hi in {(0, size), (size // 3, size), (0, (size + 1) // 2)}:
                    assert torch.equal(file.read(name, column, lo, hi, dtype), expected[lo:hi])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    pieces = Pieces(disk=tmp_path, keep=3)
    own = state()
    whole: dict[StorageTier, StoredCheckpoint] = {}
    for step in (4, 9, 12, 13):
        pieces.put(kept(step), own, MODEL.buckets, own.columns, bytes, whole=whole)
        pieces.wait()
        whole = dict(pieces.written)
    assert whole == {StorageTier.MEMORY: kept(13), StorageTier.DISK: kept(13)}
    newest = [kept(9), kept(12), kept(13)]
    assert [sorted(pieces.held(tier)) for tier in (StorageTier.MEMORY, StorageTier.DISK, StorageTier.STORE)] == [
        newest,
        newest,
        [],
    ]


def test_the_last_whole_one_stays_whatever_follows(tmp_path: Path) -> None:
    """Another rank failed to write steps 5 and 6; so they are of no use, and step 4 is."""
    pieces = Pieces(disk=tmp_path)
    own = state()
    for step, whole in ((4, None), (5, kept(4)), (6, None), (7, None)):
        told = {} if whole is None else dict.fromkeys((StorageTier.MEMORY, StorageTier.DISK), whole)
        pieces.put(kept(step), own, MODEL.buckets, own.columns, bytes, whole=told)
        pieces.wait()
    assert [sorted(pieces.held(tier)) for tier in (StorageTier.MEMORY, StorageTier.DISK)] == [[kept(4), kept(7)]] * 2


def test_an_earlier_series_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    pieces = Pieces(memory=False, disk=tmp_path)
    own = state()
    pieces.put(kept(9, "-01d"), own, MODEL.buckets, own.columns, bytes)
    seen = []
    for step, whole in ((5, None), (6, kept(5)), (7, kept(6))):
        pieces.wait()
        told = {} if whole is None else {StorageTier.DISK: whole}
        pieces.put(kept(step), own, MODEL.buckets, own.columns, bytes, whole=told)
        pieces.wait()
        seen.append(sorted(pieces.held(StorageTier.DISK)))
    assert seen == [[kept(5), kept(9, "-01d")], [kept(5), kept(6)], [kept(6), kept(7)]]


def test_pieces_of_another_run_are_not_listed(tmp_path: Path) -> None:
    own = state()
    mine, other = (Pieces(memory=False, disk=tmp_path, run=run) for run in ("b", "bc"))
    mine.put(StoredCheckpoint(4, mine.new_series()), own, MODEL.buckets, own.columns, bytes)
    mine.wait()
    assert [each.step for each in mine.held(StorageTier.DISK)] == [4]
    assert other.held(StorageTier.DISK) == {}
    assert [each.step for each in Pieces(memory=False, disk=tmp_path).held(StorageTier.DISK)] == [4]
    mine.clear(store=False)
    assert not tmp_path.exists()
    with pytest.raises(ValueError, match="run='B-': use only lower-case letters and digits"):
        Pieces(run="B-")


class Slow(MemoryStorage):
    """A place that takes what it is given when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()

    def put(self, name: str, data: bytes) -> None:
        self.may.wait(60)
        super().put(name, data)


def test_a_place_still_being_written_to_is_left_out() -> None:
    pieces = Pieces(store="memory://unused")
    slow = pieces.shelves[StorageTier.STORE] = Slow()
    own = state()
    pieces.put(kept(4), own, MODEL.buckets, own.columns, bytes)
    while pieces.busy > {StorageTier.STORE}:  # its files are not prepared yet
        time.sleep(0.01)
    assert pieces.busy == {StorageTier.STORE}
    pieces.put(kept(5), own, MODEL.buckets, own.columns, bytes, without=pieces.busy)
    slow.may.set()
    pieces.wait()
    assert not pieces.busy
    assert sorted(pieces.held(StorageTier.STORE)) == [kept(4)]
    assert pieces.written == {StorageTier.MEMORY: kept(5), StorageTier.STORE: kept(4)}


def test_a_step_without_its_common_part_does_not_count(tmp_path: Path) -> None:
    pieces = Pieces(memory=False, disk=tmp_path)
    own = state()
    pieces.put(kept(4), own, MODEL.buckets, own.columns, bytes)
    pieces.wait()
    (tmp_path / "step-4.-a1" / "common.pt").unlink()
    (tmp_path / "notes.txt").write_text("of mine")
    assert pieces.held(StorageTier.DISK) == {}


def test_damage_is_told(tmp_path: Path) -> None:
    own = state()
    place = DiskStorage(tmp_path)
    pieces = Pieces(memory=False, disk=tmp_path)
    pieces.put(kept(4), own, MODEL.buckets, own.columns, bytes)
    pieces.wait()
    tiny = StatePiece("tiny", 0, 2)
    name = "step-4.-a1/tiny/0-2.safetensors"
    data = place.get(name)
    for damaged, how in (
        (data[:-8] + bytes(8), r"tiny\|\w* has a wrong checksum"),
        (data[:-30], r"tiny\|\w* is truncated"),
        (data[:4] + b"x" + data[5:], ""),
        (b"", ""),
    ):
        place.put(name, damaged)
        with pytest.raises(ValueError, match=rf"checkpoint piece {name} is damaged \(.*{how}"):
            read_all(pieces, tiny, own)


def read_all(pieces: Pieces, piece: StatePiece, own: OwnedState) -> None:
    for column, dtype in own.columns["tiny"].items():
        pieces.reader(StorageTier.DISK, kept(4), piece, whole=True).read("tiny", column, 0, 2, dtype)


def test_what_a_store_raises_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, where a directory would be")
    pieces = Pieces(memory=True, store=f"file://{tmp_path}/store")
    own = state()
    pieces.put(kept(4), own, MODEL.buckets, own.columns, bytes)
    with pytest.raises(OSError, match="store"):
        pieces.wait()
    pieces.wait()
    assert sorted(pieces.held(StorageTier.MEMORY)) == [kept(4)]


def test_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory=False.*set memory, disk or store"):
        Pieces(memory=False)
    with pytest.raises(ValueError, match="keep=0"):
        Pieces(keep=0)


def test_a_piece_is_a_safetensors_file() -> None:
    from safetensors.torch import load

    own = state()
    found = {part.piece.bucket: load(part.encoded()) for part in copied(own, MODEL.buckets, own.columns)}
    assert torch.equal(found["tiny"]["tiny|"], own.column("tiny", ""))


class Full(MemoryStorage):
    """A place with room for a few files."""

    def put(self, name: str, data: bytes) -> None:
        if len(self.files) == 2:
            raise OSError(28, "No space left on device", name)
        super().put(name, data)


def test_what_could_not_be_written_whole_is_removed() -> None:
    pieces = Pieces(store="memory://unused")
    full = pieces.shelves[StorageTier.STORE] = Full()
    own = state()
    pieces.put(kept(4), own, MODEL.buckets, own.columns, bytes)
    with pytest.raises(OSError, match="No space left"):
        pieces.wait()
    assert full.files == {}
    assert pieces.written == {StorageTier.MEMORY: kept(4)}

"""Checkpoints in pieces, stored in host memory, on the node's disk, and in a store for all nodes.

A piece is a safetensors file with one rank's interval of a bucket (a flat vector of parameters), in all columns
(weights and per-element optimizer state):

    step-40.a-9f2c/layer.3/1024-2048.safetensors  "model.layers.3.mlp.up_proj.weight|exp_avg": elements
    step-40.a-9f2c/common.pt                      step counts, hyperparameters, the caller's extra
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import quote, unquote
from zlib import crc32

import torch
from torch import Tensor

from hydragraph.checkpoint.piece_sources import StatePiece, StorageTier
from hydragraph.data.atomic_write import whole_file
from hydragraph.ir.parameter import Bucket
from hydragraph.runtime.home_state import parameters_within
from hydragraph.runtime.state_movement import Columns, OwnedState

_STEP = re.compile(r"step-(\d+)\.([0-9a-z]*-[0-9a-f]+)")
_PIECE = re.compile(r"(\d+)-(\d+)\.safetensors")
_COMMON = "common.pt"
# Protocols of fsspec
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2"}
# Bytes per checksum
_BLOCK = 1 << 20
_HEAD = 8


@dataclass(frozen=True, order=True)
class StoredCheckpoint:
    """A checkpoint in pieces.

    Attributes:
        series: the run's name, and random digits that change when training returns to an earlier step.
    """

    step: int
    series: str

    @property
    def folder(self) -> str:
        return f"step-{self.step}.{self.series}"

    @staticmethod
    def of(folder: str) -> StoredCheckpoint | None:
        match = _STEP.fullmatch(folder)
        return None if match is None else StoredCheckpoint(int(match[1]), match[2])


class PieceStorage(Protocol):
    """Storage for named files; each is either complete or absent."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of a file; raise a FileNotFoundError if it is missing."""

    def names(self) -> Iterable[str]: ...

    def folders(self) -> Iterable[str]:
        """List the checkpoints' directories."""

    def drop(self, folder: str) -> None:
        """Delete a checkpoint's directory."""


@dataclass
class MemoryStorage:
    files: dict[str, bytes] = field(default_factory=dict)

    def put(self, name: str, data: bytes) -> None:
        self.files[name] = data

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name][begin:end]

    def names(self) -> Iterable[str]:
        return list(self.files)

    def folders(self) -> Iterable[str]:
        return {name.partition("/")[0] for name in list(self.files)}

    def drop(self, folder: str) -> None:
        for name in [name for name in self.files if name.startswith(f"{folder}/")]:
            self.files.pop(name, None)


@dataclass(frozen=True)
class DiskStorage:
    root: Path

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(data)

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with (self.root / name).open("rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else end - begin)

    def names(self) -> Iterable[str]:
        paths = self.root.glob("step-*/**/*")
        return [str(path.relative_to(self.root)) for path in paths if path.is_file() and path.name[0] != "."]

    def folders(self) -> Iterable[str]:
        return [path.name for path in self.root.glob("step-*")]

    def drop(self, folder: str) -> None:
        # Another rank may also delete the directory
        shutil.rmtree(self.root / folder, ignore_errors=True)


class StoreStorage:
    """Files that fsspec supports, below a URL such as "s3://bucket/run"."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._files, self._root = url_to_fs(url)

    def put(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        protocols = {self._files.protocol} if isinstance(self._files.protocol, str) else {*self._files.protocol}
        # fsspec would show partly written files
        if "file" in protocols:
            DiskStorage(Path(self._root)).put(name, data)
            return
        # On object stores, makedirs could create a misspelled bucket
        if not protocols & _OBJECT_STORES:
            self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._files.pipe_file(path, data)

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        return cast(bytes, self._files.cat_file(f"{self._root}/{name}", begin, end))

    def names(self) -> Iterable[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.find(self._root)
        except FileNotFoundError:
            return []
        root = self._root.rstrip("/")
        names = [str(path).removeprefix(root).lstrip("/") for path in paths]
        return [name for name in names if not name.rsplit("/", 1)[-1].startswith(".")]

    def folders(self) -> Iterable[str]:
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def drop(self, folder: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{folder}", recursive=True)


class Pieces:
    """Places in which this process stores checkpoints in pieces.

    Args:
        disk: a directory shared by this node's ranks.
        store: a path or fsspec URL ("s3://bucket/run") for all nodes.
        keep: number of newest checkpoints to keep, always including a complete one.
        run: name of this run, in lower-case letters and digits. Other runs' pieces are not read, and are eventually
            deleted. If `run` is empty, all runs' pieces are read.
    """

    def __init__(
        self,
        memory: bool = True,
        disk: str | Path | None = None,
        store: str | None = None,
        keep: int = 2,
        run: str = "",
    ) -> None:
        self.shelves: dict[StorageTier, PieceStorage] = {}
        if memory:
            self.shelves[StorageTier.MEMORY] = MemoryStorage()
        if disk is not None:
            self.shelves[StorageTier.DISK] = DiskStorage(Path(disk))
        if store is not None:
            self.shelves[StorageTier.STORE] = StoreStorage(store) if "://" in store else DiskStorage(Path(store))
        if not self.shelves or keep < 1:
            raise ValueError(
                f"pieces: memory={memory}, disk={disk}, store={store}, keep={keep}: set memory, disk or store, and"
                " keep >= 1"
            )
        if not re.fullmatch(r"[0-9a-z]*", run):
            raise ValueError(f"pieces: run={run!r}: use only lower-case letters and digits")
        self.last: StoredCheckpoint | None = None
        self.series = ""
        # None means `common.pt`
        self.unreadable: set[tuple[StorageTier, StoredCheckpoint, StatePiece | None]] = set()
        self._keep = keep
        self._run = run
        self._preparing: threading.Thread | None = None
        self._writing: dict[StorageTier, threading.Thread] = {}
        self._written: dict[StorageTier, StoredCheckpoint] = {}
        self._whole: dict[StorageTier, StoredCheckpoint] = {}
        self._errors: list[Exception] = []

    def new_series(self) -> str:
        return f"{self._run}-{uuid.uuid4().hex[:8]}"

    @property
    def busy(self) -> frozenset[StorageTier]:
        """Places to which a checkpoint is still being written."""
        if self._preparing is not None and self._preparing.is_alive():
            return frozenset(self.shelves)
        return frozenset(tier for tier, thread in self._writing.items() if thread.is_alive())

    @property
    def written(self) -> Mapping[StorageTier, StoredCheckpoint]:
        """This rank's last checkpoint in each place."""
        return dict(self._written)

    def put(
        self,
        kept: StoredCheckpoint,
        state: OwnedState,
        buckets: Sequence[Bucket],
        columns: Columns,
        common: Callable[[], bytes],
        without: Collection[StorageTier] = (),
        whole: Mapping[StorageTier, StoredCheckpoint] | None = None,
        tidies: bool = True,
    ) -> None:
        """Copy this rank's state to CPU memory, and write the copy to all places in the background.

        Args:
            columns: each parameter's columns and their dtypes.
            without: places to skip because they are `busy` on some rank; must be equal on all ranks.
            whole: each place's last checkpoint that all ranks have written.
            tidies: whether this rank deletes the store's old checkpoints; one rank is enough.
        """
        self.last = kept
        self.series = kept.series
        self._whole.update(whole or {})
        # Without some ranks' pieces, a checkpoint is useless, so a busy place
        # skips it on all ranks.
        wholes = {tier: self._whole.get(tier) for tier in self.shelves if tier not in without}
        if wholes:
            parts = copied(state, buckets, columns)
            self._preparing = self._begin(partial(self._prepare, kept, parts, common, wholes, tidies))

    def wait(self) -> None:
        """Wait for pending writes; raise the first error since the last call."""
        self.join()
        if errors := self.errors():
            raise errors[0]

    def errors(self) -> list[Exception]:
        """Return background writes' errors since the last call."""
        errors = self._errors
        self._errors = []
        return errors

    def clear(self, store: bool) -> None:
        """Delete all checkpoints in memory and on disk and, if `store` is true, in the store."""
        self.join()
        for tier, shelf in self.shelves.items():
            for folder in shelf.folders() if store or tier is not StorageTier.STORE else ():
                if StoredCheckpoint.of(folder) is not None:
                    shelf.drop(folder)
            if isinstance(shelf, DiskStorage) and (store or tier is not StorageTier.STORE):
                # Other files remain
                with suppress(OSError):
                    shelf.root.rmdir()

    def held(self, tier: StorageTier) -> dict[StoredCheckpoint, list[StatePiece]]:
        """List this run's pieces in a place, if their checkpoint has `common.pt`."""
        # name: "step-40.a-9f2c/layer.3/1024-2048.safetensors" -> folder, bucket, file
        by_checkpoint: dict[StoredCheckpoint, list[StatePiece]] = {}
        common: set[StoredCheckpoint] = set()
        shelf = self.shelves.get(tier)
        for name in shelf.names() if shelf is not None else ():
            folder, *bucket, file = name.split("/")
            kept = StoredCheckpoint.of(folder)
            piece = _PIECE.fullmatch(file)
            if kept is None or (self._run and not kept.series.startswith(f"{self._run}-")):
                continue
            if file == _COMMON:
                common.add(kept)
            elif piece and len(bucket) == 1:
                by_checkpoint.setdefault(kept, []).append(StatePiece(unquote(bucket[0]), int(piece[1]), int(piece[2])))
        return {kept: sorted(pieces) for kept, pieces in by_checkpoint.items() if kept in common}

    def common(self, tier: StorageTier, kept: StoredCheckpoint) -> bytes:
        return self.shelves[tier].get(f"{kept.folder}/{_COMMON}")

    def reader(self, tier: StorageTier, kept: StoredCheckpoint, piece: StatePiece, whole: bool) -> PieceFile:
        """Open a piece; `whole` means that the caller will read all of it."""
        return PieceFile(self.shelves[tier], _name(kept, piece), whole)

    def join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
        for thread in self._writing.values():
            thread.join()

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        def attempt() -> None:
            try:
                work()
            except Exception as error:
                # `errors` or `wait` reports this error
                self._errors.append(error)

        thread = threading.Thread(target=attempt, name="hydragraph-pieces", daemon=True)
        thread.start()
        return thread

    def _prepare(
        self,
        kept: StoredCheckpoint,
        parts: Sequence[PieceCopy],
        common: Callable[[], bytes],
        wholes: Mapping[StorageTier, StoredCheckpoint | None],
        tidies: bool,
    ) -> None:
        files = {_name(kept, part.piece): part.encoded() for part in parts}
        files[f"{kept.folder}/{_COMMON}"] = common()
        for tier, whole in wholes.items():
            write = partial(self._write, tier, kept, files, whole, tidies or tier is not StorageTier.STORE)
            # Slow places get threads, so that a slow store does not delay the disk.
            if tier is StorageTier.MEMORY:
                write()
            else:
                self._writing[tier] = self._begin(write)

    def _write(
        self,
        tier: StorageTier,
        kept: StoredCheckpoint,
        files: Mapping[str, bytes],
        whole: StoredCheckpoint | None,
        tidies: bool,
    ) -> None:
        shelf = self.shelves[tier]
        try:
            # `common.pt` comes last: `held` skips checkpoints without it.
            for name, data in files.items():
                shelf.put(name, data)
        except Exception:
            with suppress(Exception):
                shelf.drop(kept.folder)
            raise
        self._written[tier] = kept
        if not tidies or whole is None or whole.series != kept.series:
            return
        there = {folder: checkpoint for folder in shelf.folders() if (checkpoint := StoredCheckpoint.of(folder))}
        earlier = sorted(each for each in there.values() if each.series == kept.series and each.step < kept.step)
        # keep = 2, `whole` is step 20, step 40 was just written: steps 20 and 40 stay. Step 10 is
        #   older, and some rank has not written step 30.
        stays = [checkpoint for checkpoint in earlier if checkpoint.step <= whole.step][-max(1, self._keep - 1) :]
        for folder, checkpoint in there.items():
            if checkpoint.series != kept.series or (checkpoint.step < kept.step and checkpoint not in stays):
                shelf.drop(folder)


class PieceFile:
    """A piece, read in parts, or loaded at once if `whole`."""

    def __init__(self, shelf: PieceStorage, name: str, whole: bool) -> None:
        self._shelf = MemoryStorage({name: shelf.get(name)}) if whole else shelf
        self._name = name
        try:
            # safetensors: the header's length (8 bytes), the header, and the data
            # header: {"parameter|column": {"data_offsets": [begin, end], ...}}
            self._start = _HEAD + int.from_bytes(self._shelf.get(name, 0, _HEAD), "little")
            header = json.loads(self._shelf.get(name, _HEAD, self._start))
            notes = header.pop("__metadata__")
            self._first: dict[str, int] = json.loads(notes["first"])
            self._sums: dict[str, list[int]] = {key: [*sums] for key, sums in json.loads(notes["crc32"]).items()}
            self._spans: dict[str, tuple[int, int]] = {key: about["data_offsets"] for key, about in header.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(str(error)) from error

    def read(self, parameter: str, column: str, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        """Return elements [lo, hi) of a parameter's column, 1-D, on the CPU.

        Raises:
            ValueError: the file is truncated, or a checksum is wrong.
        """
        key = f"{parameter}|{column}"
        begin, end = self._spans[key]
        first = self._first[parameter]
        low, high = (lo - first) * dtype.itemsize, (hi - first) * dtype.itemsize
        if not 0 <= low <= high <= end - begin:
            raise self._damaged(f"{key} is truncated")
        # bytes [1.5, 2.5) MiB are in blocks 1 and 2: block = 1, past = 3,
        #   and bytes [1, 3) MiB are read
        block, past = low // _BLOCK, -(-high // _BLOCK)
        start, stop = block * _BLOCK, min(past * _BLOCK, end - begin)
        data = bytearray(self._shelf.get(self._name, self._start + begin + start, self._start + begin + stop))
        if len(data) != stop - start:
            raise self._damaged(f"{key} is truncated")
        if checksums(data) != self._sums[key][block:past]:
            raise self._damaged(f"{key} has a wrong checksum")
        return torch.frombuffer(data, dtype=dtype, count=hi - lo, offset=low - start)

    def _damaged(self, how: str) -> ValueError:
        return ValueError(f"checkpoint piece {self._name} is damaged ({how})")


@dataclass(frozen=True, eq=False)
class PieceCopy:
    """Copy of one rank's interval of a bucket; `firsts`: index, in each parameter, of the first copied element."""

    piece: StatePiece
    tensors: Mapping[str, Tensor]
    firsts: Mapping[str, int]

    def encoded(self) -> bytes:
        from safetensors.torch import save

        sums = {key: checksums(values.view(torch.uint8).numpy().data) for key, values in self.tensors.items()}
        return save(dict(self.tensors), {"first": json.dumps(dict(self.firsts)), "crc32": json.dumps(sums)})


def copied(state: OwnedState, buckets: Sequence[Bucket], columns: Columns) -> list[PieceCopy]:
    home = state.home
    parts = []
    for bucket in buckets:
        rows = home.layouts[bucket.name].of(home.rank)
        # [lo, hi): elements of the bucket; `at`: position of element `lo` in this rank's shard
        for lo, hi, at in zip(rows.lo.tolist(), rows.hi.tolist(), rows.at.tolist(), strict=True):
            tensors: dict[str, Tensor] = {}
            firsts: dict[str, int] = {}
            for name, low, high, start in parameters_within(bucket, lo, hi):
                # [low, high): the parameter's elements within [lo, hi); `start`: its
                #   first element, both in the bucket; `begin`: position of `low` in
                #   this rank's part of the parameter
                firsts[name] = low - start
                begin = at + low - lo - home.pieces[name].at
                for column in columns[name]:
                    values = state.column(name, column)[begin : begin + high - low].detach()
                    tensors[f"{name}|{column}"] = values.to("cpu", copy=True)
            parts.append(PieceCopy(StatePiece(bucket.name, lo, hi), tensors, firsts))
    return parts


def checksums(data: bytearray | memoryview) -> list[int]:
    return [crc32(data[at : at + _BLOCK]) for at in range(0, len(data), _BLOCK)]


def _name(kept: StoredCheckpoint, piece: StatePiece) -> str:
    return f"{kept.folder}/{quote(piece.bucket, safe='')}/{piece.lo}-{piece.hi}.safetensors"

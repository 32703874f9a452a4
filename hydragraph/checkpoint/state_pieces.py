"""Checkpoints in pieces, per bucket and owner, in several places: memory, a disk of the node, a store.

A piece is the part of one bucket that one rank owns: an interval in all columns (weights, and the optimizer's
per-element state), as one safetensors file. Any part of it can be read without the rest:

    step-40/layer.3/1024-2048.safetensors     "model.layers.3.mlp.up_proj.weight|exp_avg": elements of that parameter
    step-40/common.pt                         shared data: steps of parameters, hyperparameters, the caller's extra

A file appears under its name completely or not at all. Completeness of a step cannot be recorded at write time: a rank
may be lost, with its memory and its disk, before its piece reaches the store. Readers list what is left
(`checkpoint.piece_sources.Holdings`), and take the newest complete step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, cast
from urllib.parse import quote, unquote
from zlib import crc32

import torch
from torch import Tensor

from hydragraph.checkpoint.piece_sources import Piece, Tier
from hydragraph.ir.parameter import Bucket
from hydragraph.runtime.state_movement import Columns, OwnedState

_STEP = re.compile(r"step-(\d+)")
_PIECE = re.compile(r"(\d+)-(\d+)\.safetensors")
_COMMON = "common.pt"
_HEAD = 8  # bytes that hold the length of a file's header


class Shelf(Protocol):
    """Storage for files by name, such as "step-40/layer.3/0-8.safetensors"; a file is complete or absent."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of a file.

        Raises:
            FileNotFoundError: it does not exist.
        """

    def names(self) -> Iterable[str]:
        """List all files."""

    def drop(self, step: str) -> None:
        """Delete all files of a step."""


@dataclass
class MemoryShelf:
    """Files in this process's memory."""

    files: dict[str, bytes] = field(default_factory=dict)

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""
        self.files[name] = data

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of a file."""
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name][begin:end]

    def names(self) -> Iterable[str]:
        """List all files."""
        return list(self.files)

    def drop(self, step: str) -> None:
        """Delete all files of a step."""
        for name in [name for name in self.files if name.startswith(f"{step}/")]:
            self.files.pop(name, None)


@dataclass(frozen=True)
class DiskShelf:
    """Files in a directory of this node."""

    root: Path

    def put(self, name: str, data: bytes) -> None:
        """Write a file under a temporary name, then rename it."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(path)

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of a file."""
        with (self.root / name).open("rb") as file:
            file.seek(begin)
            return file.read(-1 if end is None else end - begin)

    def names(self) -> Iterable[str]:
        """List all files."""
        found = self.root.glob("step-*/**/*")
        return [str(path.relative_to(self.root)) for path in found if path.is_file() and path.name[0] != "."]

    def drop(self, step: str) -> None:
        """Delete all files of a step; another rank may do the same concurrently."""
        shutil.rmtree(self.root / step, ignore_errors=True)


class StoreShelf:
    """Files in storage that fsspec supports: "s3://bucket/run", "gs://...", "file:///shared/run", ...

    Args:
        url: URL of the directory; non-local file systems need fsspec and its driver (s3fs, gcsfs).

    Raises:
        ImportError: they are not installed; the error says what to install.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(f"store {url}: pip install fsspec (and its driver, such as s3fs)") from error
        self._files, self._root = url_to_fs(url)

    def put(self, name: str, data: bytes) -> None:
        """Write a file; where partial files are visible (a local file system), under a temporary name first."""
        path = f"{self._root}/{name}"
        self._files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        if "file" in self._files.protocol:
            DiskShelf(Path(self._root)).put(name, data)
        else:
            self._files.pipe_file(path, data)

    def get(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes [begin, end) of a file."""
        return cast(bytes, self._files.cat_file(f"{self._root}/{name}", begin, end))

    def names(self) -> Iterable[str]:
        """List all current files."""
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._root)
        except FileNotFoundError:
            return []
        root = self._root.rstrip("/")
        names = [str(path).removeprefix(root).lstrip("/") for path in found]
        return [name for name in names if not name.rsplit("/", 1)[-1].startswith(".")]

    def drop(self, step: str) -> None:
        """Delete all files of a step."""
        try:
            self._files.rm(f"{self._root}/{step}", recursive=True)
        except FileNotFoundError:
            return


class Pieces:
    """Places where this process keeps checkpoints in pieces; create one per rank, and keep it with the executable.

    Args:
        memory: whether to keep each rank's own pieces in its process's memory.
        disk: a local directory of this node, shared by its ranks; None: not on disk.
        store: a URL that all nodes can access, for fsspec; written in the background; None: no store.
        keep: number of checkpoints to keep; the newest may not have reached the store when a rank is lost.

    Raises:
        ValueError: no place is given, or `keep` is less than 1.
    """

    def __init__(
        self, memory: bool = True, disk: str | Path | None = None, store: str | None = None, keep: int = 2
    ) -> None:
        self.shelves: dict[Tier, Shelf] = {}
        if memory:
            self.shelves[Tier.MEMORY] = MemoryShelf()
        if disk is not None:
            self.shelves[Tier.DISK] = DiskShelf(Path(disk))
        if store is not None:
            self.shelves[Tier.STORE] = StoreShelf(store)
        if not self.shelves or keep < 1:
            raise ValueError(
                f"pieces: memory={memory}, disk={disk}, store={store}, keep={keep}: give a place, and keep at least one"
            )
        self._keep = keep
        self._queue: SimpleQueue[tuple[Shelf, str, Mapping[str, bytes]] | None] = SimpleQueue()
        self._uploading: threading.Thread | None = None
        self._error: Exception | None = None

    def put(self, step: int, state: OwnedState, buckets: Sequence[Bucket], columns: Columns, common: bytes) -> None:
        """Keep what this rank owns: in memory and on disk on return, in the store later (`wait`).

        Args:
            step: last step that the state includes.
            state: this rank's state.
            buckets: of the model.
            columns: per-element columns of every parameter.
            common: serialised data shared by all ranks.
        """
        folder = f"step-{step}"
        files = {_name(folder, piece): data for piece, data in encoded(state, buckets, columns)}
        for tier, shelf in self.shelves.items():
            if tier is Tier.STORE:
                self._upload(shelf, folder, {**files, f"{folder}/{_COMMON}": common})
            else:
                _write(shelf, {**files, f"{folder}/{_COMMON}": common}, self._keep)

    def wait(self) -> None:
        """Wait until the store has everything.

        Raises:
            Exception: an error of writing there, raised once.
        """
        if self._uploading is not None:
            self._queue.put(None)
            self._uploading.join()
            self._uploading = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def held(self, tier: Tier) -> dict[int, list[Piece]]:
        """List the pieces in a place by step, for steps whose common part is there too."""
        found: dict[int, list[Piece]] = {}
        common: set[int] = set()
        shelf = self.shelves.get(tier)
        for name in shelf.names() if shelf is not None else ():
            folder, *bucket, file = name.split("/")
            step, piece = _STEP.fullmatch(folder), _PIECE.fullmatch(file)
            if step and file == _COMMON:
                common.add(int(step[1]))
            elif step and piece and len(bucket) == 1:
                found.setdefault(int(step[1]), []).append(Piece(unquote(bucket[0]), int(piece[1]), int(piece[2])))
        return {step: sorted(pieces) for step, pieces in found.items() if step in common}

    def common(self, tier: Tier, step: int) -> bytes:
        """Return the data shared by all ranks."""
        return self.shelves[tier].get(f"step-{step}/{_COMMON}")

    def reader(self, tier: Tier, step: int, piece: Piece, whole: bool) -> PieceFile:
        """Open a piece, to read all or parts of it."""
        return PieceFile(self.shelves[tier], _name(f"step-{step}", piece), whole)

    def _upload(self, shelf: Shelf, folder: str, files: Mapping[str, bytes]) -> None:
        if self._uploading is None:
            self._uploading = threading.Thread(target=self._write_queued, name="hydragraph-pieces", daemon=True)
            self._uploading.start()
        self._queue.put((shelf, folder, files))

    def _write_queued(self) -> None:
        while (job := self._queue.get()) is not None:
            shelf, _, files = job
            try:
                _write(shelf, files, self._keep + 1)  # another rank may be one checkpoint late
            except Exception as error:  # any file system error, raised by `wait`
                self._error = error


class PieceFile:
    """A piece with random access.

    Args:
        shelf, name: where it is.
        whole: whether all of it will be read; it is then loaded immediately.

    Raises:
        ValueError: the file is not a piece.
    """

    def __init__(self, shelf: Shelf, name: str, whole: bool) -> None:
        self._shelf = MemoryShelf({name: shelf.get(name)}) if whole else shelf
        self._name = name
        try:
            self._start = _HEAD + int.from_bytes(self._shelf.get(name, 0, _HEAD), "little")
            header = json.loads(self._shelf.get(name, _HEAD, self._start))
            notes = header.pop("__metadata__")
            self._first: dict[str, int] = json.loads(notes["first"])
            self._sums: dict[str, int] = json.loads(notes["crc32"])
            self._spans: dict[str, tuple[int, int]] = {key: each["data_offsets"] for key, each in header.items()}
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(str(error)) from error

    def read(self, parameter: str, column: str, lo: int, hi: int, dtype: torch.dtype) -> Tensor:
        """Return elements [lo, hi) of a parameter in a column, 1-D, on the CPU; the checksum is verified if they are
        the whole column.

        Raises:
            ValueError: they differ from what was written.
        """
        key = f"{parameter}|{column}"
        begin, end = self._spans[key]
        first = self._first[parameter]
        low, high = begin + (lo - first) * dtype.itemsize, begin + (hi - first) * dtype.itemsize
        data = bytearray(self._shelf.get(self._name, self._start + low, self._start + high))
        if len(data) != high - low or not begin <= low <= high <= end:
            raise self._damaged(f"{key} is cut off")
        if (low, high) == (begin, end) and crc32(data) != self._sums[key]:
            raise self._damaged(f"{key} has another checksum")
        return torch.frombuffer(data, dtype=dtype)

    def _damaged(self, how: str) -> ValueError:
        return ValueError(f"checkpoint piece {self._name} is damaged ({how}): delete it, and another one is read")


def encoded(state: OwnedState, buckets: Sequence[Bucket], columns: Columns) -> Iterator[tuple[Piece, bytes]]:
    """Yield what a rank owns as files, one per interval."""
    from safetensors.torch import save

    home = state.home
    for bucket in buckets:
        rows = home.layouts[bucket.name].of(home.rank)
        offsets = bucket.offsets()
        for lo, hi, at in zip(rows.lo.tolist(), rows.hi.tolist(), rows.at.tolist(), strict=True):
            tensors: dict[str, Tensor] = {}
            firsts: dict[str, int] = {}
            for parameter in bucket.parameters:
                start = offsets[parameter.name]
                low, high = max(lo, start), min(hi, start + parameter.size)
                if low >= high:
                    continue
                firsts[parameter.name] = low - start
                begin = at + low - lo - home.pieces[parameter.name].at
                for column in columns[parameter.name]:
                    values = state.column(parameter.name, column)[begin : begin + high - low]
                    tensors[f"{parameter.name}|{column}"] = values.cpu().contiguous()
            sums = {key: crc32(values.view(torch.uint8).numpy().data) for key, values in tensors.items()}
            yield Piece(bucket.name, lo, hi), save(tensors, {"first": json.dumps(firsts), "crc32": json.dumps(sums)})


def _name(folder: str, piece: Piece) -> str:
    return f"{folder}/{quote(piece.bucket, safe='')}/{piece.lo}-{piece.hi}.safetensors"


def _write(shelf: Shelf, files: Mapping[str, bytes], keep: int) -> None:
    for name, data in files.items():
        shelf.put(name, data)
    steps = sorted({int(match[1]) for name in shelf.names() if (match := _STEP.match(name))})
    for step in steps[:-keep]:
        shelf.drop(f"step-{step}")

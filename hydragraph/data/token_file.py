"""Memory-mapped file with the tokens of a corpus, little-endian:

    header     128 bytes: the fields of `_Header`, their hash, and zeros
    tokens     uint16 if the vocabulary fits, else uint32; in a file with targets, the highest bit marks tokens that are
               not targets, and the other bits hold the id
    padding    zeros up to a multiple of 8 bytes
    offsets    int64 [documents + 1]; document i is tokens[offsets[i] : offsets[i + 1]]

Offsets come last, because the number of documents is unknown until all tokens are written.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hydragraph.data.atomic_write import whole_file

T = TypeVar("T")

_MAGIC = b"HGTOKENS"
_VERSION = 2
_HEADER_BYTES = 128
_FIELDS = struct.Struct("<8sIIQQIII32s")
# Large enough to encode in parallel, small enough for memory.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 1 << 22
_READ_BYTES = 1 << 24


@dataclass(frozen=True)
class _Header:
    """Header of a token file; `tokens` includes end-of-text tokens."""

    item_bytes: int
    documents: int
    tokens: int
    vocabulary: int
    end_of_text: int
    targeted: int
    digest: bytes

    @property
    def offsets_at(self) -> int:
        return _HEADER_BYTES + -(-self.tokens * self.item_bytes // 8) * 8

    @property
    def file_bytes(self) -> int:
        return self.offsets_at + 8 * (self.documents + 1)

    def pack(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, _VERSION, *astuple(self))
        return (fields + hashlib.sha256(fields).digest()).ljust(_HEADER_BYTES, b"\0")


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A memory-mapped, read-only file of tokenized documents.

    Attributes:
        lengths: tokens per document, with the end-of-text token; int64 [documents].
        fingerprint: hash of the content, in 64 hexadecimal digits.
    """

    path: Path
    lengths: npt.NDArray[np.int64]
    vocabulary: int
    end_of_text: int
    targeted: bool
    fingerprint: str
    _tokens: npt.NDArray[np.unsignedinteger]
    _offsets: npt.NDArray[np.int64]

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Map a file and check its header, size and offsets, not its tokens."""
        header = _read_header(path)
        # `asarray`, because operations on a memmap return memmaps.
        tokens = np.asarray(np.memmap(path, f"<u{header.item_bytes}", "r", _HEADER_BYTES, (header.tokens,)))
        offsets = np.asarray(np.memmap(path, "<i8", "r", header.offsets_at, (header.documents + 1,)))
        lengths = np.diff(offsets).astype(np.int64, copy=False)
        if offsets[0] != 0 or offsets[-1] != header.tokens or (lengths < 1).any():
            raise ValueError(_corrupt(path, "the document offsets do not cover all tokens"))
        lengths.flags.writeable = False
        header_fields = (header.vocabulary, header.end_of_text, bool(header.targeted), header.digest.hex())
        return cls(path, lengths, *header_fields, tokens, offsets)

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        digest = hashlib.sha256()
        read = 0
        with self.path.open("rb") as file:
            file.seek(_HEADER_BYTES)
            while data := file.read(_READ_BYTES):
                digest.update(data)
                read += len(data)
                if progress is not None:
                    progress(self._documents_in(read))
        if digest.hexdigest() != self.fingerprint:
            raise ValueError(
                _corrupt(self.path, f"the sha256 of its content is {digest.hexdigest()}, expected {self.fingerprint}")
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def slice(self, document: int, start: int, stop: int) -> Tensor:
        """Return tokens [start, stop) of a document: int64 [stop - start]."""
        return torch.from_numpy((self._part(document, start, stop) & self._ids).astype(np.int64))

    def targets(self, document: int, start: int, stop: int) -> Tensor:
        """Return whether tokens [start, stop) of a document are targets: bool [stop - start]."""
        return torch.from_numpy(self._part(document, start, stop) <= self._ids)

    def counts(
        self, documents: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Count each piece's targets, excluding its first token."""
        if not self.targeted:
            return lengths - 1
        # first: position of each piece's first token; before[0], before[1]: targets before the
        # piece's second token, and before its end
        first = self._offsets[documents] + starts
        before = np.zeros((2, len(first)), np.int64)
        # The file may exceed memory
        for at in range(0, len(self._tokens), _READ_BYTES):
            target_positions = np.flatnonzero(self._tokens[at : at + _READ_BYTES] <= self._ids) + at
            before[0] += np.searchsorted(target_positions, first + 1)
            before[1] += np.searchsorted(target_positions, first + lengths)
        counts: npt.NDArray[np.int64] = before[1] - before[0]
        return counts

    @property
    def _ids(self) -> int:
        # _ids: mask of the id's bits; tokens with the highest bit set are larger
        bits = 8 * self._tokens.itemsize - self.targeted
        return (1 << bits) - 1

    def _part(self, document: int, start: int, stop: int) -> npt.NDArray[np.unsignedinteger]:
        assert 0 <= start <= stop <= self.lengths[document]
        first = int(self._offsets[document])
        return self._tokens[first + start : first + stop]

    def _documents_in(self, read: int) -> int:
        tokens = min(read // self._tokens.itemsize, len(self._tokens))
        return int(np.searchsorted(self._offsets, tokens, side="right")) - 1

    def __reduce__(self) -> tuple[Callable[[Path], TokenFile], tuple[Path]]:
        return TokenFile.open, (self.path,)


@dataclass(frozen=True, eq=False)
class EncodedDocument:
    """Tokens of a document; if `targets` is None, all are targets."""

    ids: Sequence[int]
    targets: Sequence[bool] | None = None


def vocabulary_of(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def write_encoded(
    path: Path, batches: Iterable[Sequence[EncodedDocument]], vocabulary: int, end: int, targeted: bool
) -> TokenFile:
    """Write a token file atomically, with ids below `vocabulary`; raise a ValueError if the corpus is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(bytes(_HEADER_BYTES))
        header = _write_payload(file, batches, vocabulary, end, targeted)
        if not header.documents:
            raise ValueError("the corpus holds no text")
        file.seek(0)
        file.write(header.pack())
    return TokenFile.open(path)


def batched(documents: Iterable[T], characters_of: Callable[[T], int]) -> Iterator[list[T]]:
    batch: list[T] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += characters_of(document)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _write_payload(
    file: BinaryIO, batches: Iterable[Sequence[EncodedDocument]], vocabulary: int, end: int, targeted: bool
) -> _Header:
    # The highest bit is free only if ids need one bit less.
    item_bytes = 2 if vocabulary <= 1 << (16 - targeted) else 4
    no_target = 1 << (8 * item_bytes - 1)
    digest = hashlib.sha256()
    offsets = array("q", [0])

    def write(data: bytes) -> None:
        digest.update(data)
        file.write(data)

    for document in chain.from_iterable(batches):
        offsets.append(offsets[-1] + len(document.ids))
        items = np.asarray(document.ids, f"<u{item_bytes}")
        if document.targets is not None:
            items = items | np.where(document.targets, 0, no_target).astype(items.dtype)
        write(items.tobytes())
    # 5 tokens of 2 bytes end at byte 10; 6 zeros align the int64 offsets
    write(bytes(-offsets[-1] * item_bytes % 8))
    write(np.asarray(offsets, dtype="<i8").tobytes())
    return _Header(item_bytes, len(offsets) - 1, offsets[-1], vocabulary, end, int(targeted), digest.digest())


def _read_header(path: Path) -> _Header:
    if not path.is_file():
        raise ValueError(f"token file {path} does not exist: write it first")
    size = path.stat().st_size
    with path.open("rb") as file:
        data = file.read(_HEADER_BYTES)
    if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
        raise ValueError(f"{path} is not a token file: it starts with {data[:8]!r}, not {_MAGIC!r}; check the path")
    if len(data) < _HEADER_BYTES:
        raise ValueError(_corrupt(path, f"expected at least {_HEADER_BYTES} bytes, found {size}"))
    _, version, *fields = _FIELDS.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"token file {path} has version {version}, expected {_VERSION}: delete it and rerun")
    header = _Header(*fields)
    if data != header.pack():
        raise ValueError(_corrupt(path, "the header does not match its hash"))
    if size != header.file_bytes:
        raise ValueError(_corrupt(path, f"expected {header.file_bytes} bytes, found {size}"))
    return header


def _corrupt(path: Path, what: str) -> str:
    return f"token file {path} is truncated or corrupt: {what}; delete it and rerun"

"""Encoded documents in files, so that an interrupted data preparation can continue."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from hydragraph.data.atomic_write import whole_file
from hydragraph.data.chat import DocumentEncoder
from hydragraph.data.corpus import PlacedDocument
from hydragraph.data.documents import characters_of
from hydragraph.data.token_file import EncodedDocument, batched

_EVERY_S = 20.0


class EncodedParts:
    """Encoded documents of one corpus, in files that take about `every_s` seconds each to encode."""

    def __init__(self, directory: Path, every_s: float = _EVERY_S) -> None:
        self._directory = directory
        self._every_s = every_s
        directory.mkdir(parents=True, exist_ok=True)
        for unfinished in directory.glob("*.partial"):
            unfinished.unlink()

    def encoded(self, documents: Iterable[PlacedDocument], encoder: DocumentEncoder) -> Iterator[int]:
        """Encode the documents that no file contains; after each batch, yield the total number encoded.

        `documents` is the whole corpus, in a fixed order.
        """
        # Files hold the first `done` documents, so encoding continues after them.
        done = sum(self._count(path) for path in self._files)
        since = time.monotonic()
        waiting: list[EncodedDocument] = []
        for batch in _batches(islice(documents, done, None), encoder):
            waiting += batch
            if time.monotonic() - since >= self._every_s:
                done = self._write(waiting, done)
                waiting = []
                since = time.monotonic()
            yield done + len(waiting)
        if waiting:
            self._write(waiting, done)

    def read(self) -> Iterator[list[EncodedDocument]]:
        for path in self._files:
            with np.load(path) as part:
                ids, lengths, targets = part["ids"], part["lengths"], part["targets"]
            ends = zip(np.cumsum(lengths).tolist(), lengths.tolist(), strict=True)
            yield [EncodedDocument(ids[end - n : end], targets[end - n : end]) for end, n in ends]

    @property
    def targeted(self) -> bool:
        for path in self._files:
            with np.load(path) as part:
                if not part["targets"].all():
                    return True
        return False

    def remove(self) -> None:
        shutil.rmtree(self._directory)

    @property
    def _files(self) -> list[Path]:
        return sorted(self._directory.glob("*.npz"))

    def _count(self, path: Path) -> int:
        with np.load(path) as part:
            return len(part["lengths"])

    def _write(self, documents: list[EncodedDocument], before: int) -> int:
        lengths = np.array([len(document.ids) for document in documents], np.int64)
        ids = np.concatenate([np.asarray(document.ids, np.uint32) for document in documents])
        every = [np.ones(len(d.ids), np.bool_) if d.targets is None else d.targets for d in documents]
        targets = np.concatenate([np.asarray(one, np.bool_) for one in every])
        # The name is the number of earlier documents, with leading zeros, so that names sort like
        # documents.
        with whole_file(self._directory / f"{before:012d}.npz") as file:
            np.savez(file, ids=ids, lengths=lengths, targets=targets)
        return before + len(documents)


def _batches(documents: Iterable[PlacedDocument], encoder: DocumentEncoder) -> Iterator[list[EncodedDocument]]:
    for batch in batched(documents, lambda placed: characters_of(placed.document)):
        texts = [placed.document for placed in batch if isinstance(placed.document, str)]
        if len(texts) == len(batch):
            yield encoder.encode_texts(texts)
        else:
            yield [encoder.encode(placed.document, placed.place) for placed in batch]

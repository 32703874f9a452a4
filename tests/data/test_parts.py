"""A preparation that is interrupted anywhere resumes, and ends with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hydragraph.data import token_file
from hydragraph.data.chat import DocumentEncoder
from hydragraph.data.corpus import PlacedDocument
from hydragraph.data.documents import Completion
from hydragraph.data.parts import EncodedParts
from tests.data.chats import encoder

DOCUMENTS = [
    PlacedDocument(f"f:{i}", Completion("what ", "is it " * i) if i % 3 else f"hello {i}") for i in range(1, 12)
]
ENCODER = DocumentEncoder(encoder(), 0)


def plain(parts: EncodedParts) -> list[tuple[list[int], list[bool]]]:
    found = [document for part in parts.read() for document in part]
    return [(list(d.ids), [True] * len(d.ids) if d.targets is None else list(d.targets)) for d in found]


@pytest.mark.parametrize("stop", [0, 1, 4, 9])
def test_what_is_done_is_not_done_again(stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "_BATCH_DOCUMENTS", 2)
    encoded = [ENCODER.encode(placed.document, placed.place) for placed in DOCUMENTS if placed.document]
    expected = [(list(d.ids), [True] * len(d.ids) if d.targets is None else list(d.targets)) for d in encoded]

    def interrupted() -> Iterator[PlacedDocument]:
        yield from DOCUMENTS[:stop]
        raise KeyboardInterrupt

    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        list(EncodedParts(folder, every_s=0).encoded(interrupted(), ENCODER))
    (folder / "000000000099.partial").write_bytes(b"half of a part")
    parts = EncodedParts(folder, every_s=0)
    seen = list(parts.encoded(iter(DOCUMENTS), ENCODER))
    assert seen[-1] == len(DOCUMENTS)
    assert seen[0] == stop // 2 * 2 + min(2, len(DOCUMENTS) - stop // 2 * 2), "the first batches are not done again"
    assert plain(parts) == expected
    assert parts.targeted
    assert not list(folder.glob("*.partial"))
    parts.remove()
    assert not folder.exists()


def test_texts_alone_need_no_marks(tmp_path: Path) -> None:
    parts = EncodedParts(tmp_path / "parts")
    assert list(parts.encoded([PlacedDocument("a", "hello"), PlacedDocument("b", "there")], ENCODER)) == [2]
    assert not parts.targeted
    ids = [np.asarray(document.ids).tolist() for part in parts.read() for document in part]
    assert ids == [[*ENCODER.tokenizer.encode(text).ids, 0] for text in ("hello", "there")]

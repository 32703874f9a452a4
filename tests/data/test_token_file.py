"""Tokens go to disk and come back; a file that is not whole is refused, saying so."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models

from hydragraph.data import token_file
from hydragraph.data.token_file import TokenFile
from hydragraph.data.tokenizer import train_bpe
from tests.data.written import documents, tokens_of, write_tokens

SOURCES = [str(text) for text in documents([Path(json.__file__).parent], suffixes=(".py",))]
TOKENIZER = train_bpe(SOURCES, 600)
END = TOKENIZER.token_to_id("<|endoftext|>")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "new" / "corpus.tokens"
    write_tokens(path, SOURCES, TOKENIZER)
    return path


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
    """A copy of the file, which may be damaged."""
    return Path(shutil.copy(written, tmp_path))


def test_real_text_round_trips(path: Path) -> None:
    file = TokenFile.open(path)
    file.verify()
    assert len(file) == len(SOURCES)
    assert (file.vocabulary, file.end_of_text) == (600, END)
    for text, tokens in zip(SOURCES, tokens_of(file), strict=True):
        assert tokens.dtype == torch.int64
        assert tokens[-1] == END
        assert tokens[:-1].tolist() == TOKENIZER.encode(text).ids
        assert TOKENIZER.decode(tokens.tolist()) == text
    assert file.lengths.dtype == np.int64
    assert file.lengths.tolist() == [len(TOKENIZER.encode(text).ids) + 1 for text in SOURCES]


def test_documents_are_copies(path: Path) -> None:
    file = TokenFile.open(path)
    first = tokens_of(file)[0]
    first.zero_()
    assert tokens_of(file)[0].any()
    assert torch.equal(file.slice(1, 3, 7), tokens_of(file)[1][3:7])
    with pytest.raises(AssertionError):
        file.slice(0, 0, int(file.lengths[0]) + 1)
    with pytest.raises(ValueError, match="read-only"):
        file.lengths[0] = 1


def test_many_small_documents_cross_the_encoding_batches(tmp_path: Path) -> None:
    texts = ["" if i % 7 == 0 else f"document {i}" for i in range(2500)]
    file = write_tokens(tmp_path / "f", iter(texts), TOKENIZER)
    assert [TOKENIZER.decode(tokens.tolist()) for tokens in tokens_of(file)] == texts


@pytest.mark.parametrize(("size", "item_bytes"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_the_widest_ids_survive_in_the_narrowest_type(tmp_path: Path, size: int, item_bytes: int) -> None:
    vocabulary = {f"w{i}": i for i in range(size - 1)} | {"</s>": size - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    file = write_tokens(tmp_path / "f", [f"w{size - 2}", "w5"], tokenizer)
    assert [tokens.tolist() for tokens in tokens_of(file)] == [[size - 2, size - 1], [5, size - 1]]
    assert file.path.stat().st_size == 128 + 4 * item_bytes + 3 * 8


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    one, two, three = (write_tokens(tmp_path / str(i), texts, TOKENIZER) for i, texts in enumerate(["ab", "ab", "ba"]))
    assert one.fingerprint == two.fingerprint != three.fingerprint
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    # The same tokens, cut elsewhere.
    end = "<|endoftext|>"
    cut = [write_tokens(tmp_path / "c", texts, TOKENIZER) for texts in (["x", f"{end}y"], [f"x{end}{end}", "y"])]
    assert torch.equal(torch.cat(tokens_of(cut[0])), torch.cat(tokens_of(cut[1])))
    assert cut[0].fingerprint != cut[1].fingerprint


def test_pickles_as_its_path(path: Path) -> None:
    file = TokenFile.open(path)
    data = pickle.dumps(file)
    assert len(data) < 1000
    assert torch.equal(tokens_of(pickle.loads(data))[1], tokens_of(file)[1])


@pytest.mark.parametrize("kept", [0, 5, 127, 128, 1001, -8, -1])
def test_a_truncated_file_names_the_bytes_and_the_remedy(path: Path, kept: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    found, expected = len(data[:kept]), len(data) if len(data[:kept]) >= 128 else 128
    message = rf"corpus.tokens is truncated or corrupt: expected .*{expected} bytes, found {found}; delete it and rerun"
    with pytest.raises(ValueError, match=message):
        TokenFile.open(path)


def test_a_file_that_is_too_long_is_refused(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=f"expected {size} bytes, found {size + 1}; delete it and rerun"):
        TokenFile.open(path)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_any_changed_byte_of_the_header_is_found_when_opening(path: Path) -> None:
    for at in range(128):
        flip(path, at)
        what = "is not a token file" if at < 8 else "has version" if at < 12 else "truncated or corrupt: the header"
        with pytest.raises(ValueError, match=what):
            TokenFile.open(path)
        flip(path, at)
    TokenFile.open(path)


@pytest.mark.parametrize("at", [128, 129, 2001, -8 * (len(SOURCES) + 1) - 1])
def test_a_changed_token_is_found_by_the_checksum(path: Path, at: int) -> None:
    flip(path, at)
    with pytest.raises(ValueError, match=r"the sha256 of its content is \w{64}, expected \w{64}; delete it and rerun"):
        TokenFile.open(path).verify()


def test_checking_reads_a_part_at_a_time_and_tells_how_far_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "_READ_BYTES", 64)
    file, told = TokenFile.open(path), list[int]()
    file.verify(told.append)
    assert len(told) == -(-(path.stat().st_size - 128) // 64)
    ends = np.cumsum(file.lengths) * (2 if file.vocabulary <= 1 << 16 else 4)
    assert told == [int((ends <= 64 * (i + 1)).sum()) for i in range(len(told))]
    assert told[-1] == len(file)


# The first offset, the last one, and the highest bits of one between.
@pytest.mark.parametrize("at", [-8 * (len(SOURCES) + 1), -8, -8 * 3 + 6])
def test_offsets_that_do_not_fit_are_found_when_opening(path: Path, at: int) -> None:
    flip(path, at)
    with pytest.raises(ValueError, match="the document offsets do not cover all tokens; delete it and rerun"):
        TokenFile.open(path)


def test_an_offset_that_is_off_by_one_is_found_by_the_checksum(path: Path) -> None:
    flip(path, -8 * 3)
    with pytest.raises(ValueError, match="truncated or corrupt: the sha256 of its content"):
        TokenFile.open(path).verify()


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist: write it first"):
        TokenFile.open(tmp_path / "none")
    (tmp_path / "text").write_text("some text that is longer than the header " * 9)
    with pytest.raises(ValueError, match=re.escape("text is not a token file: it starts with b'some tex'")):
        TokenFile.open(tmp_path / "text")


def test_a_failing_write_leaves_the_old_file_and_nothing_else(path: Path) -> None:
    before = path.read_bytes()

    def failing() -> Iterator[str]:
        yield from ["text"] * 3000
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        write_tokens(path, failing(), TOKENIZER)
    with pytest.raises(ValueError, match="the corpus holds no text"):
        write_tokens(path, [], TOKENIZER)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert len(write_tokens(path, ["new"], TOKENIZER)) == 1

"""Compressed files are read as what is in them, and damaged ones are refused by name."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from hydragraph.data.compressed import suffix_of
from hydragraph.data.corpus import CorpusReport, formats, left_out
from tests.data.written import documents

pyarrow = pytest.importorskip("pyarrow")

LINES = '{"text": "hö"}\n\n{"text": "🦎\\n"}\n'.encode()


def packed(path: Path, content: bytes) -> Path:
    data = gzip.compress(content) if path.suffix == ".gz" else pyarrow.compress(content, "zstd", asbytes=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_records_and_texts_are_read_compressed(kind: str, tmp_path: Path) -> None:
    packed(tmp_path / f"a.jsonl.{kind}", LINES)
    assert formats([tmp_path]) == {"text"}
    report = CorpusReport()
    assert list(documents([tmp_path], report=report)) == ["hö", "🦎\n"]
    assert report.part == 1.0
    assert (
        list(documents([tmp_path], (".jsonl",))) == list(documents([tmp_path], (f".jsonl.{kind}",))) == ["hö", "🦎\n"]
    )
    text = packed(tmp_path / f"b.txt.{kind}", b"\xef\xbb\xbfwords\r\n")
    assert list(documents([text])) == ["words\r\n"]
    assert left_out([tmp_path]) == [text], "beside records"
    assert suffix_of(Path(f"a.JSONL.{kind.upper()}")) == ".jsonl"


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_damaged_file_is_named(kind: str, tmp_path: Path) -> None:
    path = packed(tmp_path / f"a.jsonl.{kind}", LINES * 1000)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{kind}: not a readable (gzip|zstd) file"):
        list(documents([path]))
    path.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{kind}: not a readable (gzip|zstd) file"):
        list(documents([path]))


def test_compressed_archives_and_tables_are_refused_by_name(tmp_path: Path) -> None:
    for name, remedy in (
        ("a.tar.gz", "unpack the archive"),
        ("a.parquet.zst", "decompress it"),
        ("a.json.gz", r"a \.jsonl file"),
    ):
        packed(tmp_path / name, b"x")
        with pytest.raises(ValueError, match=remedy):
            list(documents([tmp_path / name]))

"""Documents come from every kind of file, in one order, and every omission is reported."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from hydragraph.data import corpus
from hydragraph.data.corpus import (
    CorpusReport,
    files,
    fingerprint,
    formats,
    left_out,
    refuse_other_encodings,
    unread,
)
from hydragraph.data.documents import PLAIN, AlpacaRecord, Completion, FieldNames
from tests.data.written import documents


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_reads_a_real_package_whole() -> None:
    package = Path(json.__file__).parent
    sources = sorted(path for path in package.iterdir() if path.suffix == ".py")
    assert len(sources) >= 4
    assert list(documents([package], suffixes=(".py",))) == [path.read_bytes().decode() for path in sources]


def test_walks_directories_in_sorted_order_past_hidden_and_cache_folders(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "z/1.txt", "m/2.txt", ".git/x.txt", "__pycache__/y.txt", "m/.hidden"):
        write(tmp_path / name, name)
    assert list(documents([tmp_path])) == ["a.txt", "b.txt", "m/2.txt", "z/1.txt"]
    assert list(documents([tmp_path / "z", tmp_path / "b.txt"])) == ["z/1.txt", "b.txt"]


def test_a_directory_is_read_without_the_runs_and_cached_tokens_in_it(tmp_path: Path) -> None:
    for name in ("a.txt", "metrics.jsonl/c.txt", "run/config.yaml", "run/owner.json", "run/model/merges.txt"):
        write(tmp_path / name, "x")
    for name in ("run/events.jsonl", "cache/0a/tokens.bin", "cache/0a/tokenizer.json", "cache/0a/merges.txt"):
        write(tmp_path / name, "x")
    assert files([tmp_path]) == [tmp_path / "a.txt", tmp_path / "metrics.jsonl" / "c.txt"]


def test_a_suffix_filters_directories_but_not_named_files(tmp_path: Path) -> None:
    markdown, text = write(tmp_path / "in" / "a.MD", "md"), write(tmp_path / "in" / "b.txt", "txt")
    named = write(tmp_path / "c.rst", "rst")
    assert [path.name for path in files([tmp_path / "in", named], (".md",))] == [markdown.name, named.name]
    assert [path.name for path in files([tmp_path / "in"])] == [markdown.name, text.name]


def test_text_keeps_its_line_ends_and_loses_its_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\ufeffone\r\ntwo\u2028\n")
    assert list(documents([path])) == ["one\r\ntwo\u2028\n"]


def test_undecodable_and_empty_files_are_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.bin", b"\xff\xfe\x00")
    write(tmp_path / "b.txt", "")
    write(tmp_path / "c.txt", "text")
    report = CorpusReport()
    with caplog.at_level(logging.INFO):
        assert list(documents([tmp_path], report=report)) == ["text"]
    assert (report.documents, report.empty, report.undecodable) == (1, 1, [str(tmp_path / "a.bin")])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == report.sentence()
    assert "a.bin" in report.sentence()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("gr\xfcn".encode("latin-1"), "not UTF-8 text: .*if that is Latin-1, with iconv -f LATIN1"),
        (b"plain\n" * 1000 + b"caf\xe9", "not UTF-8 text"),  # beyond the first 4 KiB
        ("grün".encode("utf-16"), "UTF-16 text, not UTF-8: .*iconv -f UTF-16"),
        (b"\xfe\xff\x00a", "UTF-16"),
        ("grün".encode("utf-32"), "UTF-32 text, not UTF-8: .*iconv -f UTF-32"),
        (b"\xff\xfe\x00", ""),
        (b"\x89PNG\x00\x01", ""),
        ("grün".encode(), ""),
        (b"", ""),
    ],
)
def test_text_in_another_encoding_is_refused_with_a_way_to_convert_it(
    content: bytes, said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(ValueError, match=f"a.txt: {said}") if said else nullcontext():
        refuse_other_encodings([path])


def test_the_report_names_three_places_and_counts_the_rest() -> None:
    report = CorpusReport(documents=2, undecodable=list("abcde"))
    assert report.sentence().endswith("; skipped 5 that are not UTF-8 text (a, b, c and 2 more)")


def test_jsonl_yields_one_document_per_line(tmp_path: Path) -> None:
    texts = ["plain", "two\nlines", 'quote " and \u2028 separator', "日本語 🦎"]
    lines = [json.dumps({"text": text, "id": i}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + "\n\n".join(lines).encode())
    assert list(documents([path])) == texts
    assert list(
        documents([write(tmp_path / "b.jsonl", '{"body": "x"}\r\n')], fields=FieldNames(text_field="body"))
    ) == ["x"]


@pytest.mark.parametrize("suffix", [".ndjson", ".jsonlines", ".jl"])
def test_other_suffixes_of_json_lines(suffix: str, tmp_path: Path) -> None:
    write(tmp_path / f"a{suffix}", '{"text": "x"}\n{"text": "y"}\n')
    assert list(documents([tmp_path])) == ["x", "y"]


def test_jsonl_lines_without_unicode_text_are_counted(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", b'{"text": "\\ud800"}\n{"text": "\xff"}\n{"text": null}\n{"text": ""}\n{"text": "k"}'
    )
    report = CorpusReport()
    assert list(documents([path], report=report)) == ["k"]
    assert report == CorpusReport(1, 2, [f"{path}:1", f"{path}:2"])


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        ('{"text": ', "not JSON", "one JSON object per line"),
        ('["a"]', "a list, not an object", '{"text": ...}'),
        ('{"body": "a", "id": 1}', "no field 'text'", "set text_field to one of ['body']"),
        ('{"text": 3}', "'text' is an int, not text", "set text_field"),
    ],
)
def test_jsonl_errors_name_the_line_and_the_fix(tmp_path: Path, line: str, what: str, fix: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "good"}\n' + line + "\n")
    drawn = documents([path])
    assert next(drawn) == "good"
    with pytest.raises(ValueError, match=r"a.jsonl:2: ") as error:
        next(drawn)
    assert what in str(error.value)
    assert fix in str(error.value)


def test_parquet_yields_one_document_per_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"row {i}" for i in range(5000)] + [None, "", "last"]
    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    report = CorpusReport()
    assert list(documents([tmp_path], report=report)) == [text for text in texts if text]
    assert (report.documents, report.empty) == (5001, 2)
    for kind in (pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
        parquet.write_table(pyarrow.table({"body": pyarrow.array(["x", "y"]).cast(kind)}), tmp_path / "a.parquet")
        assert list(documents([tmp_path], fields=FieldNames(text_field="body"))) == ["x", "y"]


def test_parquet_errors_name_the_file_and_the_fix(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["x", "y"]}), path)
    with pytest.raises(ValueError, match=r"a.parquet: no column 'body': set text_field to one of \['text'\]"):
        list(documents([path], fields=FieldNames(text_field="body")))
    parquet.write_table(pyarrow.table({"meta": [{"text": "x"}]}), tmp_path / "nested.parquet")
    with pytest.raises(ValueError, match=r"no column 'text': add a text column; none of \['meta'\] holds text"):
        list(documents([tmp_path / "nested.parquet"]))
    with pytest.raises(ValueError, match=r"a.parquet: row 1: 'id' is an int, not text"):
        list(documents([path], fields=FieldNames(text_field="id")))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.parquet: not a readable Parquet file"):
        list(documents([path]))


def test_parquet_rows_of_invalid_utf8_are_counted(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    raw = pyarrow.array([b"good", b"\xff\xfe", b"also"], pyarrow.binary())
    text = pyarrow.StringArray.from_buffers(3, *raw.buffers()[1:])
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    report = CorpusReport()
    assert list(documents([tmp_path], report=report)) == ["good", "also"]
    assert report.undecodable == [f"{tmp_path / 'a.parquet'}: row 2"]


def test_a_reading_tells_how_far_it_is_by_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n' * 10)
    (tmp_path / "b.txt").write_text("x" * 150)
    report = CorpusReport()
    parts = [report.part for _ in documents([tmp_path / "a.jsonl", tmp_path / "b.txt"], report=report)]
    assert parts == pytest.approx([i / 20 for i in range(1, 11)] + [0.5])
    assert report.part == 1


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"a.parquet: .*pip install 'hydragraph\[train\]'"):
        list(documents([write(tmp_path / "a.parquet", b"PAR1")]))


def test_wrong_paths_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a")
    with pytest.raises(ValueError, match="missing is not a file or directory"):
        documents([tmp_path / "missing"])
    with pytest.raises(ValueError, match=r"a.txt is reached twice"):
        documents([tmp_path, path])
    with pytest.raises(ValueError, match=r"a.txt is reached twice"):
        documents([path, path])
    with pytest.raises(ValueError, match=r"no corpus file with a suffix of .py"):
        documents([tmp_path], suffixes=(".py",))
    with pytest.raises(ValueError, match=r"'py' does not start with a dot: write '\.py'"):
        documents([tmp_path], suffixes=("py",))


def test_pipes_and_dangling_links_in_a_directory_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert list(documents([tmp_path])) == ["a"]


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one")
    os.utime(path, ns=(10**18, 10**18))
    first = fingerprint([tmp_path])
    assert first == fingerprint([tmp_path]) == fingerprint([path])
    assert first != fingerprint([tmp_path], fields=FieldNames(text_field="body"))
    os.utime(path, ns=(10**18, 10**18 + 1))
    touched = fingerprint([tmp_path])
    write(path, "longer")
    os.utime(path, ns=(10**18, 10**18 + 1))
    longer = fingerprint([tmp_path])
    write(tmp_path / "b.txt", "")
    assert len({first, touched, longer, fingerprint([tmp_path])}) == 4
    assert fingerprint([tmp_path / "b.txt", path]) != fingerprint([path, tmp_path / "b.txt"])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"some words", {"text"}),
        ("ü".encode() * 4096, {"text"}),
        (b"x" + "🦎".encode() * 4096, {"text"}),
        (b"", set()),
        (b" \n\t\n", set()),
        (b" " * 5000 + b"words", {"text"}),
        (b"\xff\xfe\x00", set()),
        (b"\x89PNG\r\n", set()),
    ],
)
def test_a_file_is_text_if_it_begins_so(content: bytes, found: set[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    assert formats([tmp_path / "file"]) == found


def test_a_folder_of_records_is_read_without_what_lies_beside_them(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", '{"text": "T", "id": 1}\n')
    write(tmp_path / "u.ndjson", '{"text": "U", "source": ""}\n')
    for name in ("README.md", "a.json", "b.xlsx"):
        write(tmp_path / name, "words")
    write(tmp_path / "x.bin", bytes(range(1, 100)))
    report = CorpusReport()
    assert list(documents([tmp_path], report=report)) == ["T", "U"]
    assert (list(report.unread), unread([tmp_path])) == (["id"], ["id"])
    assert "did not read the fields id" in report.sentence()
    assert [path.name for path in left_out([tmp_path])] == ["README.md", "a.json", "b.xlsx", "x.bin"]
    assert list(documents([tmp_path], suffixes=(".md",))) == ["words"]


def test_a_folder_with_splits_is_read_without_those_for_evaluation(tmp_path: Path) -> None:
    names = ["data/train-00000-of-00001.jsonl", "more.jsonl", "data/test-0.jsonl", "validation/a.jsonl", "latest.jsonl"]
    for name in names:
        write(tmp_path / name, json.dumps({"text": name}))
    assert set(documents([tmp_path])) == {names[0], names[1], names[4]}
    assert {str(path.relative_to(tmp_path)) for path in left_out([tmp_path])} == {names[2], names[3]}
    assert list(documents([tmp_path / "data/test-0.jsonl"])) == [names[2]]
    assert list(documents([tmp_path / "validation"])) == [names[3]]


def test_fields_of_messages_that_the_template_does_not_name_are_not_read(tmp_path: Path) -> None:
    said = [
        {"role": "user", "content": "Q", "name": "n"},
        {"role": "assistant", "content": "A", "reasoning_content": "R", "loss": False, "weight": 1},
    ]
    write(tmp_path / "t.jsonl", json.dumps({"messages": said}))
    assert unread([tmp_path], template="{{ m.content }}") == ["messages: reasoning_content", "messages: loss"]
    assert unread([tmp_path], template="{{ m.reasoning_content }}") == ["messages: loss"]


def test_a_folder_of_texts_is_read_without_what_would_be_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.py", "code")
    write(tmp_path / "b.json", "{}")
    write(tmp_path / "x.bin", bytes(range(1, 100)))
    report = CorpusReport()
    assert list(documents([tmp_path], report=report)) == ["code"]
    assert report.undecodable == [str(tmp_path / "x.bin")]
    assert [path.name for path in left_out([tmp_path])] == ["b.json"]


def test_a_folder_of_data_that_is_not_read_is_refused_as_its_file_is_by_name(tmp_path: Path) -> None:
    write(tmp_path / "train.json", "[]")
    write(tmp_path / "README.md", "about")
    for paths in ([tmp_path], [tmp_path / "train.json"]):
        with pytest.raises(ValueError, match=r"train.json would be read as plain text.*one JSON object per line"):
            list(documents(paths))
    write(tmp_path / "train.py", "code")
    assert list(documents([tmp_path])) == ["about", "code"]


def test_a_pair_of_answers_is_two_documents_of_one_record(tmp_path: Path) -> None:
    pairs = [{"prompt": "Q", "chosen": f"A{i}", "rejected": f"B{i}"} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    report = CorpusReport()
    found = list(corpus.documents([tmp_path / "pairs.jsonl"], None, PLAIN, report, limit=2))
    completions = [placed.document.completion for placed in found if isinstance(placed.document, AlpacaRecord)]
    assert completions == [Completion("Q", answer) for answer in ("A0", "B0", "A1", "B1")]
    assert found[3].place == f"{tmp_path / 'pairs.jsonl'}:2, rejected"
    assert report.documents == 2
    assert formats([tmp_path / "pairs.jsonl"]) == {"preference"}

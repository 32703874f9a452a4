"""Rows of tables, as pyarrow and `datasets` write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hydragraph.data import corpus
from hydragraph.data.documents import Conversation, FieldNames
from hydragraph.data.tables import columns, rows, saved_files
from tests.data.written import documents

pyarrow = pytest.importorskip("pyarrow")

CHAT = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hö"}],
    [{"role": "user", "content": "🦎"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "?"}],
]


def arrow(path: Path, table: Any, stream: bool) -> None:
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_of_both_kinds_are_read(stream: bool, tmp_path: Path) -> None:
    arrow(tmp_path / "a.arrow", pyarrow.table({"id": [1, 2, 3], "text": ["a", None, "c"]}), stream)
    assert columns(tmp_path / "a.arrow") == ["id", "text"]
    assert list(rows(tmp_path / "a.arrow", {"text", "messages"})) == [{"text": "a"}, {"text": None}, {"text": "c"}]
    assert list(documents([tmp_path])) == ["a", "c"]


def test_a_damaged_table_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(b"ARROW1 and then nothing")
    with pytest.raises(ValueError, match=r"a\.arrow: not a readable Arrow file .*: write or download it again"):
        columns(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="not a readable Arrow file"):
        columns(path)


def test_conversations_are_read_from_tables(tmp_path: Path) -> None:
    table = pyarrow.table({"messages": CHAT, "id": [1, 2]})
    from pyarrow import parquet

    parquet.write_table(table, tmp_path / "chat.parquet")
    found = list(documents([tmp_path / "chat.parquet"]))
    assert found == [Conversation(tuple(turns)) for turns in CHAT]
    with pytest.raises(ValueError, match=r"chat.parquet: no column 'prompt': set prompt_field to one of"):
        list(documents([tmp_path], fields=FieldNames(format="completion")))


def test_directories_that_datasets_saved_are_read_in_order(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"text {i}" for i in range(20)]
    saved = datasets.Dataset.from_dict({"text": texts}).select(range(19, -1, -1))
    saved.save_to_disk(str(tmp_path / "all" / "one"), num_shards=3)
    assert len(saved_files(tmp_path / "all" / "one") or []) == 3
    assert list(documents([tmp_path / "all"])) == texts[::-1]
    splits = datasets.DatasetDict({"train": saved, "test": saved})
    splits.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match=r"holds the splits train, test of a dataset: name one, .*splits/train"):
        list(documents([tmp_path / "splits"]))
    assert list(documents([tmp_path / "splits" / "test"])) == texts[::-1]


def test_a_saved_directory_that_is_not_whole_is_told(tmp_path: Path) -> None:
    assert saved_files(tmp_path) is None
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    with pytest.raises(ValueError, match=r"must name existing files, but names .*gone.arrow: save the dataset again"):
        saved_files(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "state.json").write_text(text)
        with pytest.raises(ValueError, match=r"state\.json: .*save the dataset again"):
            saved_files(tmp_path)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.csv.gz"])
def test_csv_files_are_read_as_texts(name: str, tmp_path: Path) -> None:
    comma = "\t" if ".tsv" in name else ","
    lines = ["id,text,note", '1,"a ""b"",\nc",x', "2,007,", "3,,y", "4,h\xf6,z"]
    content = "\n".join(lines).replace(",", comma).encode("latin-1") + b"\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    report = corpus.CorpusReport()
    assert columns(path) == ["id", "text", "note"]
    assert list(documents([tmp_path], report=report)) == [f'a "b"{comma}\nc', "007"]
    assert (report.empty, report.undecodable, list(report.unread)) == (1, [f"{path}: row 4"], ["id", "note"])


def test_a_csv_file_with_rows_of_different_lengths_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,id\na,1\nb\n")
    with pytest.raises(ValueError, match=r"a\.csv: not a readable CSV file .*Expected 2 columns, got 1"):
        list(documents([tmp_path]))


@pytest.mark.parametrize(("sign", "way"), [(";", "write commas"), ("\t", r"call it \.tsv")])
def test_a_csv_file_with_another_separator_is_refused(sign: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"text{sign}id\na{sign}1\n")
    with pytest.raises(ValueError, match=rf"a\.csv: the columns are separated by .*, not by ',': {way}"):
        list(documents([tmp_path]))

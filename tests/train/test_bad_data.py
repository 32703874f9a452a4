"""Data that newcomers have by mistake: each is reported in one sentence, before encoding starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import check_data, prepare
from tests.train.plain import settings

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
GOOD = json.dumps({"messages": TURNS})
DEEP = "[" * 100_000

# A file's name, what is in it, other settings of data -> what is said.
CASES: dict[str, tuple[str, str | bytes, dict[str, Any], str]] = {
    "an empty file": ("a.txt", "", {}, "the corpus holds no text: check data.paths"),
    "an empty jsonl": ("a.jsonl", "\n \n", {}, "the corpus holds no text"),
    "only bytes": ("a.bin", b"\xff\xfe\x00", {}, "the corpus holds no text"),
    "Latin-1": ("a.txt", b"caf\xe9 noir", {}, "a.txt: not UTF-8 .*: convert the file .* iconv -f LATIN1 -t UTF-8"),
    "UTF-16": ("a.txt", "café".encode("utf-16"), {}, "a.txt: UTF-16 .*, not UTF-8: .* iconv -f UTF-16 -t UTF-8"),
    "UTF-16 records": ("a.jsonl", GOOD.encode("utf-16"), {}, "a.jsonl:1: UTF-16 .*, not UTF-8: convert the file"),
    "a directory that is empty": ("folder/", "", {}, "no corpus file in .*folder.*: name a file"),
    "a suffix without a dot": ("a.txt", "text", {"suffixes": ["txt"]}, "suffix 'txt' does not start with a dot"),
    "no such file": ("", "", {}, "nowhere is not a file or directory: correct the path"),
    "not JSON": ("a.jsonl", "{'text': 1}", {}, r"a.jsonl:1: not JSON \(.*\): write one JSON object per line"),
    "a number": ("a.jsonl", "3", {}, "a.jsonl:1: an int, not an object"),
    "a deep line": ("a.jsonl", DEEP, {}, "a.jsonl:1: (nested too deeply|not JSON)"),
    "a later line of another kind": ("a.jsonl", GOOD + '\r\n{"text": "a"}\r\n', {}, "a.jsonl:2: no field 'messages'"),
    "a later line that is cut": ("a.jsonl", GOOD + "\n" + GOOD[:30], {}, "a.jsonl:2: not JSON"),
    "no turns": ("a.jsonl", '{"messages": []}', {}, "a.jsonl:1: 'messages' is empty: give a list of messages"),
    "only a system": (
        "a.jsonl",
        json.dumps({"messages": [{"role": "system", "content": "be kind"}]}),
        {},
        r"a.jsonl:1: no assistant message \(only system\)",
    ),
    "both texts and chats": (
        "a.jsonl",
        json.dumps({"text": "a", "messages": TURNS}),
        {},
        "fit the formats text and chat",
    ),
    "another format": ("a.jsonl", GOOD, {"format": "completion"}, "no field 'prompt': set prompt_field to one of"),
    "no parquet": ("a.parquet", "text", {}, "a.parquet: not a readable Parquet file"),
    "no arrow": ("a.arrow", "text", {}, "a.arrow: not a readable Arrow file"),
    "a template that is none": ("a.jsonl", GOOD, {"chat_template": "no.jinja"}, "data.chat_template: .*does not exist"),
    "a tokenizer that is none": ("a.txt", "text", {"tokenizer": "none.json"}, "data.tokenizer: .* does not exist"),
    "a tokenizer that is text": (
        "a.txt",
        "text",
        {"tokenizer": "SELF"},
        "cannot be read .*: save it again with",
    ),
    "a tiny vocabulary": ("a.txt", "text", {"vocab_size": 20}, "vocab_size 20 is too small for 256 bytes and special"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_with_data_is_a_sentence(case: str, tmp_path: Path) -> None:
    name, content, changes, sentence = CASES[case]
    path = tmp_path / (name or "nowhere")
    if name.endswith("/"):
        path.mkdir()
    elif name:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    record = settings(tmp_path)
    changes = {key: str(path) if value == "SELF" else value for key, value in changes.items()}
    record["data"] = {**record["data"], "paths": [str(path)], "vocab_size": 320, **changes}
    config = from_record(TrainConfig, record)
    with pytest.raises(ValueError, match=sentence):
        prepare(config)
    if "later" not in case and "text" not in sentence and "vocab" not in sentence and "assistant" not in sentence:
        with pytest.raises(ValueError, match=sentence):
            check_data(config)
    assert not list((tmp_path / "run").rglob("*.bin")), "partial files are removed"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"evaluation": {"held": {"paths": ["EMPTY"]}}}, "data.evaluation.held holds no text: check its paths"),
        (
            {"paths": [], "mixture": [{"paths": ["FULL"]}, {"paths": ["EMPTY"]}]},
            r"data.mixture\[1\] holds no text: check its paths",
        ),
    ],
)
def test_of_several_corpora_the_one_without_text_is_named(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    for name, content in (("empty", ""), ("full", "some words of text " * 40)):
        (tmp_path / f"{name}.txt").write_text(content)
    text = json.dumps(changes).replace("EMPTY", str(tmp_path / "empty.txt")).replace("FULL", str(tmp_path / "full.txt"))
    record = settings(tmp_path)
    record["data"] = {**record["data"], "paths": [str(tmp_path / "full.txt")], **json.loads(text)}
    config = from_record(TrainConfig, record)
    with pytest.raises(ValueError, match=sentence):
        prepare(config)

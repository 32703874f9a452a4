"""Preparing a run's data: once, cached by what it depends on, and the standard library as a corpus."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from hydragraph.data import tokenizer
from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import evaluation_batches, mini_batches, open_tokens, prepare, stdlib_files, verify
from tests.train.plain import settings


def config(folder: Path, **data: object) -> TrainConfig:
    record = settings(folder)
    record["data"].update(data)
    return from_record(TrainConfig, record)


def test_prepares_once_and_again_when_the_corpus_changes(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    first = prepare(config(tmp_path), lambda what, done: seen.append((what, done)))
    assert first.parent == tmp_path / "run" / "data"
    assert seen[-1] == ("writing the token file", 12)
    assert ("training a tokenizer", 12) in seen
    seen.clear()
    run = config(tmp_path)
    assert prepare(run, lambda what, done: seen.append((what, done))) == first
    assert not seen, "the cache was used"
    (tmp_path / "texts" / "new.txt").write_text("something else")
    second = prepare(run)
    assert second != first
    assert len(open_tokens(second).file) == 13
    assert sorted(p.name for p in first.parent.iterdir()) == sorted([first.name, second.name]), "nothing partial"


def test_a_byte_that_has_changed_since_is_found_and_deleting_the_file_makes_it_anew(tmp_path: Path) -> None:
    run = config(tmp_path)
    directory, seen = prepare(run), list[tuple[str, int]]()
    verify(directory, lambda what, done: seen.append((what, done)))
    assert seen[-1] == ("checking the token file", 12)
    file = directory / "tokens.bin"
    written = bytearray(file.read_bytes())
    file.write_bytes(written[:200] + bytes([written[200] ^ 1]) + written[201:])
    assert prepare(run) == directory
    with pytest.raises(ValueError, match=rf"token file {re.escape(str(file))} is .* corrupt: .*; delete it and rerun"):
        verify(directory)
    file.unlink()
    verify(prepare(run))
    assert file.read_bytes() == written


def test_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size 10"):
        prepare(config(tmp_path, vocab_size=10))
    assert not list((tmp_path / "run" / "data").iterdir())


def test_uses_a_given_tokenizer_and_cache(tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train_bpe(["zzzz"], 260), tmp_path / "given")
    run = config(tmp_path, tokenizer=str(tmp_path / "given"), cache=str(tmp_path / "cache"))
    directory = prepare(run)
    assert directory.parent == tmp_path / "cache"
    tokens = open_tokens(directory)
    assert tokens.tokenizer.get_vocab() == tokenizer.load(tmp_path / "given").get_vocab()
    assert tokens.file.vocabulary == tokens.tokenizer.get_vocab_size()


def test_names_the_tokenizer_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer: there is no .*nowhere"):
        prepare(config(tmp_path, tokenizer=str(tmp_path / "nowhere")))


def test_trains_on_other_documents_than_it_evaluates_on(tmp_path: Path) -> None:
    run = config(tmp_path)
    file = open_tokens(prepare(run)).file
    train, held = mini_batches(run, file), mini_batches(run, file, "heldout")
    assert not set(train.chunks.documents) & set(held.chunks.documents)
    batches = evaluation_batches(run, file)
    assert 0 < len(batches) <= run.evaluate_batches
    again = evaluation_batches(run, file)
    assert all(
        torch.equal(a, b) for one, two in zip(batches, again, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_the_standard_library_has_neither_tests_nor_packages(tmp_path: Path) -> None:
    for name in (
        "os.py",
        "json/decoder.py",
        "test/test_os.py",
        "site-packages/x.py",
        "json/tests/t.py",
        "lib.so",
        ".h.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("pass")
    (tmp_path / "empty").mkdir()
    assert stdlib_files(tmp_path) == [tmp_path / "json" / "decoder.py", tmp_path / "os.py"]


def test_finds_this_pythons_standard_library() -> None:
    found = {path.name for path in stdlib_files()}
    assert {"dataclasses.py", "argparse.py"} <= found
    assert "torch" not in {part for path in stdlib_files() for part in path.parts}

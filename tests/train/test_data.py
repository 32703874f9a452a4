"""Preparing a run's data: once, cached by what it depends on, and the standard library as a corpus."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hydragraph.data import token_file, tokenizer
from hydragraph.data.mini_batches import MiniBatches, Mixture
from hydragraph.data.parts import EncodedParts
from hydragraph.spec.record import from_record
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import (
    check_data,
    data_remarks,
    evaluation_batches,
    known_vocabulary,
    length_remarks,
    mini_batches,
    open_tokens,
    prepare,
    stdlib_files,
    steps_of,
    verify,
)
from tests.train.plain import settings


def config(folder: Path, **data: object) -> TrainConfig:
    record = settings(folder)
    record["data"].update(data)
    return from_record(TrainConfig, record)


def test_prepares_once_and_again_when_the_corpus_changes(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    first = prepare(config(tmp_path), lambda what, done, part: seen.append((what, done)))
    assert first.parent == tmp_path / "run" / "data"
    assert seen[-1] == ("writing the token file", 12)
    assert ("training a tokenizer", 12) in seen
    seen.clear()
    run = config(tmp_path)
    assert prepare(run, lambda what, done, part: seen.append((what, done))) == first
    assert not seen, "the cache was used"
    (tmp_path / "texts" / "new.txt").write_text("something else")
    second = prepare(run)
    assert second != first
    assert len(open_tokens(run, second).files[0]) == 13
    assert sorted(p.name for p in first.parent.iterdir()) == sorted([first.name, second.name]), "nothing partial"


def test_a_byte_that_has_changed_since_is_found_and_deleting_the_file_makes_it_anew(tmp_path: Path) -> None:
    run = config(tmp_path)
    directory, seen = prepare(run), list[tuple[str, int]]()
    verify(run, directory, lambda what, done, part: seen.append((what, done)))
    assert seen[-1] == ("checking the token file", 12)
    file = directory / "tokens.bin"
    written = bytearray(file.read_bytes())
    file.write_bytes(written[:200] + bytes([written[200] ^ 1]) + written[201:])
    assert prepare(run) == directory
    with pytest.raises(ValueError, match=rf"token file {re.escape(str(file))} is .* corrupt: .*; delete it and rerun"):
        verify(run, directory)
    file.unlink()
    verify(run, prepare(run))
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
    tokens = open_tokens(run, directory)
    assert tokens.tokenizer.get_vocab() == tokenizer.load(tmp_path / "given").get_vocab()
    assert tokens.vocabulary == tokens.tokenizer.get_vocab_size()


@pytest.mark.parametrize("declares", [False, True])
def test_a_tokenizer_without_an_end_of_text_is_used_once_its_configuration_names_one(
    declares: bool, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    given.mkdir()
    tokenizer.train_bpe(["zzzz"], 260, special_tokens=("<stop>", "<pad>")).save(str(given / "tokenizer.json"))
    configuration = given / "tokenizer_config.json"
    if declares:  # others, that is
        configuration.write_text(json.dumps({"pad_token": "<pad>"}))
    run = config(tmp_path, tokenizer=str(given))
    for reads in (check_data, prepare):
        with pytest.raises(ValueError, match=r"\(<pad>, <stop>\) in a tokenizer_config.json next to .*, as in (.*)$"):
            reads(run)
    configuration.write_text(json.dumps({"eos_token": "<stop>"}))
    assert open_tokens(run, prepare(run)).end_of_text == 0


def test_a_vocabulary_is_known_once_it_is_learned_or_given(tmp_path: Path) -> None:
    learning = config(tmp_path)
    assert known_vocabulary(learning) is None
    prepared = prepare(learning)
    tokens = open_tokens(learning, prepared)
    assert known_vocabulary(learning) == (tokens.vocabulary, tokens.end_of_text)
    given = config(tmp_path, tokenizer=str(prepared), cache=str(tmp_path / "elsewhere"))
    assert known_vocabulary(given) == (tokens.vocabulary, tokens.end_of_text)
    assert not (tmp_path / "elsewhere").exists()


def test_names_the_tokenizer_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.tokenizer: .*nowhere does not exist"):
        prepare(config(tmp_path, tokenizer=str(tmp_path / "nowhere")))


def test_trains_on_other_documents_than_it_evaluates_on(tmp_path: Path) -> None:
    run = config(tmp_path)
    tokens = open_tokens(run, prepare(run))
    stream, held = mini_batches(run, tokens), evaluation_batches(run, tokens)
    assert isinstance(stream, MiniBatches)
    batches = held["heldout"]
    kept = len(set(stream.chunks.documents.tolist()))
    assert 0 < kept < 12
    every = MiniBatches(tokens.files[0], run.data.tokens_per_step, run.data.max_length)
    assert stream.tokens + sum(len(s) for batch in batches for s in batch) == every.tokens
    assert 0 < len(batches) <= run.evaluate_batches
    again = evaluation_batches(run, tokens)["heldout"]
    assert [[s.tolist() for s in batch if isinstance(s, Tensor)] for batch in batches] == [
        [s.tolist() for s in batch if isinstance(s, Tensor)] for batch in again
    ]


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


CHAT = [
    [
        {"role": "user", "content": f"what is {i} and {i}"},
        {"role": "assistant", "content": f"it is {2 * i}"},
        {"role": "user", "content": "sure"},
        {"role": "assistant", "content": "yes"},
    ]
    for i in range(40)
]


def chat_file(folder: Path, name: str = "chat.jsonl", count: int = 40) -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in CHAT[:count]))
    return str(path)


def test_a_new_tokenizer_for_conversations_brings_chatml(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    run = config(tmp_path, paths=[chat_file(tmp_path)], vocab_size=320, max_length=96)
    directory = prepare(run)
    theirs = AutoTokenizer.from_pretrained(directory)
    file = open_tokens(run, directory).files[0]
    wanted: Any = theirs.apply_chat_template(CHAT[3], return_dict=True, return_assistant_tokens_mask=True)
    assert file.slice(3, 0, int(file.lengths[3])).tolist() == wanted["input_ids"]
    assert file.targets(3, 0, int(file.lengths[3])).int().tolist() == wanted["assistant_masks"]


def test_a_tokenizer_keeps_its_configuration_and_may_lack_a_template(tmp_path: Path) -> None:
    given = tmp_path / "given"
    tokenizer.save(tokenizer.train_bpe(["a b c user assistant"], 300, ("<|endoftext|>", "<end>")), given)
    settings = {"tokenizer": str(given), "paths": [chat_file(tmp_path)], "max_length": 96}
    with pytest.raises(ValueError, match=r"has no chat template, .* set data.chat_template to 'chatml'"):
        check_data(config(tmp_path, **settings))
    (given / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "extra": 1}))
    directory = prepare(config(tmp_path, **settings, chat_template="chatml"))
    assert json.loads((directory / "tokenizer_config.json").read_text())["extra"] == 1
    assert "generation" in (directory / "chat_template.jinja").read_text()
    run = config(tmp_path, tokenizer=str(given))
    assert open_tokens(run, prepare(run)).end_of_text == 1, "the end that the configuration declares"
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}<end>{% endfor %}")
    ours = prepare(config(tmp_path, **settings, chat_template=str(tmp_path / "template.jinja")))
    assert ours != directory
    with pytest.raises(ValueError, match=r"data.chat_template: .*nowhere.* does not exist"):
        check_data(config(tmp_path, **settings, chat_template="nowhere"))


@pytest.mark.parametrize(
    ("record", "format"),
    [
        ({"prompt": "a b", "chosen": " c", "rejected": " d"}, "preference"),
        ({"instruction": "a", "output": "b"}, "alpaca"),
        ({"input_ids": [1, 2]}, "tokens"),
        ({"messages": CHAT[0]}, "chat"),
    ],
)
def test_text_files_are_refused_beside_records_of_a_format_that_texts_cannot_have(
    record: dict[str, Any], format: str, tmp_path: Path
) -> None:
    (tmp_path / "records.jsonl").write_text((json.dumps(record) + "\n") * 4)
    (tmp_path / "notes.txt").write_text("some text\n")
    plain = settings(tmp_path)
    paths = [str(tmp_path / name) for name in ("notes.txt", "records.jsonl")]
    plain["data"].update(paths=paths, format=format)
    with pytest.raises(ValueError, match=f"data.format is {format}, but the corpus also has text files, which cannot"):
        prepare(from_record(TrainConfig, {**plain, "objective": "dpo" if format == "preference" else None}))


def test_blank_files_do_not_shift_pairs(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a b", "chosen": " c", "rejected": " d"}\n' * 4)
    (tmp_path / "blank.txt").write_text(" \n")
    plain = settings(tmp_path)
    plain["data"]["paths"] = [str(tmp_path / name) for name in ("blank.txt", "pairs.jsonl")]
    run = from_record(TrainConfig, {**plain, "objective": "dpo"})
    assert len(open_tokens(run, prepare(run)).files[0]) == 8


def test_a_corpus_that_is_too_short_to_hold_out_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    mixture = [{"paths": settings(tmp_path)["data"]["paths"]}, {"paths": [str(tmp_path / "short.txt")]}]
    run = config(tmp_path, paths=[], mixture=mixture, vocab_size=320)
    with pytest.raises(ValueError, match=r"data\.mixture\[1\]: heldout .* needs 2 pieces"):
        mini_batches(run, open_tokens(run, prepare(run)))


def test_mixtures_and_evaluation_sets_have_files_of_their_own(tmp_path: Path) -> None:
    chats = chat_file(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "what", "completion": " it"}\n' * 9)
    texts = settings(tmp_path)["data"]["paths"]
    mixture = [{"paths": texts, "weight": 3}, {"paths": [chats]}]
    sets = {"pairs": {"paths": [str(tmp_path / "pairs.jsonl")]}}
    run = config(tmp_path, paths=[], mixture=mixture, evaluation=sets, vocab_size=320, heldout=None)
    directory = prepare(run)
    assert {path.name for path in directory.glob("*.bin")} == {"tokens-0.bin", "tokens-1.bin", "evaluation-pairs.bin"}
    tokens = open_tokens(run, directory)
    stream = mini_batches(run, tokens)
    assert isinstance(stream, Mixture)
    for _ in range(30):
        next(stream)
    text, chat = stream.state_dict()["drawn"]
    assert text / chat == pytest.approx(3, rel=0.1)
    (pairs,) = evaluation_batches(run, tokens)["pairs"]
    assert len(pairs) == 9
    assert set(evaluation_batches(run, tokens)) == {"pairs"}, "no sequences are held out if evaluation sets are given"
    verify(run, directory)


def test_each_corpus_of_a_mixture_is_evaluated(tmp_path: Path) -> None:
    sources = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text((json.dumps({"text": f"{name} two three"}) + "\n") * 200)
        sources.append({"paths": [str(path)]})
    run = replace(config(tmp_path, paths=[], mixture=sources), evaluate_batches=2)
    tokens = open_tokens(run, prepare(run))
    batches = evaluation_batches(run, tokens)["heldout"]
    assert len(batches) == 4
    assert str(batches[0][0]) != str(batches[2][0])


def test_a_remark_names_files_that_are_trained_on_and_evaluated_on(tmp_path: Path) -> None:
    train, val = (chat_file(tmp_path, name) for name in ("a.jsonl", "val.jsonl"))
    held = {"val": {"paths": [val]}}
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for where in (tmp_path, link):
        (remark,) = data_remarks(config(tmp_path, paths=[str(where)], suffixes=[".jsonl"], evaluation=held))
        assert re.search(r"val.jsonl is in data.paths and in data.evaluation.val, so .*: list each", remark)
    assert not [*data_remarks(config(tmp_path, paths=[train], evaluation=held))]
    both = [{"paths": [train]}, {"paths": [train, val]}]
    (remark,) = data_remarks(config(tmp_path, paths=[], mixture=both))
    assert "a.jsonl is in data.mixture[0] and in data.mixture[1]" in remark
    other = {"other": {"paths": [chat_file(tmp_path, "c.jsonl")]}}
    assert not [*data_remarks(config(tmp_path, paths=[], mixture=both, heldout=0.0, evaluation=other))]


def test_corpora_on_which_the_run_never_evaluates_are_remarked(tmp_path: Path) -> None:
    run = config(tmp_path, evaluation={"other": {"paths": [chat_file(tmp_path)]}})
    assert list(data_remarks(run)) == []
    assert list(data_remarks(replace(run, evaluate_every=0))) == [
        f"data.{name} is set, but the run never evaluates: set evaluate_every or evaluate_per_epoch"
        for name in ("heldout", "evaluation")
    ]


def test_epochs_are_as_many_steps_as_their_tokens_take(tmp_path: Path) -> None:
    record = settings(tmp_path)
    record.pop("steps")
    run = from_record(TrainConfig, {**record, "epochs": 2.5})
    tokens = open_tokens(run, prepare(run))
    stream, drawn = mini_batches(run, tokens), list[int]()
    steps = steps_of(run, mini_batches(run, tokens))
    for _ in range(steps):
        drawn.append(sum(stream.skip()))
    assert sum(drawn[:-1]) < 2.5 * stream.tokens <= sum(drawn)
    assert steps_of(config(tmp_path), stream) == 6
    with pytest.raises(ValueError, match=r"epochs is 1e\+12, .* steps: lower epochs"):
        steps_of(replace(run, epochs=1e12), stream)


def test_documents_that_are_skipped_or_cut_are_remarked(tmp_path: Path) -> None:
    long = [{**turn, "content": str(turn["content"]) * 9} for turn in CHAT[0]]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in (CHAT[1], long, long)))
    held = {"held": {"paths": [chat_file(tmp_path, "held.jsonl")]}}
    length = {"vocab_size": 320, "max_length": 96, "heldout": None}
    run = config(tmp_path, paths=[str(tmp_path / "chat.jsonl")], evaluation=held, **length)
    for overlong, end in (
        ("cut", "are longer than data.max_length, and are cut"),
        ("drop", "are skipped: with data.max_length 96, a document does not fit"),
    ):
        changed = replace(run, data=replace(run.data, overlong=overlong))
        tokens = open_tokens(changed, prepare(changed))
        assert list(length_remarks(changed, tokens)) == [f"2 of 3 documents of data.paths {end}"]


def test_the_first_samples_of_each_corpus_are_read(tmp_path: Path) -> None:
    path = chat_file(tmp_path)
    few = chat_file(tmp_path, "few.jsonl")
    sets = {"heldout": 0.0, "evaluation": {"few": {"paths": [few], "max_samples": 3}}}
    run = config(tmp_path, paths=[path], max_samples=7, **sets)
    tokens = open_tokens(run, prepare(run))
    assert (len(tokens.files[0]), len(tokens.evaluation["few"])) == (7, 3)
    everything = config(tmp_path, paths=[path], **sets)
    assert prepare(everything) != tokens.directory
    mixed = config(tmp_path, paths=[], mixture=[{"paths": [path], "max_samples": 2}, {"paths": [few]}])
    assert [len(file) for file in open_tokens(mixed, prepare(mixed)).files] == [2, 40]
    for wrong in ({"max_samples": 0}, {"paths": [], "max_samples": 2, "mixture": [{"paths": [path]}]}):
        with pytest.raises(ValueError, match="max_samples"):
            config(tmp_path, **wrong)


def test_documents_that_are_too_long_are_refused_by_place(tmp_path: Path) -> None:
    path = chat_file(tmp_path)
    lines = Path(path).read_text().splitlines()
    lines[4] = json.dumps(
        {"messages": [*CHAT[4][:3], {"role": "assistant", "content": " ".join(str(i * 7919) for i in range(60))}]}
    )
    Path(path).write_text("\n".join(lines))
    run = config(tmp_path, paths=[path], vocab_size=320, max_length=90, overlong="refuse")
    tokens = open_tokens(run, prepare(run))
    with pytest.raises(ValueError, match=r"chat.jsonl:5: \d+ tokens, but data.max_length is 90 \(1 of 40 documents"):
        mini_batches(run, tokens)
    dropped = mini_batches(config(tmp_path, paths=[path], vocab_size=320, max_length=90, overlong="drop"), tokens)
    assert isinstance(dropped, MiniBatches)
    assert 4 not in dropped.chunks.documents


def test_how_much_is_left_is_known_of_the_tokenizer_of_several_corpora_and_of_checking(tmp_path: Path) -> None:
    sources = []
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text((json.dumps({"text": "one two three"}) + "\n") * 200)
        sources.append({"paths": [str(path)], "weight": 1})
    run = config(tmp_path, paths=[], mixture=sources, vocab_size=300)
    seen: list[tuple[str, int, float]] = []
    verify(run, prepare(run, lambda *told: seen.append(told)), lambda *told: seen.append(told))  # pyrefly: ignore[bad-argument-type]
    learning = [(done, part) for what, done, part in seen if what == "training a tokenizer"]
    assert [done for done, _ in learning] == [100, 200, 300, 400, 400]
    assert [part for _, part in learning] == pytest.approx([done / 400 for done, _ in learning], abs=0.01)
    assert seen[-1] == ("checking the token file", 200, 1.0)


def test_a_preparation_that_is_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(tmp_path, paths=[chat_file(tmp_path)], vocab_size=320)
    monkeypatch.setattr(token_file, "_BATCH_DOCUMENTS", 8)
    monkeypatch.setattr(EncodedParts, "__init__", partialmethod(EncodedParts.__init__, every_s=0.0))

    def interrupt(what: str, done: int, part: float) -> None:
        if what == "writing the token file":
            assert part == pytest.approx(done / 40, abs=0.1), "the time left is computed from it"
            if done >= 24:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(run, interrupt)
    seen: list[tuple[str, int]] = []
    directory = prepare(run, lambda what, done, part: seen.append((what, done)))
    assert seen[0] == ("writing the token file", 32), "neither the tokenizer nor what was encoded is made again"
    assert len(open_tokens(run, directory).files[0]) == 40
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]

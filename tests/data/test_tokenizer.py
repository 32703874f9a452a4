"""The tokenizer is lossless and deterministic, and Hugging Face loads what it saves."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hydragraph.data.tokenizer import END_OF_TEXT, end_of_text_token, load, save, train_bpe
from tests.data.written import documents
from tests.thorough import thorough

SOURCES = [str(text) for text in documents([Path(json.__file__).parent], suffixes=(".py",))]
TOKENIZER = train_bpe(SOURCES, 600)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def test_real_text_survives_and_becomes_shorter() -> None:
    assert TOKENIZER.get_vocab_size() == 600
    for text in SOURCES:
        ids = encode(TOKENIZER, text)
        assert TOKENIZER.decode(ids) == text
        assert len(ids) < 0.7 * len(text.encode())


@thorough
@given(st.text(st.characters(codec="utf-8"), max_size=60).filter(lambda text: "<|" not in text))
def test_any_text_survives(text: str) -> None:
    assert TOKENIZER.decode(encode(TOKENIZER, text)) == text


def test_the_same_texts_in_any_order_give_the_same_tokenizer() -> None:
    shuffled = SOURCES.copy()
    random.Random(0).shuffle(shuffled)
    assert shuffled != SOURCES
    assert train_bpe(iter(shuffled), 600).to_str() == TOKENIZER.to_str()
    assert train_bpe(SOURCES[:1], 600).to_str() != TOKENIZER.to_str()


def test_special_tokens_come_first() -> None:
    tokenizer = train_bpe(["abc"], 258, special_tokens=("<|endoftext|>", "<|pad|>"))
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|pad|>")] == [0, 1]
    assert encode(tokenizer, "a<|pad|>") == [tokenizer.token_to_id("a"), 1]


def test_a_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size 256 .* at least 257"):
        train_bpe(["abc"], 256)


def test_saved_directory_loads_in_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save(TOKENIZER, tmp_path / "model")
    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        loaded = kind.from_pretrained(str(tmp_path / "model"), local_files_only=True)
        assert loaded.eos_token == END_OF_TEXT
        assert loaded.eos_token_id == TOKENIZER.token_to_id(END_OF_TEXT)
        assert len(loaded) == 600
        for text in (*SOURCES, "spaces , before . punctuation ' s !"):
            assert loaded(text)["input_ids"] == encode(TOKENIZER, text)
            assert loaded.decode(loaded(text)["input_ids"]) == text


def test_loads_what_it_saved_from_the_file_or_the_directory(tmp_path: Path) -> None:
    save(TOKENIZER, tmp_path)
    assert load(tmp_path).to_str() == load(tmp_path / "tokenizer.json").to_str() == TOKENIZER.to_str()


def test_loading_turns_off_truncation_and_padding(tmp_path: Path) -> None:
    cutting = Tokenizer.from_str(TOKENIZER.to_str())
    cutting.enable_truncation(max_length=3)
    cutting.enable_padding(length=8)
    cutting.save(str(tmp_path / "tokenizer.json"))
    assert encode(load(tmp_path), SOURCES[0]) == encode(TOKENIZER, SOURCES[0])


def test_a_tokenizer_that_cannot_be_loaded_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json does not exist"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be read"):
        load(tmp_path)


def test_the_end_of_text_token_is_the_declared_or_a_known_one() -> None:
    llama = train_bpe(["a"], 260, special_tokens=("<|eot_id|>", "</s>", "<|end_of_text|>"))
    assert end_of_text_token(llama) == "<|end_of_text|>"
    assert end_of_text_token(llama, "<|eot_id|>") == "<|eot_id|>"
    assert end_of_text_token(llama, "<x>") == "<|end_of_text|>"
    with pytest.raises(ValueError, match=r"no end-of-text token <\|endoftext\|> or "):
        end_of_text_token(train_bpe(["a"], 257, special_tokens=("<stop>",)))

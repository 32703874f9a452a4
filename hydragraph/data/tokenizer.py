"""Byte-level BPE: train it on a corpus, load one that exists, save one for Hugging Face's classes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"

# What published tokenizers call it: GPT-2 and Qwen, Llama 3, Gemma, Llama 2 and T5, BERT. "</s>" comes late, because a
# vocabulary may also hold it as the HTML tag that it is.
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "[SEP]")


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """Train a byte-level BPE: it encodes any text without loss, and equal texts in any order give an equal tokenizer.

    Args:
        texts: documents, drawn once.
        vocab_size: tokens in all, special ones and the 256 bytes included; fewer are made when the texts run out of
            pairs to merge, so size models by `get_vocab_size()`.
        special_tokens: they get the first ids, in order.

    Raises:
        ValueError: the vocabulary cannot hold the bytes and the special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(special_tokens)
    if vocab_size < least:
        raise ValueError(f"vocab_size {vocab_size}: 256 bytes and the special tokens need {least}: ask for more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Load a tokenizer.json, or the one in a directory, without the truncation and padding that it may carry.

    Raises:
        ValueError: there is no such file, or it is not a tokenizer.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"tokenizer {file} does not exist: name a tokenizer.json or a directory that has one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the bindings raise bare Exceptions
        raise ValueError(f"tokenizer {file} cannot be read ({error}): give one saved by Hugging Face") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, end_of_text: str | None = None) -> None:
    """Write tokenizer.json, and the configuration with which `transformers.AutoTokenizer` loads the directory.

    Args:
        tokenizer: any; its end-of-text token becomes the directory's `eos_token`.
        directory: made if missing; other files in it are left alone.
        end_of_text: as for `end_of_text_token`.
    """
    end = end_of_text_token(tokenizer, end_of_text)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    configuration = {
        # The name that transformers 4 and 5 both know.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        # Decoding must give back the text exactly, spaces before punctuation included.
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(configuration, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def end_of_text_token(tokenizer: Tokenizer, token: str | None = None) -> str:
    """Return the token that ends a document: `token`, or the first well-known one that the tokenizer has.

    Raises:
        ValueError: the tokenizer lacks `token`, or has no well-known one.
    """
    candidates = _KNOWN_ENDS if token is None else (token,)
    for candidate in candidates:
        if tokenizer.token_to_id(candidate) is not None:
            return candidate
    named = " or ".join(candidates)
    raise ValueError(f"the tokenizer has no end-of-text token {named}: pass end_of_text, one of its special tokens")

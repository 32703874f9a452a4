"""Training of byte-level BPE tokenizers, and loading and saving of Hugging Face tokenizers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hydragraph.data.json_object import read_object
from hydragraph.spec.record import read_text

END_OF_TEXT = "<|endoftext|>"

FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model"),
)

# Common end-of-text tokens, in order of preference ("</s>" may also be an HTML tag).
_KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>", "[SEP]")


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (END_OF_TEXT,)) -> Tokenizer:
    """Train a byte-level BPE tokenizer; the order of `texts` does not matter.

    The vocabulary has at most `vocab_size` tokens, including special tokens and 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + len(special_tokens)
    if vocab_size < least:
        raise ValueError(f"vocab_size {vocab_size} is too small for 256 bytes and special tokens: set at least {least}")
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
    """Load a tokenizer from tokenizer.json or its directory, and disable truncation and padding."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"tokenizer {file} does not exist: name a tokenizer.json or its directory")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise ValueError(f"tokenizer {file} cannot be read ({error}): save it again with transformers") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path) -> None:
    end = end_of_text_token(tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    configuration = {
        # In transformers 4 and 5.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        # Decoding must be exact.
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(configuration, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def copy(source: Path, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for path in files(source):
        shutil.copyfile(path, directory / path.name)


def files(directory: Path) -> list[Path]:
    return [path for name in FILES if (path := directory / name).is_file()]


def end_of_text_token(tokenizer: Tokenizer, declared: str | None = None) -> str:
    candidates = _KNOWN_ENDS if declared is None else (declared, *_KNOWN_ENDS)
    for candidate in candidates:
        if tokenizer.token_to_id(candidate) is not None:
            return candidate
    special = sorted(t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special)
    shown = f" ({', '.join(special[:8])})" if special else ""
    name = json.dumps({"eos_token": special[0] if special else "..."})
    raise ValueError(
        f"the tokenizer has no end-of-text token {' or '.join(candidates)}: name one of its tokens{shown} in a "
        f"tokenizer_config.json next to its tokenizer.json, as in {name}"
    )


def end_id(tokenizer: Tokenizer, directory: Path) -> int:
    declared = special_tokens(directory).get("eos_token")
    return tokenizer.get_vocab()[end_of_text_token(tokenizer, declared)]


def special_tokens(directory: Path) -> dict[str, str]:
    tokens_by_name: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _configuration(directory / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens_by_name[key] = text
    return tokens_by_name


def chat_template(directory: Path) -> str | None:
    """Return a tokenizer directory's chat template (the "default" one of several), or None."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return read_text(file, "save the tokenizer again")
    template = _configuration(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _configuration(path: Path) -> dict[str, Any]:
    return read_object(path, "save the tokenizer again with transformers") if path.is_file() else {}

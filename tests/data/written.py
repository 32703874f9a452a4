"""Token files of texts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from hydragraph.data.token_file import TokenFile, encode_texts, vocabulary_of, write_encoded
from hydragraph.data.tokenizer import end_of_text_token, id_of


def write_tokens(path: Path, documents: Iterable[str], tokenizer: Tokenizer) -> TokenFile:
    """Encode texts, end each with the end-of-text token, and write them to a token file."""
    end = id_of(tokenizer, end_of_text_token(tokenizer))
    return write_encoded(path, encode_texts(documents, tokenizer, end), vocabulary_of(tokenizer), end, False)

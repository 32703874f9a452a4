"""Token files of texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from hydragraph.data import corpus
from hydragraph.data.chat import DocumentEncoder
from hydragraph.data.documents import Document
from hydragraph.data.token_file import TokenFile, batched, vocabulary_of, write_encoded
from hydragraph.data.tokenizer import end_of_text_token


def write_tokens(path: Path, documents: Iterable[str], tokenizer: Tokenizer) -> TokenFile:
    """Encode texts, end each with the end-of-text token, and write them to a token file."""
    end = tokenizer.get_vocab()[end_of_text_token(tokenizer)]
    encoder = DocumentEncoder(tokenizer, end)
    batches = (encoder.encode_texts(batch) for batch in batched(documents, len))
    return write_encoded(path, batches, vocabulary_of(tokenizer), end, False)


def tokens_of(file: TokenFile) -> list[Tensor]:
    """Read all documents."""
    return [file.slice(document, 0, int(length)) for document, length in enumerate(file.lengths)]


def documents(*paths_and_suffixes: Any, **options: Any) -> Iterator[Document]:
    """Return a corpus's documents without their places."""
    return (placed.document for placed in corpus.documents(*paths_and_suffixes, **options))

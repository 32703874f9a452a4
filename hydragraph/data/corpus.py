"""Documents from files and directories of text, .jsonl and Parquet, always in the same order."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class CorpusReport:
    """What a reading met; `documents` fills it in while it is consumed.

    Attributes:
        documents: how many were yielded.
        empty: how many were left out because they hold no text (an empty file or string, or a null).
        undecodable: the files, lines and rows that were left out because they are not valid UTF-8 text.
    """

    documents: int = 0
    empty: int = 0
    undecodable: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        """Return one sentence for people, naming at most three of the undecodable places."""
        text = f"read {self.documents} documents; left out {self.empty} empty"
        if not self.undecodable:
            return text
        named = ", ".join(self.undecodable[:3])
        rest = len(self.undecodable) - 3
        more = f" and {rest} more" if rest > 0 else ""
        return f"{text} and {len(self.undecodable)} that are not UTF-8 text ({named}{more})"


def files(paths: Sequence[Path], suffixes: tuple[str, ...] | None = None) -> list[Path]:
    """List a corpus's files: the paths in the order given, each directory walked in sorted order.

    Args:
        paths: files, taken whatever their suffix, and directories. Inside a directory, hidden entries and
            `__pycache__` are skipped, and links to directories are not followed.
        suffixes: which files of a directory to take, such as `(".py", ".md")`; None: all.

    Raises:
        ValueError: a path does not exist, a file is reached twice, a suffix lacks its dot, or there is no file.
    """
    for suffix in suffixes or ():
        if not suffix.startswith("."):
            raise ValueError(f"corpus suffix {suffix!r} does not start with a dot: write {'.' + suffix!r}")
    reached: dict[str, Path] = {}
    for root in map(Path, paths):
        for path in _walk(root, suffixes):
            absolute = os.path.abspath(path)
            if absolute in reached:
                # Its text would count twice, and one copy could be trained on while the other is held out.
                first = reached[absolute]
                raise ValueError(f"corpus file {path} is reached twice, from {first} and from {root}: list it once")
            reached[absolute] = root
    if not reached:
        suffix_text = f" with a suffix of {', '.join(suffixes)}" if suffixes else ""
        raise ValueError(
            f"no corpus file{suffix_text} in {[str(p) for p in paths]}: name at least one file or directory"
        )
    return [Path(path) for path in reached]


def documents(
    paths: Sequence[Path],
    suffixes: tuple[str, ...] | None = None,
    text_field: str = "text",
    report: CorpusReport | None = None,
) -> Iterator[str]:
    """Yield every document of a corpus: a .jsonl line, a Parquet row, or any other file as a whole.

    Texts keep their line ends; a leading byte-order mark is dropped. Documents without text and undecodable ones are
    left out, counted in `report`, and logged in one sentence at the end (a warning where any was undecodable).

    Args:
        paths, suffixes: as for `files`.
        text_field: the field of a .jsonl object, or the column of a Parquet table, that holds the text.
        report: filled in while documents are drawn; None: only logged.

    Raises:
        ValueError: as for `files`, at once; while drawing: a line or table without that field, or a broken file.
        ImportError: a .parquet file, and pyarrow is not installed.
    """
    return _draw(files(paths, suffixes), text_field, CorpusReport() if report is None else report)


def fingerprint(paths: Sequence[Path], suffixes: tuple[str, ...] | None = None, text_field: str = "text") -> str:
    """Hash a corpus's files by absolute path, size and modification time (ns), for caching: 64 hexadecimal digits."""
    digest = hashlib.sha256(json.dumps(["corpus", 1, text_field]).encode())
    for path in files(paths, suffixes):
        stat = path.stat()
        digest.update(os.fsencode(path) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _walk(root: Path, suffixes: tuple[str, ...] | None) -> Iterator[Path]:
    """Yield one file, or the files of one directory in sorted order."""
    if root.is_file():
        yield root
        return
    if not root.is_dir():
        raise ValueError(f"corpus path {root} is not a file or directory: correct the path")
    for folder, folders, names in os.walk(root, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            # is_file: opening a pipe would block forever, and a dangling link has nothing to read.
            matches = suffixes is None or path.suffix.lower() in {suffix.lower() for suffix in suffixes}
            if matches and not name.startswith(".") and path.is_file():
                yield path


def _raise(error: OSError) -> None:
    """Make os.walk report a directory that it cannot list, instead of passing it over."""
    raise error


def _draw(paths: list[Path], text_field: str, report: CorpusReport) -> Iterator[str]:
    """Yield the documents of the files, counting what is left out, and log the count at the end."""
    for path in paths:
        for text in _read(path, text_field, report):
            if text:
                report.documents += 1
                yield text
            else:
                report.empty += 1
    level = logging.WARNING if report.undecodable else logging.INFO
    logging.getLogger(__name__).log(level, "%s", report.sentence())


def _read(path: Path, text_field: str, report: CorpusReport) -> Iterator[str | None]:
    """Yield the texts of one file; None where a text is null."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return _read_jsonl(path, text_field, report)
    if suffix == ".parquet":
        return _read_parquet(path, text_field, report)
    return _read_text(path, report)


def _read_text(path: Path, report: CorpusReport) -> Iterator[str]:
    """Yield a whole file as one text."""
    try:
        # From bytes: reading in text mode would rewrite line ends.
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        report.undecodable.append(str(path))
        return
    yield text


def _read_jsonl(path: Path, text_field: str, report: CorpusReport) -> Iterator[str | None]:
    """Yield one text per line that is not blank."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                text = _parse(line.decode("utf-8-sig" if number == 1 else "utf-8"), text_field, place)
                (text or "").encode()  # a lone \ud800 escape is legal JSON, but not Unicode text
            except UnicodeError:
                report.undecodable.append(place)
                continue
            yield text


def _parse(line: str, text_field: str, place: str) -> str | None:
    """Return the text of one .jsonl line."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}): write one JSON object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a {type(record).__name__}, not an object: write {{{json.dumps(text_field)}: ...}}")
    if text_field not in record:
        texts = sorted(name for name, value in record.items() if isinstance(value, str))
        if texts:
            raise ValueError(f"{place}: no field {text_field!r}: set text_field to one of {texts}")
        for name in record:
            _text(record[name], name, place)  # says what it is instead
        raise ValueError(f"{place}: no field {text_field!r}, nor any other: write {{{json.dumps(text_field)}: ...}}")
    return _text(record[text_field], text_field, place)


def _read_parquet(path: Path, text_field: str, report: CorpusReport) -> Iterator[str | None]:
    """Yield one text per row, a few thousand rows in memory at a time."""
    pyarrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as table:
            columns = table.schema_arrow.names
            if text_field not in columns:
                raise ValueError(f"{path}: no column {text_field!r}: set text_field to one of {columns}")
            row = 0
            for batch in table.iter_batches(batch_size=4096, columns=[text_field]):
                for scalar in batch.column(0):
                    row += 1
                    place = f"{path}: row {row}"
                    try:
                        text = _text(scalar.as_py(), text_field, place)
                    except UnicodeDecodeError:
                        report.undecodable.append(place)
                        continue
                    yield text
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({error}): write or download it again") from error


def _pyarrow(path: Path) -> tuple[Any, Any]:
    """Import pyarrow, which only Parquet needs."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"{path}: reading Parquet needs pyarrow: pip install 'hydragraph[train]'") from error
    return pyarrow, parquet


def _text(value: object, text_field: str, place: str) -> str | None:
    """Check that a record's field is text or null."""
    if value is None or isinstance(value, str):
        return value
    chat = isinstance(value, list) and any(isinstance(turn, dict) and "role" in turn for turn in value)
    if chat:
        raise ValueError(
            f"{place}: {text_field!r} is a conversation, which is not read as such: write each as one text "
            "(tokenizer.apply_chat_template(messages, tokenize=False)) and set text_field to that field"
        )
    raise ValueError(f"{place}: {text_field!r} is a {type(value).__name__}, not text: set text_field to a text field")

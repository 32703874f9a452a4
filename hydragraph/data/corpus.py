"""Documents from files and directories, in a fixed order."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from itertools import islice
from pathlib import Path
from typing import Any

from hydragraph.data import tables
from hydragraph.data.compressed import is_compressed, opened, suffix_of
from hydragraph.data.documents import OF_MESSAGES, PLAIN, Conversation, Document, FieldNames, Format, Preference
from hydragraph.errors import listed, type_text


@dataclass
class CorpusReport:
    """Counts of read and skipped documents, updated while `documents` is iterated."""

    documents: int = 0
    empty: int = 0
    undecodable: list[str] = field(default_factory=list)
    unread: dict[str, None] = field(default_factory=dict, compare=False)
    bytes: int = field(default=0, compare=False)
    read: int = field(default=0, compare=False)

    @property
    def part(self) -> float:
        return min(self.read / self.bytes, 1.0) if self.bytes else 0.0

    def sentence(self) -> str:
        text = f"read {self.documents} documents; skipped {self.empty} empty"
        if self.unread:
            text = f"{text}; did not read the fields {', '.join(self.unread)}"
        if not self.undecodable:
            return text
        return f"{text}; skipped {len(self.undecodable)} that are not UTF-8 text ({listed(self.undecodable)})"


def files(paths: Sequence[Path], suffixes: tuple[str, ...] | None = None) -> list[Path]:
    """List a corpus's files, in the order of `paths`; a directory's files are sorted.

    Args:
        paths: files and directories. Hidden entries, `__pycache__` and links to directories are skipped; of directories
            saved by `datasets`, only Arrow files are listed.
        suffixes: suffixes of a directory's files, such as `(".py", ".md")`. None: all record files (.jsonl, .parquet,
            ...), without test and validation splits if there are training splits, or else all text files.

    Raises:
        ValueError: a path or suffix is invalid, paths lead to the same file, or no file is found.
    """
    for suffix in suffixes or ():
        if not suffix.startswith("."):
            raise ValueError(f"corpus suffix {suffix!r} does not start with a dot: write {'.' + suffix!r}")
    # reached: absolute path of a file -> the argument that led there
    reached: dict[str, Path] = {}
    for root in map(Path, paths):
        for path in _walk(root, suffixes):
            absolute = os.path.abspath(path)
            if absolute in reached:
                first = reached[absolute]
                raise ValueError(f"corpus file {path} is reached twice, from {first} and from {root}: list it once")
            reached[absolute] = root
    if not reached:
        suffix_text = f" with a suffix of {', '.join(suffixes)}" if suffixes else ""
        for path in left_out(paths, suffixes):
            _check_named(path)
        raise ValueError(
            f"no corpus file{suffix_text} in {[str(p) for p in paths]}: name a file, or a directory of files"
        )
    return [Path(path) for path in reached]


@dataclass(frozen=True)
class PlacedDocument:
    """A document and its place, such as "chat.jsonl:3"."""

    place: str
    document: Document


_Found = tuple[str, Document | Preference | None]


def documents(
    paths: Sequence[Path],
    suffixes: tuple[str, ...] | None = None,
    fields: FieldNames = PLAIN,
    report: CorpusReport | None = None,
    limit: int | None = None,
) -> Iterator[PlacedDocument]:
    """Yield every document of a corpus: a .jsonl line, a row of a table, or another file as a whole.

    A pair of answers yields two documents, the preferred one first. Line ends are kept, and byte-order marks removed.
    Documents that are empty or cannot be decoded are skipped, counted in `report` and logged.

    Args:
        limit: maximum number of records.

    Raises:
        ValueError: a path, suffix or file is invalid, or a field is missing.
        ImportError: pyarrow, needed for tables, is not installed.
    """
    return _logged(files(paths, suffixes), fields, CorpusReport() if report is None else report, limit)


def formats(paths: Sequence[Path], suffixes: tuple[str, ...] | None = None, fields: FieldNames = PLAIN) -> set[Format]:
    seen_formats: set[Format] = set()
    for path in files(paths, suffixes):
        suffix = suffix_of(path)
        if suffix in tables.SUFFIXES:
            seen_formats.add(_table_format(path, fields))
            next(_read_table(path, fields, CorpusReport()), None)
        elif suffix in _LINES:
            next(_read_jsonl(path, fields, CorpusReport(), seen_formats), None)
        else:
            with opened(path) as file:
                if _is_text(file.read(_LOOKED_AT)):
                    seen_formats.add("text")
    return seen_formats


_LOOKED_AT_RECORDS = 100
_LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
_LOOKED_AT = 4096


# Control characters that are not in text files
_BINARY = re.compile("[\x00-\x07\x0e-\x1a]")


def _is_text(start: bytes) -> bool:
    """Return whether `start`, which may end within a character, may begin a UTF-8 text file."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    if _BINARY.search(text):
        return False
    return bool(text.strip()) or len(start) == _LOOKED_AT


def refuse_other_encodings(paths: Sequence[Path], suffixes: tuple[str, ...] | None = None) -> None:
    """Raise a ValueError for the first text file that is not UTF-8."""
    for path in files(paths, suffixes):
        if _has_records(path):
            continue
        with opened(path) as file:
            start = file.read(_LARGEST_START)
        if encoding := _other_encoding(start):
            raise ValueError(_encoded(str(path), path, encoding))


_LARGEST_START = 1 << 24
# UTF-32 first: its mark begins with UTF-16's
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def _marked(start: bytes) -> str | None:
    return next((encoding for mark, encoding in _MARKS.items() if start.startswith(mark)), None)


def _other_encoding(start: bytes) -> str | None:
    if encoding := _marked(start):
        return encoding if start.decode(encoding, "ignore").strip() else None
    with suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < _LARGEST_START)
        return None
    return None if _BINARY.search(start.decode("latin-1")) else "LATIN1"


def _encoded(where: str, path: Path, encoding: str) -> str:
    command = f"iconv -f {encoding} -t UTF-8 {path} -o NEW"
    if encoding in _MARKS.values():
        return f"{where}: {encoding} text, not UTF-8: convert the file, for example with {command}"
    return f"{where}: not UTF-8 text: convert the file from its encoding; if that is Latin-1, with {command}"


def fingerprint(paths: Sequence[Path], suffixes: tuple[str, ...] | None = None, fields: FieldNames = PLAIN) -> str:
    """Return 64 hexadecimal digits for `fields` and the files' paths, sizes and modification times."""
    names = {each.name.removesuffix("_field"): getattr(fields, each.name) for each in fields_of(FieldNames)}
    digest = hashlib.sha256(json.dumps(["corpus", 2, names]).encode())
    for path in files(paths, suffixes):
        stat = path.stat()
        digest.update(os.fsencode(path) + f"\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _found_otherwise(path: str) -> str:
    if set(path) & set("*?"):
        return "name a folder, and select its files with data.suffixes"
    if re.match(r"\w+:/", path):
        return "download the file, and name it"
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and not Path(path).suffix:
        return (
            "correct the path, or download the data set from the Hugging Face Hub in Python with "
            f'datasets.load_dataset("{path}")["train"].save_to_disk("data")'
        )
    return "correct the path"


# Suffixes refused as paths, and read from directories only if `suffixes` lists them.
_NO_TEXTS: dict[str, str] = {
    ".json": "write one JSON object per line to a .jsonl file, or rename the file to .txt to read text",
    ".xlsx": "convert the file to Parquet: pandas.read_excel(...).to_parquet(...)",
    **dict.fromkeys((".xz", ".bz2", ".tgz", ".zip", ".tar", ".7z"), "unpack the archive, and name its files"),
    **dict.fromkeys((".pdf", ".docx", ".epub"), "extract its text, and name the text file"),
}


# Ignored if all other files of the directory have suffixes in `_NO_TEXTS`.
_ABOUT = ("README", "LICENSE")
# Splits, as in `datasets`.
_TRAIN = re.compile(r"(?<![a-z])train(ing)?(?![a-z])", re.IGNORECASE)
_EVALUATION = re.compile(r"(?<![a-z])(test(ing)?|val|valid(ation)?|dev|eval(uation)?)(?![a-z])", re.IGNORECASE)


def _check_named(path: Path) -> None:
    way = _NO_TEXTS.get(suffix_of(path))
    if is_compressed(path) and suffix_of(path) in (".parquet", ".arrow"):
        raise ValueError(f"corpus file {path} is a compressed table, which cannot be read: decompress it")
    if way is not None:
        raise ValueError(f"corpus file {path} would be read as plain text: {way}")


def _walk(root: Path, suffixes: tuple[str, ...] | None) -> Iterator[Path]:
    if root.is_file():
        _check_named(root)
        yield root
        return
    if not root.is_dir():
        raise ValueError(f"corpus path {root} is not a file or directory: {_found_otherwise(str(root))}")
    paths = list(_inside(root, suffixes))
    if suffixes is None:
        texts = [path for path in paths if suffix_of(path) not in _NO_TEXTS]
        records = _of_training([path for path in texts if _has_records(path)], root)
        beside_data = len(texts) < len(paths) and all(path.stem.upper() in _ABOUT for path in texts)
        paths = records or ([] if beside_data else texts)
    yield from paths


def _of_training(paths: list[Path], root: Path) -> list[Path]:
    names = {path: str(path.relative_to(root)) for path in paths}
    evaluated = [path for path in paths if _EVALUATION.search(names[path]) and not _TRAIN.search(names[path])]
    trained = [path for path in paths if path not in evaluated]
    return trained if any(_TRAIN.search(names[path]) for path in trained) else paths


def left_out(paths: Sequence[Path], suffixes: tuple[str, ...] | None = None) -> list[Path]:
    roots = [root for root in map(Path, paths) if root.is_dir()] if suffixes is None else []
    return [path for root in roots for path in sorted(set(_inside(root, None)) - set(_walk(root, None)))]


def unread(
    paths: Sequence[Path],
    suffixes: tuple[str, ...] | None = None,
    fields: FieldNames = PLAIN,
    template: str | None = None,
) -> list[str]:
    """Return the unread fields in each file's first records, except those that the chat template's text names."""
    report = CorpusReport()
    for path in files(paths, suffixes):
        for _, document in islice(_read(path, fields, report) if _has_records(path) else (), _LOOKED_AT_RECORDS):
            pair = (document.chosen, document.rejected) if isinstance(document, Preference) else (document,)
            said = [message for each in pair if isinstance(each, Conversation) for message in each.messages]
            names = {name: None for message in said for name in message if name not in OF_MESSAGES}
            report.unread |= {f"messages: {name}": None for name in names if template and name not in template}
    return list(report.unread)


def _has_records(path: Path) -> bool:
    return suffix_of(path) in (*_LINES, *tables.SUFFIXES)


def _inside(root: Path, suffixes: tuple[str, ...] | None) -> Iterator[Path]:
    for folder, folders, names in os.walk(root, onerror=_raise):
        saved = tables.saved_files(Path(folder))
        if saved is not None:
            folders.clear()
            yield from saved
            continue
        if _is_output(set(names)):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            path = Path(folder, name)
            matches = suffixes is None or _ends_in(path, suffixes)
            if matches and not name.startswith(".") and path.is_file():
                yield path


def _is_output(names: set[str]) -> bool:
    run = "config.yaml" in names and not names.isdisjoint({"metrics.jsonl", "owner.json"})
    return run or ("tokenizer.json" in names and any(re.fullmatch(r"tokens(-\d+)?\.bin", name) for name in names))


def _ends_in(path: Path, suffixes: tuple[str, ...]) -> bool:
    asked = {suffix.lower() for suffix in suffixes}
    outer = path.suffix.lower()
    return bool(asked & {outer, suffix_of(path), suffix_of(path) + outer})


def _raise(error: OSError) -> None:  # by default, os.walk skips unreadable directories
    raise error


def _logged(paths: list[Path], fields: FieldNames, report: CorpusReport, limit: int | None) -> Iterator[PlacedDocument]:
    for place, document in islice(_draw(paths, fields, report), limit):
        if isinstance(document, Preference):
            yield PlacedDocument(f"{place}, {fields.chosen_field}", document.chosen)
            yield PlacedDocument(f"{place}, {fields.rejected_field}", document.rejected)
        else:
            yield PlacedDocument(place, document)
    level = logging.WARNING if report.undecodable or report.unread else logging.INFO
    logging.getLogger(__name__).log(level, "%s", report.sentence())


def _draw(paths: list[Path], fields: FieldNames, report: CorpusReport) -> Iterator[tuple[str, Document | Preference]]:
    sizes = [path.stat().st_size for path in paths]
    report.bytes += sum(sizes)
    behind = report.read
    for path, size in zip(paths, sizes, strict=True):
        for place, document in _read(path, fields, report):
            if document:
                report.documents += 1
                yield place, document
            else:
                report.empty += 1
        behind += size
        report.read = behind


def _read(path: Path, fields: FieldNames, report: CorpusReport) -> Iterator[_Found]:
    suffix = suffix_of(path)
    if suffix in _LINES:
        return _read_jsonl(path, fields, report)
    if suffix in tables.SUFFIXES:
        return _read_table(path, fields, report)
    return _read_text(path, report)


def _read_text(path: Path, report: CorpusReport) -> Iterator[_Found]:
    text: str | None = None
    with suppress(UnicodeDecodeError), opened(path) as file:
        # Text mode would change line ends
        text = file.read().decode("utf-8-sig")
    if text is None or _BINARY.search(text):
        report.undecodable.append(str(path))
    else:
        yield str(path), text if text.strip() else None


def _read_jsonl(
    path: Path, fields: FieldNames, report: CorpusReport, formats: set[Format] | None = None
) -> Iterator[_Found]:
    format: Format | None = None
    with opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            report.read += 0 if is_compressed(path) else len(line)
            if not line.strip():
                continue
            place = f"{path}:{number}"
            if number == 1 and (encoding := _marked(line)):
                raise ValueError(_encoded(place, path, encoding))
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                record = _parse(text, fields, place)
                # A lone \ud800 escape is legal JSON, but not Unicode
                if "\\ud" in text or "\\uD" in text:
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeError:
                report.undecodable.append(place)
                continue
            if format is None:
                format = "text" if fields.format == "text" else fields.format_of(record, place)
                if formats is not None:
                    formats.add(format)
            report.unread |= dict.fromkeys(fields.unread(record, format))
            yield place, fields.document(record, format, place)


def _parse(line: str, fields: FieldNames, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON ({error}): write one JSON object per line") from error
    except RecursionError as error:
        raise ValueError(f"{place}: nested too deeply to be read: write one flat JSON object per line") from error
    if not isinstance(record, dict):
        raise ValueError(f"{place}: {type_text(record)}, not an object: write {{{json.dumps(fields.text_field)}: ...}}")
    return record


def _table_format(path: Path, fields: FieldNames) -> Format:
    names = tables.columns(path)
    format = fields.format_of(names, str(path), "column")
    if format == "text" and fields.text_field not in names:
        first = filter(None, islice(tables.rows(path, names), 100))
        texts = sorted({name for row in first for name, value in row.items() if isinstance(value, str)})
        remedy = f"set text_field to one of {texts}" if texts else f"add a text column; none of {names} holds text"
        raise ValueError(f"{path}: no column {fields.text_field!r}: {remedy}")
    return format


def _read_table(path: Path, fields: FieldNames, report: CorpusReport) -> Iterator[_Found]:
    format = _table_format(path, fields)
    read = fields.read(format)
    report.unread |= dict.fromkeys(name for name in tables.columns(path) if name not in read)
    for number, row in enumerate(tables.rows(path, fields.names), start=1):
        place = f"{path}: row {number}"
        if row is None:
            report.undecodable.append(place)
            continue
        yield place, fields.document(row, format, place)

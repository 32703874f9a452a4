"""Rows of Parquet, Arrow and CSV files, and of directories saved by `datasets`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydragraph.data.compressed import suffix_of
from hydragraph.data.json_object import read_object

_KINDS = {".parquet": "Parquet", ".arrow": "Arrow", ".csv": "CSV", ".tsv": "TSV"}
SUFFIXES = tuple(_KINDS)
_ROWS = 4096
# Maximum bytes in memory at a time, and maximum bytes of a row
_CSV_BYTES = 1 << 24
_REMEDY = "save the dataset again"

Row = Mapping[str, Any]


def columns(path: Path) -> list[str]:
    with _table(path) as (names, _):
        return names


def rows(path: Path, wanted: Collection[str]) -> Iterator[Row | None]:
    """Yield each row's wanted columns, or None for a row that is not UTF-8."""
    with _table(path) as (names, batches):
        chosen = [name for name in names if name in wanted]
        for batch in batches(chosen):
            arrays = [batch.column(batch.schema.get_field_index(name)) for name in chosen]
            for i in range(batch.num_rows):
                try:
                    row = {name: array[i].as_py() for name, array in zip(chosen, arrays, strict=True)}
                except UnicodeDecodeError:
                    yield None
                    continue
                yield row


def saved_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a `Dataset.save_to_disk` directory, in order; None for other directories."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = read_object(splits, _REMEDY).get("splits", [])
        named = " or ".join(str(folder / name) for name in names)
        raise ValueError(f"{folder} holds the splits {', '.join(names)} of a dataset: name one, such as {named}")
    state = folder / "state.json"
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    data_files = [folder / part["filename"] for part in read_object(state, _REMEDY).get("_data_files", [])]
    missing = [str(path) for path in data_files if not path.is_file()]
    if missing or not data_files:
        raise ValueError(f"{state} must name existing files, but names {', '.join(missing) or 'none'}: {_REMEDY}")
    return data_files


@contextmanager
def _table(path: Path) -> Iterator[tuple[list[str], Any]]:
    kind = _KINDS[suffix_of(path)]
    try:
        import pyarrow
        from pyarrow import csv, ipc, parquet
    except ImportError as error:
        raise ImportError(f"{path}: reading {kind} needs pyarrow: pip install 'hydragraph[train]'") from error
    try:
        if kind == "Parquet":
            with parquet.ParquetFile(path) as table:
                names = list(table.schema_arrow.names)
                yield names, lambda chosen: table.iter_batches(batch_size=_ROWS, columns=chosen)
            return
        if kind in ("CSV", "TSV"):
            with _csv(csv, path, "\t" if kind == "TSV" else ",") as batches:
                yield list(batches.schema.names), lambda _: batches
            return
        with pyarrow.memory_map(str(path)) as source:
            try:
                # `datasets` writes streams, other programs files; only opening one tells them
                # apart.
                reader = ipc.open_stream(source)
                batches = reader
            except pyarrow.ArrowInvalid:
                reader = ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            yield list(reader.schema.names), lambda _: batches
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable {kind} file ({error}): write or download it again") from error


def _csv(csv: Any, path: Path, delimiter: str) -> Any:
    how = {
        "read_options": csv.ReadOptions(block_size=_CSV_BYTES),
        "parse_options": csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
    }
    with csv.open_csv(path, **how) as reader:
        names = reader.schema.names
    other = {";": "write commas", "\t": "call it .tsv", "|": "write commas"}
    found = next((sign for sign in other if len(names) == 1 and sign in names[0]), None)
    if found is not None:
        raise ValueError(f"{path}: the columns are separated by {found!r}, not by {delimiter!r}: {other[found]}")
    texts = csv.ConvertOptions(column_types=dict.fromkeys(names, "string"), check_utf8=False)
    return csv.open_csv(path, convert_options=texts, **how)

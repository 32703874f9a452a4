"""Directories of safetensors files, read in boxes (slices) of tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hydragraph.errors import Unsupported, listed

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")

T = TypeVar("T")
Read = Callable[[Sequence[int], Sequence[int]], Tensor]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; `dtype` is a safetensors name, such as "BF16"."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def contents(path: Path) -> dict[str, StoredTensor]:
    files, places = _files(path)
    tensors = {}
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118 not a mapping
                if places.get(key, file.name) == file.name:
                    part = opened.get_slice(key)
                    tensors[key] = StoredTensor(file, key, tuple(part.get_shape()), part.get_dtype())
    absent = [f"{key} in {place}" for key, place in places.items() if key not in tensors]
    if absent:
        raise ValueError(
            f"pretrained {path}: {_INDEX} lists tensors that no file has ({listed(absent)}): copy all files"
        )
    return tensors


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    if (path / _FILE).is_file():
        return [path / _FILE], {}
    if not (path / _INDEX).is_file():
        if any((path / name).is_file() for name in _PICKLED):
            raise Unsupported(
                "the weights are pickle files (.bin), which cannot be read in parts and can run any code",
                where=f"pretrained {path}",
                remedy="load the model with transformers' from_pretrained and write safetensors with save_pretrained",
            )
        raise ValueError(
            f"pretrained {path} has neither {_FILE} nor {_INDEX}: name a directory that save_pretrained wrote"
        )
    try:
        places = dict(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"pretrained {path}: {_INDEX} is damaged ({error}): copy the directory again") from error
    absent = sorted({place for place in places.values() if not (path / place).is_file()})
    if absent:
        raise ValueError(
            f"pretrained {path}: files named in {_INDEX} are missing ({listed(absent)}): copy the directory again"
        )
    return [path / place for place in sorted(set(places.values()))], places


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"pretrained {file} is damaged or incomplete ({error}): copy it again") from error


def readers(wanted: Iterable[tuple[T, StoredTensor]]) -> Iterator[tuple[T, Read]]:
    """Yield each item with a reader of boxes (offsets, sizes) of its tensor."""
    by_file: dict[Path, list[tuple[T, str]]] = {}
    for item, stored in wanted:
        by_file.setdefault(stored.file, []).append((item, stored.key))
    for file, entries in by_file.items():
        with _opened(file) as opened:
            for item, key in entries:
                yield item, _reader(opened.get_slice(key))


def _reader(part: Any) -> Read:
    def read(offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        box: Tensor = part[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        return box

    return read

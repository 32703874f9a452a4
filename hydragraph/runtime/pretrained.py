"""Start from a Hugging Face directory of safetensors files, of which each rank reads only what it owns.

Names in files become names of the model by transformers' own conversion (`transformers.conversion_mapping`). Headers
are read by every rank; of the elements, each rank reads the boxes of its home shard, so that no process ever holds
the model, nor more of any tensor than its share.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.huggingface import is_huggingface
from hydragraph.runtime.agreement import together, together_own
from hydragraph.runtime.groups import Groups
from hydragraph.runtime.sharded import sharded_weights
from hydragraph.runtime.state import HomeState

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})  # what safetensors calls the dtypes that fp32 stands for
_NAMED = 3  # keys that an error names; the others it counts


@dataclass(frozen=True, eq=False)
class Names:
    """What turns the names in files into those of a model, without the model.

    Attributes:
        sources: every key of the model's state dict -> the canonical parameter or buffer that holds its value.
        conversions: transformers' for this model, in order; none for a module of your own.
        prefix: of the base model, which files of the base model lack and files of a head's model have.
        unexpected: finds keys that transformers, too, leaves unread.
    """

    sources: Mapping[str, str]
    conversions: tuple[Any, ...]
    prefix: str | None
    unexpected: re.Pattern[str] | None

    @staticmethod
    def of(model: nn.Module, sources: Mapping[str, str]) -> Names:
        """Take what is needed from a model, which may be on the meta device."""
        if not is_huggingface(model):
            return Names(sources, (), None, None)
        from transformers.conversion_mapping import get_model_conversion_mapping

        buffers = [name for name, _ in model.named_buffers()]
        ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        # Buffers that older versions of transformers saved, under names that have moved since.
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            ignored.append(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            ignored.append(r"(^|\.)position_ids$")
        pattern = re.compile("|".join(f"({each})" for each in ignored)) if ignored else None
        conversions = tuple(get_model_conversion_mapping(model))  # type: ignore[arg-type]
        return Names(sources, conversions, str(model.base_model_prefix), pattern)

    def converted(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the name in the model of every key of the files, which no key of the model need have.

        Raises:
            Unsupported: naming a key whose tensor would have to be computed from others.
        """
        if self.prefix is None:
            return {key: key for key in keys}
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        conversions = copy.deepcopy(self.conversions)  # some remember what they have renamed
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        found = {}
        for key in sorted(keys, key=dot_natural_key):
            name, computed = rename_source_key(key, renamings, converters, self.prefix, self.sources)  # type: ignore[arg-type]
            if name not in self.sources and key in self.sources:
                name, computed = rename_source_key(key, [], [], self.prefix, self.sources)  # type: ignore[arg-type]
            if computed is not None:
                _refuse_computed(key, name, converters, computed)
            found[key] = name
        return found


def load(path: Path, home: HomeState, buffers: Mapping[str, Tensor], names: Names, groups: Groups) -> None:
    """Read this rank's shard of the weights, and all persistent buffers, from the files of a directory.

    All ranks call it together. Every header is checked before anything is changed. A tensor that the files hold under
    several tied names must be the same under all of them.

    Args:
        path: holds `model.safetensors`, or `model.safetensors.index.json` and what it names.
        home, buffers: this rank's, overwritten in place; weights of less than 32 bits become fp32 exactly.
        names: of the model.
        groups: of all ranks.

    Raises:
        ValueError: on all ranks: no such files, a damaged one, or keys that are missing, unknown or of another shape.
        Unsupported: tensors that transformers computes from others, quantised ones, or pickled files.
    """
    what = f"load pretrained {path}"
    stored = together_own(groups, what, lambda: _matched(path, home, buffers, names))
    together(groups, what, lambda: _read(path, stored, home, buffers))


# What the files hold.


@dataclass(frozen=True)
class _Stored:
    """One tensor of a file: `dtype` as safetensors calls it."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def _matched(
    path: Path, home: HomeState, buffers: Mapping[str, Tensor], names: Names
) -> dict[str, tuple[_Stored, ...]]:
    """Return canonical parameter or buffer -> where it is stored, once for each tied name that the files use."""
    held = _contents(path)
    found: dict[str, tuple[_Stored, ...]] = {}
    unknown = []
    for key, name in names.converted(held).items():
        source = names.sources.get(name)
        if source is not None:
            found[source] = (*found.get(source, ()), held[key])
        elif names.unexpected is None or not names.unexpected.search(name):
            unknown.append(key)
    shapes = {n: piece.parameter.shape for n, piece in home.pieces.items()}
    shapes |= {n: tuple(b.shape) for n, b in buffers.items() if n in names.sources}
    wrong = [
        f"{s.key} is {list(s.shape)} in {s.file.name} and {list(shapes[n])} in the model"
        for n, several in found.items()
        for s in several
        if s.shape != shapes[n]
    ]
    missing = [name for name in shapes if name not in found]
    faults = [
        *([f"missing in the files: {_some(missing)}"] if missing else ()),
        *([f"unknown to the model: {_some(unknown)}"] if unknown else ()),
        *([f"of another shape: {_some(wrong)}"] if wrong else ()),
    ]
    if faults:
        more = "" if missing or wrong else "; or drop them once: from_pretrained and save_pretrained of your class"
        remedy = f"build the model that the files are of{_class(path)}{more}"
        raise ValueError(f"pretrained {path}: {'; '.join(faults)}: {remedy}")
    _refuse_quantised(path, [s for n, several in found.items() if n in home.pieces for s in several])
    return found


def _contents(path: Path) -> dict[str, _Stored]:
    """Read the headers of all files."""
    files, places = _files(path)
    found = {}
    for file in files:
        with _opened(file) as opened:
            for key in opened.keys():  # noqa: SIM118  it is no mapping
                if places.get(key, file.name) == file.name:
                    part = opened.get_slice(key)
                    found[key] = _Stored(file, key, tuple(part.get_shape()), part.get_dtype())
    absent = [f"{key} in {place}" for key, place in places.items() if key not in found]
    if absent:
        raise ValueError(f"pretrained {path}: {_INDEX} promises {_some(absent)}, which is not there: copy it again")
    return found


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files, and, where there is an index, in which file each key is."""
    if (path / _FILE).is_file():
        return [path / _FILE], {}
    if not (path / _INDEX).is_file():
        if any((path / name).is_file() for name in _PICKLED):
            raise Unsupported(
                "its weights are pickled (.bin), which cannot be read in parts and can run any code",
                where=f"pretrained {path}",
                remedy="read them once with transformers' from_pretrained and write safetensors with save_pretrained",
            )
        raise ValueError(
            f"pretrained {path}: there is neither {_FILE} nor {_INDEX}: name a directory that save_pretrained wrote"
        )
    try:
        places = dict(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"pretrained {path}: {_INDEX} is damaged ({error}): copy it again") from error
    absent = sorted({place for place in places.values() if not (path / place).is_file()})
    if absent:
        raise ValueError(f"pretrained {path}: {_INDEX} names {_some(absent)}, which is not there: copy it again")
    return [path / place for place in sorted(set(places.values()))], places


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file of safetensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"pretrained {file}: it is damaged or incomplete ({error}): copy it again") from error


def _class(path: Path) -> str:
    """Return what the directory's config says of the model's class, as an addition to a sentence."""
    try:
        classes = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
        return f", {classes[0]} with the config beside them"
    except (OSError, LookupError, TypeError, ValueError):
        return ""


def _some(texts: list[str]) -> str:
    rest = f" and {len(texts) - _NAMED} more" if len(texts) > _NAMED else ""
    return ", ".join(texts[:_NAMED]) + rest


# What is refused.


def _refuse_computed(key: str, name: str, converters: Iterable[Any], pattern: str) -> None:
    """Refuse a key that matches one of transformers' converters."""
    converter = next(each for each in converters if pattern in each.source_patterns)
    operations = ", ".join(type(operation).__name__ for operation in converter.operations)
    raise Unsupported(
        f"{key} is not a tensor of the model but becomes a part of {name} by {operations}",
        where="load_pretrained",
        remedy="load it with transformers' from_pretrained, write it with save_pretrained(directory,"
        " save_original_format=False), and start from that directory",
    )


def _refuse_quantised(path: Path, tensors: Iterable[_Stored]) -> None:
    for stored in tensors:
        if stored.dtype not in _FLOATS:
            raise Unsupported(
                f"{stored.key} is stored as {stored.dtype}",
                where=f"pretrained {path}",
                remedy="dequantise the model with transformers and save it as bf16 or fp32",
            )


# Reading.


def _read(
    path: Path, stored: Mapping[str, tuple[_Stored, ...]], home: HomeState, buffers: Mapping[str, Tensor]
) -> None:
    """Read what this rank owns, and compare what the files hold twice."""
    owned = {name: value.boxes for name, value in sharded_weights(home).items()}
    whole = {name: {torch.Size([0] * b.dim()): b} for name, b in buffers.items()}
    parts = {**whole, **owned}
    with torch.no_grad():
        for name, read in _parts((name, several[0]) for name, several in stored.items() if parts[name]):
            for offsets, box in parts[name].items():
                box.copy_(read(offsets, box.shape))
        again = [(name, each) for name, several in stored.items() for each in several[1:] if parts[name]]
        for name, read in _parts(again):
            for offsets, box in parts[name].items():
                if not torch.equal(box, read(offsets, box.shape).to(box)):
                    keys = " and ".join(each.key for each in stored[name])
                    raise ValueError(
                        f"pretrained {path}: {keys} differ, but the model ties them: set tie_word_embeddings to false"
                        " in its config"
                    )


Read = Callable[[torch.Size, torch.Size], Tensor]


def _parts(wanted: Iterable[tuple[str, _Stored]]) -> Iterator[tuple[str, Read]]:
    """Yield each name with what reads a box (offsets, sizes) of its tensor; each file is opened once."""
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, stored in wanted:
        by_file.setdefault(stored.file, []).append((name, stored.key))
    for file, entries in by_file.items():
        with _opened(file) as opened:
            for name, key in entries:
                yield name, _reader(opened.get_slice(key))


def _reader(part: Any) -> Read:
    def read(offsets: torch.Size, sizes: torch.Size) -> Tensor:
        found: Tensor = part[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        return found

    return read

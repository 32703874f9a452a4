"""Loader of a Hugging Face directory of safetensors files: each rank reads only what it owns.

Names in files are converted to names of the model by transformers' own conversion (`transformers.conversion_mapping`).
Every rank reads the headers, and of the elements only the boxes of its home shard, so no process ever holds the whole
model, nor more of any tensor than its share.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hydragraph.checkpoint.weights.other_heads import Family
from hydragraph.checkpoint.weights.safetensors_files import Stored, contents, readers, shortened
from hydragraph.checkpoint.weights.split_tensors import Whole, assemble
from hydragraph.cluster.agreement import together, together_own
from hydragraph.cluster.communicators import Groups
from hydragraph.errors import Unsupported
from hydragraph.frontend.huggingface import is_huggingface
from hydragraph.frontend.peft_adapters import is_peft
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.shard_boxes import sharded_weights

_LOG = logging.getLogger(__name__)
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})  # safetensors' names of the dtypes that convert to fp32


@dataclass(frozen=True, eq=False)
class Names:
    """Conversion of names in files to names of a model, independent of the model object.

    Attributes:
        sources: every key of the model's state dict -> the canonical parameter or buffer that holds its value.
        conversions: transformers' conversions for this model, in order; empty for a custom module.
        prefix: prefix of the base model, absent in files of the base model and present in files of a model with a head.
    """

    sources: Mapping[str, str]
    conversions: tuple[Any, ...]
    prefix: str | None
    unexpected: re.Pattern[str] | None
    family: Family

    @staticmethod
    def of(model: nn.Module | None, sources: Mapping[str, str]) -> Names:
        """Collect the names from a model, which may be on the meta device; without a model, use only the keys."""
        if model is None or not is_huggingface(model) or is_peft(model):
            return Names(sources, (), None, None, Family())
        from transformers.conversion_mapping import get_model_conversion_mapping

        buffers = [name for name, _ in model.named_buffers()]
        ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        # Buffers that older versions of transformers saved, under names that have changed since.
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            ignored.append(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            ignored.append(r"(^|\.)position_ids$")
        pattern = re.compile("|".join(f"({regex})" for regex in ignored)) if ignored else None
        conversions = tuple(get_model_conversion_mapping(model))  # type: ignore[arg-type]
        return Names(sources, conversions, str(model.base_model_prefix), pattern, Family.of(model))

    def placed(self, held: Mapping[str, Stored]) -> list[tuple[str, Whole]]:
        """Return the tensors in the files with their names in the model's naming; the model may not have all of them.

        Raises:
            Unsupported: naming a key whose tensor would have to be computed from others.
        """
        if self.prefix is None:
            return [(key, Whole.of(stored)) for key, stored in held.items()]
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        conversions = copy.deepcopy(self.conversions)  # some store state about renamed keys
        renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        wholes_by_name: list[tuple[str, Whole]] = []
        pieces: dict[str, tuple[Any, dict[str, list[Stored]]]] = {}  # name -> its converter, and the converter's inputs
        for key in sorted(held, key=dot_natural_key):
            name, computed = rename_source_key(key, renamings, converters, self.prefix, self.sources)  # type: ignore[arg-type]
            if name not in self.sources and key in self.sources:
                name, computed = rename_source_key(key, [], [], self.prefix, self.sources)  # type: ignore[arg-type]
            if computed is None:
                wholes_by_name.append((name, Whole.of(held[key])))
                continue
            converter = next(conversion for conversion in converters if computed in conversion.source_patterns)
            _, several = pieces.setdefault(name, (converter, {}))
            several.setdefault(computed, []).append(held[key])
        for name, (converter, several) in pieces.items():
            wholes = assemble(converter, several, name)
            if wholes is None:
                _refuse_computed(next(iter(several.values()))[0].key, name, converter)
            wholes_by_name += wholes.items()
        return wholes_by_name


def load(path: Path, home: HomeState, buffers: Mapping[str, Tensor], names: Names, groups: Groups) -> None:
    """Read this rank's shard of the weights, and all persistent buffers, from the files of a directory.

    All ranks call it together. All headers are checked before any weight changes. A tensor stored under several tied
    names must be equal under all of them. Heads that only other transformers classes have, and keys that transformers
    itself ignores, stay unread, with a warning that names them.

    Args:
        path: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names.
        home, buffers: this rank's, overwritten in place; weights of less than 32 bits become fp32 exactly.
        names: names of the model's parameters and buffers, and their possible names in files (`Names.of`).
        groups: communicators of all ranks that train; each of them calls this function.

    Raises:
        ValueError: on all ranks: files are missing or damaged, or keys are missing, unknown or of another shape.
        Unsupported: tensors that transformers computes from others, quantised ones, or pickled files.
    """
    what = f"load pretrained {path}"
    match = together_own(groups, what, lambda: _matched(path, home, buffers, names))
    if match.unread and groups.world.rank == 0:
        modules = list(dict.fromkeys(key.rpartition(".")[0] for key in match.unread))
        _LOG.warning("pretrained %s: left unread, as the model has no such part: %s", path, shortened(modules, 10))
    together(groups, what, lambda: _read(path, match.stored, home, buffers))


# Matching.


@dataclass(frozen=True)
class _Match:
    """Contents of a directory that belong to the model.

    Attributes:
        stored: canonical parameter or buffer -> its stored tensors, one for each tied name that the files use.
        unread: keys without a place in the model that may be ignored.
    """

    stored: Mapping[str, tuple[Whole, ...]]
    unread: tuple[str, ...]


def _matched(path: Path, home: HomeState, buffers: Mapping[str, Tensor], names: Names) -> _Match:
    """Find every parameter and persistent buffer in the files."""
    places: dict[str, tuple[Whole, ...]] = {}
    unplaced: dict[str, str] = {}
    for name, whole in names.placed(contents(path)):
        source = names.sources.get(name)
        if source is not None:
            places[source] = (*places.get(source, ()), whole)
        else:
            unplaced[whole.key] = name
    shapes = {n: piece.parameter.shape for n, piece in home.pieces.items()}
    shapes |= {n: tuple(b.shape) for n, b in buffers.items() if n in names.sources}
    unknown = _unknown(names, unplaced)
    _refuse_misfit(path, shapes, places, unknown)
    _refuse_quantised(
        path, [s for n, several in places.items() if n in home.pieces for whole in several for s in whole]
    )
    return _Match(places, tuple(key for key in unplaced if key not in unknown))


def _unknown(names: Names, unplaced: Mapping[str, str]) -> list[str]:
    """Return the unplaced keys (key -> name in the model) that belong to no class of the model's family either."""
    other = {k: n for k, n in unplaced.items() if names.unexpected is None or not names.unexpected.search(n)}
    heads = names.family.heads(frozenset(other.values()))
    return [key for key, name in other.items() if name not in heads]


def _class(path: Path) -> str:
    """Return the model's class in the directory's config, as an addition to a sentence."""
    try:
        classes = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
        return f", {classes[0]} with the config beside them"
    except (OSError, LookupError, TypeError, ValueError):
        return ""


# Errors.


def _refuse_computed(key: str, name: str, converter: Any) -> NoReturn:
    """Raise for a key that a transformers converter uses to compute new values."""
    operations = ", ".join(type(operation).__name__ for operation in converter.operations)
    raise Unsupported(
        f"{key} is not a tensor of the model but becomes a part of {name} by {operations}",
        where="load_pretrained",
        remedy="load it with transformers' from_pretrained, write it with save_pretrained(directory,"
        " save_original_format=False), and start from that directory",
    )


def _refuse_misfit(
    path: Path, shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[Whole, ...]], unknown: Sequence[str]
) -> None:
    """Raise if tensors of the model are missing, have another shape, or if keys are unknown to the model's family."""
    wrong = [
        f"{s.key} is {list(s.shape)} in {s.file.name} and {list(shapes[n])} in the model"
        for n, several in found.items()
        for s in several
        if s.shape != shapes[n]
    ]
    missing = [name for name in shapes if name not in found]
    faults = [
        *([f"missing in the files: {shortened(missing)}"] if missing else ()),
        *([f"unknown to the model: {shortened(unknown)}"] if unknown else ()),
        *([f"of another shape: {shortened(wrong)}"] if wrong else ()),
    ]
    if faults:
        more = "" if missing or wrong else "; or drop them once: from_pretrained and save_pretrained of your class"
        remedy = f"build the model that the files are of{_class(path)}{more}"
        raise ValueError(f"pretrained {path}: {'; '.join(faults)}: {remedy}")


def _refuse_quantised(path: Path, tensors: Iterable[Stored]) -> None:
    for stored in tensors:
        if stored.dtype not in _FLOATS:
            raise Unsupported(
                f"{stored.key} is stored as {stored.dtype}",
                where=f"pretrained {path}",
                remedy="dequantise the model with transformers and save it as bf16 or fp32",
            )


# Reading.


def _read(path: Path, stored: Mapping[str, tuple[Whole, ...]], home: HomeState, buffers: Mapping[str, Tensor]) -> None:
    """Read what this rank owns, and compare tensors that the files store twice."""
    owned = {name: value.boxes for name, value in sharded_weights(home).items()}
    whole = {name: {torch.Size([0] * b.dim()): b} for name, b in buffers.items()}
    destinations = {**whole, **owned}
    with torch.no_grad():
        for _, there, here in _meetings(destinations, ((name, several[0]) for name, several in stored.items())):
            here.copy_(there)
        again = ((name, stored_whole) for name, several in stored.items() for stored_whole in several[1:])
        for name, there, here in _meetings(destinations, again):
            if not torch.equal(here, there.to(here)):
                keys = " and ".join(stored_whole.key for stored_whole in stored[name])
                raise ValueError(
                    f"pretrained {path}: {keys} differ, but the model ties them: set tie_word_embeddings to false"
                    " in its config"
                )


def _meetings(
    held: Mapping[str, Mapping[torch.Size, Tensor]], wholes: Iterable[tuple[str, Whole]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, values read, and the destination: the matching part of this rank's boxes of that tensor."""
    requests = (((name, piece), piece.stored) for name, whole in wholes if held[name] for piece in whole.pieces)
    for (name, piece), read in readers(requests):
        for offsets, box in held[name].items():
            within = piece.within(offsets, box.shape)
            if within is not None:
                there = read(*within.source)
                yield name, there.view(within.sizes), box[within.target]

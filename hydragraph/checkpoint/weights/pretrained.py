"""Loader of safetensors directories. Each rank reads all headers, but only the elements that it owns."""

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

from hydragraph.checkpoint.weights.other_heads import ModelFamily
from hydragraph.checkpoint.weights.safetensors_files import StoredTensor, contents, readers
from hydragraph.checkpoint.weights.split_tensors import JoinedTensor, assemble
from hydragraph.cluster.agreement import together, together_own
from hydragraph.cluster.communicators import Groups
from hydragraph.errors import Unsupported, listed
from hydragraph.frontend.huggingface import is_huggingface
from hydragraph.frontend.peft_adapters import is_peft
from hydragraph.runtime.home_state import HomeState
from hydragraph.runtime.shard_boxes import sharded_weights

_LOG = logging.getLogger(__name__)
# Safetensors dtypes that can be converted to fp32
_FLOATS = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True, eq=False)
class TensorNames:
    """Conversion of tensor names in files to names in a model.

    Attributes:
        sources: canonical parameter or buffer name for each state-dict key.
        prefix: `base_model_prefix` of a transformers model, or None.
    """

    sources: Mapping[str, str]
    conversions: tuple[Any, ...]
    prefix: str | None
    unexpected: re.Pattern[str] | None
    family: ModelFamily

    @staticmethod
    def of(model: nn.Module | None, sources: Mapping[str, str]) -> TensorNames:
        if model is None or not is_huggingface(model) or is_peft(model):
            return TensorNames(sources, (), None, None, ModelFamily())
        from transformers.conversion_mapping import get_model_conversion_mapping

        buffers = [name for name, _ in model.named_buffers()]
        transformer: Any = model
        ignored: list[str] = list(getattr(transformer, "_keys_to_ignore_on_load_unexpected", None) or ())
        # Older versions of transformers saved these buffers.
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            ignored.append(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            ignored.append(r"(^|\.)position_ids$")
        pattern = re.compile("|".join(f"({regex})" for regex in ignored)) if ignored else None
        conversions = tuple(get_model_conversion_mapping(transformer))
        return TensorNames(sources, conversions, str(model.base_model_prefix), pattern, ModelFamily.of(model))

    def placed(self, held: Mapping[str, StoredTensor]) -> list[tuple[str, JoinedTensor]]:
        if self.prefix is None:
            return [(key, JoinedTensor.of(stored)) for key, stored in held.items()]
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        conversions = copy.deepcopy(self.conversions)
        renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        # pieces: model tensor -> (its converter, source pattern -> stored tensors)
        wholes_by_name: list[tuple[str, JoinedTensor]] = []
        pieces: dict[str, tuple[Any, dict[str, list[StoredTensor]]]] = {}
        # The annotation asks for a dict, but the function only reads.
        sources: Any = self.sources
        for key in sorted(held, key=dot_natural_key):
            name, computed = rename_source_key(key, renamings, converters, self.prefix, sources)
            # Renamings may match a correct key, which is kept.
            if name not in self.sources and key in self.sources:
                name, computed = rename_source_key(key, [], [], self.prefix, sources)
            if computed is None:
                wholes_by_name.append((name, JoinedTensor.of(held[key])))
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


def load(path: Path, home: HomeState, buffers: Mapping[str, Tensor], names: TensorNames, groups: Groups) -> None:
    """Read this rank's weights, and all persistent buffers, from a directory (collective call).

    All headers are checked before any weight changes. Tied tensors must be equal. Heads that the model does not have,
    and keys that `transformers` ignores, are not read.

    Raises:
        ValueError: on all ranks, if files are missing or damaged, or keys are missing, unknown or of another shape.
        Unsupported: tensors are quantized, pickled, or need an unsupported conversion.
    """
    what = f"load pretrained {path}"
    stored, unread = together_own(groups, what, lambda: _matched(path, home, buffers, names))
    if unread and groups.world.rank == 0:
        modules = list(dict.fromkeys(key.rpartition(".")[0] for key in unread))
        _LOG.warning("pretrained %s: skipped weights that the model does not have: %s", path, listed(modules, 10))
    together(groups, what, lambda: _read(path, stored, home, buffers))


def _matched(
    path: Path, home: HomeState, buffers: Mapping[str, Tensor], names: TensorNames
) -> tuple[Mapping[str, tuple[JoinedTensor, ...]], list[str]]:
    # places: canonical name -> stored tensors, several if tied weights
    #   have several keys
    # unplaced: stored key -> converted name, not in the model
    places: dict[str, tuple[JoinedTensor, ...]] = {}
    unplaced: dict[str, str] = {}
    for name, whole in names.placed(contents(path)):
        source = names.sources.get(name)
        if source is None:
            unplaced[whole.key] = name
        else:
            places[source] = (*places.get(source, ()), whole)
    shapes = {n: piece.parameter.shape for n, piece in home.pieces.items()}
    shapes |= {n: tuple(b.shape) for n, b in buffers.items() if n in names.sources}
    unknown = _unknown(names, unplaced)
    _refuse_misfit(path, shapes, places, unknown)
    _refuse_quantised(path, [s for name in home.pieces for whole in places[name] for s in whole])
    return places, [key for key in unplaced if key not in unknown]


def _unknown(names: TensorNames, unplaced: Mapping[str, str]) -> list[str]:
    other = {k: n for k, n in unplaced.items() if names.unexpected is None or not names.unexpected.search(n)}
    heads = names.family.heads(frozenset(other.values()))
    return [key for key, name in other.items() if name not in heads]


def _class(path: Path) -> str:
    try:
        classes = json.loads((path / "config.json").read_text(encoding="utf-8"))["architectures"]
        return f" ({classes[0]}, with the directory's config)"
    except (OSError, LookupError, TypeError, ValueError):
        return ""


def _refuse_computed(key: str, name: str, converter: Any) -> NoReturn:
    operations = ", ".join(type(operation).__name__ for operation in converter.operations)
    raise Unsupported(
        f"building {name} from the stored tensor {key} needs a conversion ({operations}) that is not supported",
        where="load_pretrained",
        remedy="load the model with transformers' from_pretrained, write it with save_pretrained(directory,"
        " save_original_format=False), and start from that directory",
    )


def _refuse_misfit(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[JoinedTensor, ...]],
    unknown: Sequence[str],
) -> None:
    wrong = [
        f"{s.key} is {list(s.shape)} in {s.file.name} and {list(shapes[n])} in the model"
        for n, several in found.items()
        for s in several
        if s.shape != shapes[n]
    ]
    missing = [name for name in shapes if name not in found]
    faults = [
        *([f"missing in the files: {listed(missing)}"] if missing else ()),
        *([f"unknown to the model: {listed(unknown)}"] if unknown else ()),
        *([f"of another shape: {listed(wrong)}"] if wrong else ()),
    ]
    if faults:
        more = (
            "" if missing or wrong else "; or drop the tensors with your class's from_pretrained, then save_pretrained"
        )
        remedy = f"build the model that the files belong to{_class(path)}{more}"
        raise ValueError(f"pretrained {path}: {'; '.join(faults)}: {remedy}")


def _refuse_quantised(path: Path, tensors: Iterable[StoredTensor]) -> None:
    for stored in tensors:
        if stored.dtype not in _FLOATS:
            raise Unsupported(
                f"{stored.key} is stored as {stored.dtype}",
                where=f"pretrained {path}",
                remedy="dequantize the model with transformers and save it as bf16 or fp32",
            )


def _read(
    path: Path, stored: Mapping[str, tuple[JoinedTensor, ...]], home: HomeState, buffers: Mapping[str, Tensor]
) -> None:
    owned = {name: value.boxes for name, value in sharded_weights(home).items()}
    whole = {name: {torch.Size([0] * b.dim()): b} for name, b in buffers.items()}
    destinations = {**whole, **owned}
    with torch.no_grad():
        # Fill every parameter first, then compare further copies of tied weights.
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
    held: Mapping[str, Mapping[torch.Size, Tensor]], wholes: Iterable[tuple[str, JoinedTensor]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    requests = (((name, piece), piece.stored) for name, whole in wholes if held[name] for piece in whole.pieces)
    for (name, piece), read in readers(requests):
        for offsets, box in held[name].items():
            within = piece.within(offsets, box.shape)
            if within is not None:
                there = read(*within.source)
                yield name, there.view(within.sizes), box[within.target]

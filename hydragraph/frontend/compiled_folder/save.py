"""Writing of a compiled folder."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydragraph.frontend.compiled_folder import record_schema
from hydragraph.frontend.compiled_folder.manifest import (
    NAME,
    Check,
    FolderManifest,
    VariantEntry,
    files_of,
    own_code,
    versions,
)
from hydragraph.frontend.compiled_folder.model_record import ModelRecord
from hydragraph.frontend.compiled_folder.program_records import program_data, variant_data
from hydragraph.ir.program import Block, Program
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.place import place
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from hydragraph.spec.strategy import Strategy

PROGRAM = "program.json"
GRAPHS = "graphs"
# More deeply nested mappings take several lines
_ON_A_LINE = 3


@dataclass(frozen=True, eq=False)
class NamedVariant:
    """Uncompiled variant, for `graphs/{name}.json`."""

    name: str
    keys: tuple[str, ...]
    blocks: tuple[str, ...]
    kind: str
    variant: Variant


def named_variants(variants: Variants, strategies: Iterable[Strategy]) -> list[NamedVariant]:
    program = variants.program
    # first: form of a block -> the first block of this form, whose graphs stand for all.
    # serving: name of that block -> all blocks of the form.
    first: dict[Hashable, Block] = {}
    serving: dict[str, list[str]] = {}
    for block in program.blocks:
        standing = first.setdefault(variants.form(block), block)
        serving.setdefault(standing.name, []).append(block.name)
    needed: dict[tuple[str, StageKind], Block] = {}
    for strategy in strategies:
        for stage in place(program.outline, strategy, [1] * len(strategy.pipelines)).stages:
            for position in stage.positions:
                standing = first[variants.form(program.blocks[position])]
                needed[standing.name, stage.kind] = standing
    return [named for (name, kind), block in needed.items() for named in _of_kind(variants, block, kind, serving[name])]


def _of_kind(variants: Variants, block: Block, kind: StageKind, serving: Sequence[str]) -> Iterator[NamedVariant]:
    # Ranks with equal graphs share a file.
    parts: dict[Variant, list[StagePart]] = {}
    for part in kind.parts():
        parts.setdefault(variants.get(block, part), []).append(part)
    for variant, same in parts.items():
        name = f"{block.name}.{kind.text}" + (f".rank{same[0].index}" if len(parts) > 1 else "")
        keys = tuple(dict.fromkeys(variants.spec(block, part).key for part in same))
        yield NamedVariant(name, keys, tuple(serving), kind.text, variant)


def save(
    folder: Path,
    program: Program,
    variants: Iterable[NamedVariant],
    model: ModelRecord,
    check: Check | None = None,
    ranks: int | None = None,
    arch: str | None = None,
) -> None:
    """Write a program and its variants, and finally a manifest of all files.

    Raises:
        ValueError: a graph cannot be represented as data, or calls a forbidden operator.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The manifest goes first and returns last: an interrupted folder is never loaded.
    (folder / NAME).unlink(missing_ok=True)
    (folder / GRAPHS).mkdir(exist_ok=True)
    data = program_data(program)
    for template in data["templates"]:
        record_schema.check_graphs(_as_read(template["graph"]), 1, f"template {template['name'][:6]}")
    (folder / PROGRAM).write_text(json_text(data), encoding="utf-8")
    entries: dict[str, VariantEntry] = {}
    for named in variants:
        file = f"{GRAPHS}/{named.name}.json"
        data = variant_data(named.variant)
        record_schema.check_graphs(_as_read(data["graphs"]), 2, file)
        (folder / file).write_text(json_text(data), encoding="utf-8")
        entries |= dict.fromkeys(named.keys, VariantEntry(file, named.blocks, named.kind))
    manifest = FolderManifest(versions(arch), own_code(), ranks, model, check or Check(), entries, files_of(folder))
    (folder / NAME).write_text(manifest.text(), encoding="utf-8")


def _as_read(data: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


def json_text(data: Mapping[str, Any]) -> str:
    """Return JSON with one node, block or parameter per line."""
    return _text(data, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    if isinstance(value, dict) and (depth == 0 or _height(value) > _ON_A_LINE):
        members = [f"{json.dumps(name)}: {_text(member, depth + 1)}" for name, member in value.items()]
        return _lines("{", members, "}", depth)
    if isinstance(value, list) and _height(value) > 1 and not isinstance(value[0], str):
        return _lines("[", [_text(element, depth + 1) for element in value], "]", depth)
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _height(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_height, inside)) if inside else 0


def _lines(first: str, inside: list[str], last: str, depth: int) -> str:
    margin = " " * (depth + 1)
    return f"{first}\n{margin}" + f",\n{margin}".join(inside) + f"\n{' ' * depth}{last}"

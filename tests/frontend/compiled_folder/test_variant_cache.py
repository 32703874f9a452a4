"""Cache of traced variants: the same graphs, in any process, for equal specs only; damaged files are made anew."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hydragraph.frontend.compiled_folder.program_records import variant_data
from hydragraph.frontend.compiled_folder.variant_cache import VariantCache
from hydragraph.frontend.user_cache import folder
from hydragraph.passes import graph_passes
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import captured
from tests.thorough import thorough

PARTS = [
    part for kind in (StageKind(), StageKind(2), StageKind(2, True), StageKind(recompute=True)) for part in kind.parts()
]


@pytest.fixture(autouse=True)
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start with an empty cache; return the names of blocks, as they are traced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hydragraph.passes.variants._shared", {})  # what this process has compiled does not help
    blocks = list[str]()

    def differentiate(spec: VariantSpec, graphs: Any) -> graph_passes.Graphs:
        blocks.append(spec.where)
        return original(spec, graphs)

    original = graph_passes._differentiate
    passes = [replace(p, run=differentiate) if p.name == "differentiate" else p for p in graph_passes.GRAPH_PASSES]
    monkeypatch.setattr(graph_passes, "GRAPH_PASSES", tuple(passes))
    return blocks


def variants(name: str = "llama") -> Variants:
    return Variants(captured(name)[0], added=True, cache=VariantCache())


def fields(variant: Variant) -> dict[str, object]:
    return json.loads(json.dumps(variant_data(variant)))


@thorough
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=thorough) for name in ("mixtral", "gpt2"))])
def test_graphs_are_traced_once_and_are_the_same(name: str, traced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured(name)[0]
    blocks = [program.blocks[i] for i in (0, 1, -1)]
    made = [variants(name).get(block, part) for block in blocks for part in PARTS]
    count = len(traced)
    monkeypatch.setattr("hydragraph.passes.variants._shared", {})
    again = [variants(name).get(block, part) for block in blocks for part in PARTS]
    assert 0 < count == len(traced)
    for one, two in zip(made, again, strict=True):
        assert fields(one) == fields(two)


def test_other_specs_are_traced() -> None:
    program = captured("llama")[0]
    whole, half = StagePart(), StagePart(StageKind(2), 1)
    cache, made = VariantCache(), 0
    for each, part in (
        (Variants(program), whole),
        (Variants(program), half),
        (Variants(program, added=True), whole),
        (Variants(program, "default"), whole),
        (Variants(replace(program, dtype=torch.bfloat16)), whole),
    ):
        spec = each.spec(program.blocks[0], part)
        assert cache.variant(spec) is None
        cache.keep(spec, each.get(program.blocks[0], part))
        assert cache.variant(spec) is not None
        made += 1
    assert len([*folder("graphs").iterdir()]) == made


@pytest.mark.parametrize("content", [b"", b"{}", b"cut"], ids=["empty", "not compressed", "cut"])
def test_a_damaged_file_is_traced_anew(content: bytes, traced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured("llama")[0]
    variants().get(program.blocks[0], PARTS[0])
    (path,) = folder("graphs").iterdir()
    path.write_bytes(path.read_bytes()[:99] if content == b"cut" else content)
    monkeypatch.setattr("hydragraph.passes.variants._shared", {})
    variants().get(program.blocks[0], PARTS[0])
    assert len(traced) == 2
    monkeypatch.setattr("hydragraph.passes.variants._shared", {})
    variants().get(program.blocks[0], PARTS[0])
    assert len(traced) == 2


def test_other_sources_and_versions_trace_anew(traced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured("llama")[0]
    for made_by in ("these", "others", "these"):
        monkeypatch.setattr("hydragraph.frontend.compiled_folder.variant_cache._made_by", lambda m=made_by: m)
        monkeypatch.setattr("hydragraph.passes.variants._shared", {})
        variants().get(program.blocks[0], PARTS[0])
    assert len(traced) == 2


def test_without_a_folder_everything_is_traced(
    tmp_path: Path, traced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        monkeypatch.setattr("hydragraph.passes.variants._shared", {})
        variants().get(captured("llama")[0].blocks[0], PARTS[0])
    assert len(traced) == 2


def test_inductor_compiles_what_the_cache_has(traced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list[Variant]()

    def compile_variant(variant: Variant, *_: object, **__: object) -> Variant:
        compiled.append(variant)
        return variant

    monkeypatch.setattr(graph_passes, "compile_variant", compile_variant)
    for _ in range(2):
        monkeypatch.setattr("hydragraph.passes.variants._shared", {})
        program = captured("llama")[0]
        Variants(program, backend="inductor", cache=VariantCache()).get(program.blocks[0], PARTS[0])
    assert len(traced) == 1
    assert fields(compiled[0]) == fields(compiled[1])


def test_whether_graphs_are_cached_is_known_without_reading_them(monkeypatch: pytest.MonkeyPatch) -> None:
    block = captured("llama")[0].blocks[1]
    part = StagePart(StageKind(2))
    assert not variants().traced(block, part)
    variants().get(block, part)
    monkeypatch.setattr("hydragraph.passes.variants._shared", {})
    assert variants().traced(block, part)
    assert not variants().traced(block, StagePart())

"""Written folders: readable lines, each variant once for all ranks that run it, and only graphs that read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hydragraph as hg
from hydragraph.frontend.compiled_folder.manifest import NAME, read_manifest
from hydragraph.frontend.compiled_folder.model_record import model_record
from hydragraph.frontend.compiled_folder.record_schema import MalformedRecord
from hydragraph.frontend.compiled_folder.save import NamedVariant, json_text, named_variants, save
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants
from tests.models import captured
from tests.thorough import thorough


@thorough
def test_variants_are_named_as_their_readable_graphs_and_serve_all_blocks_alike() -> None:
    program, _ = captured("gpt2")
    strategies = [hg.Strategy.parse(text, 2) for text in ("<[0,1]x2>", "<[0]x1,[1]x1>")]
    variants = Variants(program, added=True)
    found = named_variants(variants, strategies)
    assert [(each.name, each.blocks) for each in found] == [
        ("embed.tp2.rank0", ("embed",)),  # 101 rows are cut unevenly
        ("embed.tp2.rank1", ("embed",)),
        ("layer.0.tp2", ("layer.0", "layer.1")),
        ("head.tp2.rank0", ("head",)),
        ("head.tp2.rank1", ("head",)),
        ("embed.tp1", ("embed",)),
        ("layer.0.tp1", ("layer.0", "layer.1")),
        ("head.tp1", ("head",)),
    ]
    keys = [key for each in found for key in each.keys]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "value",
    [{}, {"a": []}, {"a": [1, [2, {"b": None}]], "c": {"d": [["x", 1.5, "é"]]}}, {"n": [["x", ["t"], {}], ["y", []]]}],
)
def test_readable_json_says_the_same(value: Any) -> None:
    assert json.loads(json_text(value)) == value


def test_a_node_is_a_line() -> None:
    nodes = [
        ["x", "placeholder", "x", [], {}, ["tensor", [1, "s0"]]],
        ["output", "output", "output", [{"t": []}], {}, None],
    ]
    lines = json_text({"hints": [8], "graphs": [nodes]}).splitlines()
    assert '   ["x", "placeholder", "x", [], {}, ["tensor", [1, "s0"]]],' in lines


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    program, model = captured("llama")
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.bernoulli.default, (x,)),))
    module = torch.fx.GraphModule({}, graph)
    variant = Variant(module, module, (), 1, (), (), {}, ())
    with pytest.raises(MalformedRecord, match=r"aten::bernoulli\.default is not allowed in a compiled folder"):
        save(tmp_path, program, [NamedVariant("bad", ("0" * 64,), ("embed",), "tp1", variant)], model_record(model))
    assert not (tmp_path / NAME).exists()


def test_the_manifest_names_all_files(tmp_path: Path) -> None:
    program, model = captured("llama")
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "rank_0.txt").write_text("of people")
    save(tmp_path, program, [], model_record(model))
    assert list(read_manifest(tmp_path).files) == ["program.json", "strategies/rank_0.txt"]

"""Graphs as data: what comes back computes, prints and measures the same, and nothing else is read."""

from __future__ import annotations

import json
import math
import pickle
from typing import Any

import pytest
import torch
from torch import fx

import hydragraph as hg
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.graph_footprint import footprint
from hydragraph.ir.graph_data import decode, encode, value_of
from hydragraph.passes.graph_passes import make_variant
from hydragraph.passes.variants import Variants
from hydragraph.private.tracing import hint_of
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import captured
from tests.thorough import only, thorough


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def variants(request: pytest.FixtureRequest) -> Variants:
    program, _ = captured(request.param)
    return hg.precompile(program, [hg.Strategy.parse(f"<[0,1]x1s,[2]x{program.layers - 1}>", program.layers)])


def sizes(value: Any) -> Any:
    """Describe a value without its symbols: dtype, strides and shape in the example."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), [hint_of(s) for s in value.stride()], [hint_of(s) for s in value.shape]
    if isinstance(value, (tuple, list)):
        return [sizes(v) for v in value]
    return hint_of(value) if isinstance(value, int | torch.SymInt) else None


def through_json(*graphs: fx.GraphModule) -> list[fx.GraphModule]:
    return decode(json.loads(json.dumps(encode(*graphs))))


@only("llama")
def test_graphs_come_back_as_they_were(variants: Variants) -> None:
    for _, variant in variants._known.items():
        for graph, back in zip(
            (variant.forward, variant.backward), through_json(variant.forward, variant.backward), strict=True
        ):
            assert back.code == graph.code
            pairs = zip(graph.graph.nodes, back.graph.nodes, strict=True)
            assert all(sizes(value_of(a)) == sizes(value_of(b)) for a, b in pairs)


@pytest.mark.parametrize("number", [1j, complex(-0.5, math.inf)])
def test_complex_numbers_come_back(number: complex) -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Scalar, (graph.placeholder("x"), number)),))
    (back,) = through_json(fx.GraphModule({}, graph))
    assert list(back.graph.nodes)[1].args[1] == number


@only("llama")
def test_variants_that_were_pickled_measure_the_same(variants: Variants) -> None:
    back = pickle.loads(pickle.dumps(variants))
    for (key, variant), (other, loaded) in zip(variants._known.items(), back._known.items(), strict=True):
        assert key == other
        part = StagePart(key[2], 0)
        batch = MicroBatch(48, 3)
        assert footprint(loaded, part, batch) == footprint(variant, part, batch)


@thorough
def test_a_program_that_was_pickled_is_the_same_and_compiles_the_same() -> None:
    program, _ = captured("llama")
    back = pickle.loads(pickle.dumps(program))
    assert back.fingerprint == program.fingerprint
    assert str(back) == str(program)
    assert {n: t.content for n, t in back.templates.items()} == {n: t.content for n, t in program.templates.items()}
    for name, template in program.templates.items():
        assert back.templates[name].graph.code == template.graph.code
    block = program.blocks[1]
    one, other = (make_variant(Variants(p).spec(block, StagePart(StageKind(2))))[0] for p in (program, back))
    assert one.forward.code == other.forward.code
    assert one.backward.code == other.backward.code


def graph_of(*nodes: list[Any]) -> dict[str, Any]:
    placeholder = ["x", "placeholder", "x", [], {}, ["tensor", "float32", "cpu", ["s0"], [1], 0]]
    return {"graphs": [[placeholder, *nodes]], "hints": [8]}


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (["y", "call_function", "os.system", [], {}, None], "os.system"),
        (["y", "call_function", "aten::no_such_operator.default", [], {}, None], "no_such_operator"),
        (["y", "call_function", "operator.attrgetter", [], {}, None], "operator.attrgetter"),
        (["y", "call_function", "aten::t.default", [{"torch": "load"}], {}, None], "load"),
        (["y", "call_function", "aten::t.default", [{"code": "1"}], {}, None], "code"),
    ],
)
def test_what_is_not_on_the_list_is_refused(node: list[Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode(graph_of(node))


@pytest.mark.parametrize("size", ["__import__('os')", "s1", "s0.bit_length()", "s0 if s0 else 1", "1.5", "(1, 2)"])
def test_a_size_is_no_code(size: str) -> None:
    (graph,) = decode(graph_of(["y", "call_function", "aten::t.default", [{"node": "x"}], {}, size]))
    with pytest.raises(ValueError, match="capture the model again"):
        value_of(next(n for n in graph.graph.nodes if n.name == "y"))


@pytest.mark.parametrize(("size", "expected"), [("2*s0 + 1", 17), ("s0//3", 2), ("Mod(s0, 3)", 2), ("Max(s0, 9)", 9)])
def test_sizes_are_computed(size: str, expected: int) -> None:
    (graph,) = decode(graph_of(["y", "call_function", "aten::t.default", [{"node": "x"}], {}, size]))
    assert hint_of(value_of(next(n for n in graph.graph.nodes if n.name == "y"))) == expected

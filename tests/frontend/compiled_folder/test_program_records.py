"""Programs and variants come back from a folder as they were traced: node by node, for families of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import hydragraph as hg
from hydragraph.frontend.compiled_folder.load import load
from hydragraph.ir.graph_data import storages_of, value_of
from hydragraph.ir.program import Program
from hydragraph.passes.graph_passes import make_variant
from hydragraph.passes.variants import Variants
from hydragraph.private.tracing import hint_of
from hydragraph.spec.stage_kind import StageKind
from tests.frontend.compiled_folder.folders import written
from tests.models import MODELS, captured
from tests.thorough import thorough

FAMILIES = [name if name == "gpt2" else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS]


def described(value: Any) -> Any:
    """Describe a value without its symbols: dtype, strides and shape in the example."""
    if isinstance(value, torch.Tensor):
        device = str(value.device)
        return str(value.dtype), device, [hint_of(s) for s in value.stride()], [hint_of(s) for s in value.shape]
    if isinstance(value, (tuple, list)):
        return [described(v) for v in value]
    return hint_of(value) if isinstance(value, int | torch.SymInt) else None


def assert_same(one: fx.GraphModule, other: fx.GraphModule) -> None:
    """Compare two graphs node by node: names, targets, arguments, constants, and what is known of each value."""
    numbers: dict[tuple[int, int], None] = {}
    for a, b in zip(one.graph.nodes, other.graph.nodes, strict=True):
        assert (a.name, a.op, a.target) == (b.name, b.op, b.target)
        named = [fx.map_arg((n.args, dict(n.kwargs)), lambda node: f"%{node.name}") for n in (a, b)]
        assert repr(named[0]) == repr(named[1])
        if a.op == "get_attr":
            assert torch.equal(getattr(one, a.target), getattr(other, a.target))
        if a.op != "output":
            assert described(value_of(a)) == described(value_of(b))
            pairs = zip(storages_of(a), storages_of(b), strict=True)
            numbers |= dict.fromkeys((left, right) for (left, _), (right, _) in pairs)
    # Exactly the storages that were shared before are shared again.
    assert len({left for left, _ in numbers}) == len({right for _, right in numbers}) == len(numbers)
    assert one.code == other.code


def assert_program(one: Program, other: Program) -> None:
    assert str(one) == str(other)
    assert one.fingerprint == other.fingerprint
    names = ("model", "dtype", "causal", "blocks", "aux", "parameters", "buckets", "heads", "unplaced", "positions")
    assert [getattr(one, name) for name in (*names, "origin")] == [getattr(other, name) for name in (*names, "origin")]
    assert [t.content for t in one.templates.values()] == [t.content for t in other.templates.values()]
    for name, template in one.templates.items():
        assert_same(template.graph, other.templates[name].graph)


@thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_was_traced(family: str, tmp_path: Path) -> None:
    program, model = captured(family)
    texts = [f"<[0]x{program.layers}r>"]
    if family != "mixtral":  # none of whose operators can be cut
        texts += [f"<[0,1]x{program.layers}s>"]
    traced = written(tmp_path, model, program, *texts)
    compiled = load(tmp_path)
    assert_program(program, compiled.program)
    read = Variants(compiled.program, added=True, library=compiled)
    for text in texts:
        (stage,) = hg.Strategy.parse(text, program.layers).pipelines[0].stages
        for part in StageKind(len(stage.devices), stage.sequence_parallel, stage.recompute).parts():
            for block in program.blocks:
                one = traced.get(block, part)
                other = compiled.variant(read.spec(block, part))
                assert other is not None
                assert_same(one.forward, other.forward)
                assert_same(one.backward, other.backward)
                graphs = ("forward", "backward")
                assert {k: v for k, v in vars(one).items() if k not in graphs} == {
                    k: v for k, v in vars(other).items() if k not in graphs
                }


def test_what_a_folder_lacks_is_compiled_from_its_program_as_from_the_model(tmp_path: Path) -> None:
    program, model = captured("llama")
    written(tmp_path, model, program)
    part = StageKind(2, True).parts()[1]
    one = Variants(program, added=True).get(program.blocks[1], part)
    again = load(tmp_path).program
    spec = Variants(again, added=True).spec(again.blocks[1], part)
    other, _ = make_variant(spec)
    assert one.forward.code == other.forward.code
    assert one.backward.code == other.backward.code

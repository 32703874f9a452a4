"""Gradients that products add up: golden text, which qualify, and the sums against those of returned gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, fx

from hydragraph.ir.graph_data import value_of
from hydragraph.ir.program import Block, Program
from hydragraph.passes.accumulate import accumulate
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants, local_parameters
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import captured
from tests.passes.golden_template import check_golden, layer
from tests.thorough import first, only

TOKENS = 5


def test_golden_text() -> None:
    check_golden("llama_accumulate_tp2_rank0", accumulate(layer(StagePart(StageKind(2), 0))).backward)


@only("2")
@pytest.mark.parametrize("tp", [1, 2])
def test_every_matrix_of_a_layer_is_added_up_and_nothing_else_is(tp: int) -> None:
    before = layer(StagePart(StageKind(tp), 0))
    after = accumulate(before)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in after.added} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert {*after.added, *after.gradients} == set(before.gradients)
    assert not set(after.added) & set(after.gradients)
    assert (after.inputs, after.needs, after.outputs) == (before.inputs, before.needs, before.outputs)


def test_a_gradient_that_something_else_reads_is_returned() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    gradient = graph.call_function(torch.ops.aten.mm.default, (a, b))
    both = graph.call_function(torch.ops.aten.add.Tensor, (gradient, a))
    graph.output((gradient, both))
    module = fx.GraphModule({}, graph)
    variant = Variant(module, module, ("a", "b"), 2, ("a", "b"), ("w", "hidden"), {}, ())
    assert accumulate(variant).added == ()


def weights(program: Program, block: Block, contiguous: bool) -> dict[str, Tensor]:
    """Return random weights of a block, as views of flat buffers where they are not to be contiguous."""
    generator = torch.Generator().manual_seed(0)
    found = local_parameters(program, block, program.templates[block.template])
    flat = {n: torch.randn(math.prod(p.shape), generator=generator) / 8 for n, p in found.items()}
    views = {n: p.natural(flat[n]) for n, p in found.items()}
    return {n: v.contiguous() for n, v in views.items()} if contiguous else views


def fed(program: Program, block: Block) -> dict[str, Tensor]:
    """Return a block's other inputs for a few tokens in two sequences."""
    template = program.templates[block.template]
    nodes = [n for n in template.graph.graph.nodes if n.op == "placeholder"][len(template.parameters) :]
    generator = torch.Generator().manual_seed(1)
    values = {}
    for node, name in zip(nodes, [*template.buffers, *template.inputs], strict=True):
        value = value_of(node)
        sizes = [TOKENS if isinstance(s, torch.SymInt) else s for s in value.shape]
        if value.is_floating_point():
            values[name] = torch.randn(sizes, generator=generator)
        else:
            values[name] = torch.tensor(TOKENS) if not sizes else torch.randint(0, 60, sizes, generator=generator)
        if value.dtype == torch.int32:
            values[name] = torch.tensor([0, 2, TOKENS], dtype=torch.int32)
    return values


@torch.no_grad()
def backward(variant: Variant, values: dict[str, Tensor], totals: list[tuple[Tensor, float]]) -> dict[str, Tensor]:
    """Run a block and return the gradients that its backward returns."""
    out, *saved = variant.forward(*(values[n] for n in variant.inputs))
    tangent = torch.linspace(-1, 1, out.numel()).view_as(out)
    held = {f"saved.{i}": s for i, s in enumerate(saved)} | {"tangent": tangent} | values
    flat = [each for total in totals for each in total]
    return dict(zip(variant.gradients, variant.backward(*(held[n] for n in variant.needs), *flat), strict=True))


@only("gpt2-False")
@pytest.mark.parametrize(
    ("family", "recompute"),
    first([("gpt2", False), ("mixtral", True)], product(["llama", "gpt2", "mixtral"], [False, True])),
)
def test_sums_equal_those_of_returned_gradients(family: str, recompute: bool) -> None:
    program, _ = captured(family)
    variants, seen = Variants(program), 0
    for block in {b.template: b for b in program.blocks}.values():
        plain = variants.get(block, StagePart(StageKind(recompute=recompute)))
        adding = accumulate(plain)
        seen += len(adding.added)
        for contiguous in (True, False):
            compare(program, block, plain, adding, contiguous)
    assert seen


def compare(program: Program, block: Block, plain: Variant, adding: Variant, contiguous: bool) -> None:
    values = weights(program, block, contiguous) | fed(program, block)
    expected = backward(plain, values, [])
    # The previous contents must not count.
    totals = {n: torch.empty_like(values[n], memory_format=torch.preserve_format).fill_(math.nan) for n in adding.added}
    for turn in (1, 2):
        found = backward(adding, values, [(totals[n], float(turn > 1)) for n in adding.added])
        found |= {n: total / turn for n, total in totals.items()}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=f"{block.name} {name}")


@only("dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_only_what_is_computed_as_it_is_summed_is_added_up(dtype: torch.dtype) -> None:
    program = replace(captured("llama")[0], dtype=dtype)
    assert Variants(program, added=True).get(program.blocks[-1], StagePart()).added == ()

"""Backwards within a memory budget: how much is saved, what runs again, and that gradients stay the same."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import fx, nn

from hydragraph.cost.compiled_blocks import repeated
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.graph_footprint import footprint
from hydragraph.ir.program import Program
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import captured
from tests.thorough import first

BUDGETS = [False, 0.6, 0.1, True]
BATCH = MicroBatch(4096, 1)


@functools.cache
def of_block(program: Program, kind: StageKind, index: int = 0) -> Variant:
    return Variants(program).get(program.blocks[1], StagePart(kind, index))


def called(graph: fx.GraphModule, *names: str) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if any(name in str(n.target) for name in names)]


@pytest.mark.parametrize("model", first(["gpt2"], ["llama", "mixtral", "gpt2"]))
def test_less_is_saved_and_more_repeated_the_smaller_the_budget(model: str) -> None:
    program, _ = captured(model)
    kinds = [StageKind(1, False, budget) for budget in BUDGETS]
    variants = [of_block(program, kind) for kind in kinds]
    saved = [footprint(v, StagePart(k), BATCH).saved for v, k in zip(variants, kinds, strict=True)]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] == 0
    shares = [repeated(variants[0], variant, variants[-1]) for variant in variants]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    products = [len(called(variant.backward, "aten.mm", "aten.addmm")) for variant in variants]
    assert products == sorted(products)
    for budget, size, variant in zip(BUDGETS[1:-1], saved[1:-1], variants[1:-1], strict=True):
        # The results of attention stay saved, whatever the budget is.
        assert size <= max(saved[0] * budget + 1, _attention_bytes(variant)) or model == "mixtral", budget
        assert called(variant.forward, "varlen_attention.default")
        assert not called(variant.backward, "varlen_attention.default")


def _attention_bytes(variant: Variant) -> int:
    """Return the bytes of attention's results for `BATCH`."""
    results = [n for n in variant.forward.graph.nodes if "getitem" in str(n.target)]
    values = [n.meta["val"] for n in results if "varlen_attention" in str(n.args[0].target)]
    tokens = int(values[0].shape[0])
    return sum(v.numel() // tokens * BATCH.tokens * v.dtype.itemsize for v in values)


@pytest.mark.parametrize("sequence_parallel", first([True], [False, True]))
def test_no_collective_is_repeated(sequence_parallel: bool) -> None:
    program, _ = captured("gpt2")
    kind = StageKind(2, sequence_parallel, 0.3)
    plain = of_block(program, kind._replace(recompute=False))
    names = ("all_reduce", "all_gather", "reduce_scatter")
    for index in range(2):
        variant = of_block(program, kind, index)
        assert called(variant.backward, *names) == called(plain.backward, *names)
        assert called(variant.forward, *names) == called(plain.forward, *names)


def gradients(program: Program, model: nn.Module, variant: Variant) -> dict[str, Any]:
    """Run one block's forward and backward on random values."""
    torch.manual_seed(0)
    block = program.blocks[1]
    template = program.templates[block.template]
    weights = dict(model.named_parameters())
    local = dict(zip(template.parameters, block.parameters, strict=True))
    given = {name: weights[local[name]].detach() for name in local}
    tokens = 24
    for name, node in zip(variant.inputs, variant.forward.graph.find_nodes(op="placeholder"), strict=True):
        if name in given:
            continue
        value = node.meta["val"]
        shape = [tokens if isinstance(size, torch.SymInt) else size for size in value.shape]
        if value.dtype.is_floating_point:
            given[name] = torch.randn(shape)
        else:  # the bounds of sequences, or the length of the longest
            given[name] = torch.tensor([0, 10, tokens] if value.ndim else tokens, dtype=value.dtype)
    results = list(variant.forward(*(given[name] for name in variant.inputs)))
    saved = {f"saved.{i}": value for i, value in enumerate(results[variant.outputs :])}
    operands = {**given, **saved, "tangent": torch.ones_like(results[0])}
    buffers: list[Any] = []
    for name in variant.added:
        weight = given[name]
        buffers += [torch.zeros(weight.shape), 0]
    found = variant.backward(*(operands[name] for name in variant.needs), *buffers)
    return dict(zip(variant.gradients, found, strict=True))


@pytest.mark.parametrize("model", first(["gpt2"], ["llama", "gpt2"]))
def test_gradients_do_not_depend_on_the_budget(model: str) -> None:
    program, module = captured(model)
    wanted = gradients(program, module, of_block(program, StageKind()))
    for budget in BUDGETS[1:]:
        found = gradients(program, module, of_block(program, StageKind(1, False, budget)))
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7, msg=f"{name} at {budget}")

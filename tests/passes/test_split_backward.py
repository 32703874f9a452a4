"""Halves of a backward: golden text, the same bits as the whole, and no operator in both."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from hydragraph.passes.accumulate import accumulate
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.split_backward import split_backward
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import captured
from tests.passes.golden_template import check_golden, layer
from tests.passes.test_accumulate import fed, weights
from tests.thorough import first, only


def test_golden_text() -> None:
    for name, part in zip(("input", "weights"), split_backward(accumulate(layer(StagePart()))), strict=True):
        check_golden(f"llama_split_backward_{name}", part.backward)


def operators(variant: Variant) -> int:
    return sum(node.op.startswith("call") for node in variant.backward.graph.nodes)


@only("1")
@pytest.mark.parametrize("tp", [1, 2])
def test_the_halves_have_the_operators_of_the_whole_once(tp: int) -> None:
    whole = accumulate(layer(StagePart(StageKind(tp), 0)))
    halves = split_backward(whole)
    assert sum(map(operators, halves)) == operators(whole)  # pyrefly: ignore[bad-argument-type]
    assert all(operators(half) for half in halves)  # pyrefly: ignore[bad-argument-type]
    assert halves[0].gradients == ("hidden",)
    assert not halves[0].added
    assert {*halves[1].gradients, *halves[1].added} == {*whole.gradients, *whole.added} - {"hidden"}


@torch.no_grad()
def compared(variant: Variant, values: dict[str, Tensor]) -> int:
    """Compare the halves' gradients with the whole's, and return how many there are."""
    out, *saved = variant.forward(*(values[n] for n in variant.inputs))
    held = {f"saved.{i}": s for i, s in enumerate(saved)} | values
    held["tangent"] = torch.linspace(-1, 1, out.numel()).view_as(out)
    totals, others = ([torch.ones_like(values[n]) for n in variant.added] for _ in range(2))
    expected = variant.backward(*(held[n] for n in variant.needs), *(e for t in totals for e in (t, 1.0)))
    first_half, second_half = split_backward(variant)
    results = first_half.backward(*(held[n] for n in first_half.needs))
    count = len(first_half.gradients)
    held |= {f"saved.{i}": value for i, value in enumerate(results[count:])}
    rest = second_half.backward(*(held[n] for n in second_half.needs), *(e for t in others for e in (t, 1.0)))
    names = (*first_half.gradients, *second_half.gradients)
    found = dict(zip(names, (*results[:count], *rest), strict=True))
    assert found.keys() == set(variant.gradients)
    for name, gradient in zip(variant.gradients, expected, strict=True):
        assert torch.equal(found[name], gradient), name
    for name, one, other in zip(variant.added, totals, others, strict=True):
        assert torch.equal(one, other), name
    return len(names) + len(variant.added)


@only("gpt2-False")
@pytest.mark.parametrize(
    ("family", "recompute"),
    first([("gpt2", False), ("mixtral", True)], product(["llama", "gpt2", "mixtral"], [False, True])),
)
def test_halves_make_the_gradients_of_the_whole(family: str, recompute: bool) -> None:
    program, _ = captured(family)
    variants = Variants(program)
    for block in {b.template: b for b in program.blocks}.values():
        plain = variants.get(block, StagePart(StageKind(recompute=recompute)))
        values = weights(program, block, True) | fed(program, block)
        assert compared(plain, values) == compared(accumulate(plain), values) > 0

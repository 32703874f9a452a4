"""A product is taken apart alike, however it was written."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from hydragraph.passes.graph_node import is_grouped, known_product, operands, product

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "order", "bias", "inner"),
    [
        (aten.linear.default, ("x", "weight"), False, 1),
        (aten.linear.default, ("x", "weight", "bias"), True, 1),
        (aten.addmm.default, ("bias", "x", "weight"), True, 0),
        (aten.mm.default, ("x", "weight"), False, 0),
    ],
)
def test_a_product_is_taken_apart(target: object, order: tuple[str, ...], bias: bool, inner: int) -> None:
    graph = fx.Graph()
    named = {name: graph.placeholder(name) for name in ("x", "weight", "bias")}
    node = graph.call_function(target, tuple(named[name] for name in order))  # pyrefly: ignore[bad-argument-type]
    parts = known_product(node)
    weight = named["weight"]
    assert parts == (named["x"], weight, named["bias"] if bias else None, inner, 1 - inner, weight)
    assert set(operands(node)) == {named[name] for name in order}


@pytest.mark.parametrize(("dims", "inner", "outer"), [(None, 1, 2), ((-2, -1), 2, 1), ((2, 1), 2, 1)])
def test_a_product_of_experts_is_taken_apart(dims: tuple[int, int] | None, inner: int, outer: int) -> None:
    graph = fx.Graph()
    x, weight, ends = (graph.placeholder(name) for name in ("x", "weight", "ends"))
    given = weight if dims is None else graph.call_function(aten.transpose.int, (weight, *dims))
    node = graph.call_function(aten._grouped_mm.default, (x, given, ends))
    assert known_product(node) == (x, weight, None, inner, outer, given)
    assert is_grouped(node)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_in_one_batched_product_are_taken_apart(transposed: bool) -> None:
    graph = fx.Graph()
    x, weight = (graph.placeholder(name) for name in ("x", "weight"))
    given = graph.call_function(aten.transpose.int, (weight, 1, 2)) if transposed else weight
    node = graph.call_function(aten.bmm.default, (x, given))
    assert known_product(node) == (x, weight, None, *((2, 1) if transposed else (1, 2)), given)
    scores = graph.call_function(aten.bmm.default, (x, graph.call_function(aten.neg.default, (weight,))))
    assert product(scores) is None


def test_what_is_no_product_is_none() -> None:
    graph = fx.Graph()
    node = graph.call_function(aten.neg.default, (graph.placeholder("x"),))
    assert product(node) is None
    with pytest.raises(AssertionError):
        known_product(node)

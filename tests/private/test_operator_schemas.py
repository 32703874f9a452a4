"""Operators, and the facts that their schemas and tags give."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from hydragraph.private.operator_schemas import arguments_of, has_tag, is_operator, makes_tensors

aten = torch.ops.aten


def test_operators_are_told_from_functions_and_packets() -> None:
    assert is_operator(aten.mm.default)
    assert not any(map(is_operator, (aten.mm, torch.mm, operator.getitem, "view")))


def test_tags() -> None:
    assert has_tag(aten.relu.default, torch.Tag.pointwise)
    assert not has_tag(aten.mm.default, torch.Tag.pointwise)
    assert not has_tag(operator.getitem, torch.Tag.pointwise)
    assert has_tag(aten.nonzero.default, torch.Tag.pointwise, torch.Tag.dynamic_output_shape)


def test_arguments_say_what_is_aliased_and_written() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    added = graph.call_function(aten.add_.Tensor, (x, y))
    assert [tuple(a) for a in arguments_of(added)] == [("self", x, True, True), ("other", y, False, False)]
    viewed = graph.call_function(aten.view.default, (x, [2, 3]))
    assert [tuple(a) for a in arguments_of(viewed)] == [("self", x, True, False), ("size", [2, 3], False, False)]
    assert list(arguments_of(graph.call_method("add_", (x, y)))) == []


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.mm.default, True),
        (aten.native_layer_norm.default, True),
        (aten.view.default, False),
        (aten.add_.Tensor, False),
        (aten.sym_size.int, False),
        (operator.add, False),
    ],
)
def test_what_makes_tensors_in_memory_of_their_own(target: object, expected: bool) -> None:
    assert makes_tensors(target) is expected


def test_other_namespaces_are_asked_for_by_name() -> None:
    assert not makes_tensors(aten.mm.default, "hydragraph")

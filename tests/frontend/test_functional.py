"""Functional graphs: what writes in place is rewritten, what runs without gradient stays without, both is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from hydragraph.errors import Unsupported
from hydragraph.frontend.functional import functional_graph


class Scaled(nn.Module):
    """A model of one weight and one function."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self.weight, x)


def plain(weight: Tensor, x: Tensor) -> Tensor:
    return (weight * x).reshape(-1)


def partly_without_gradient(weight: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (weight * x).exp().sum()
    return weight * x * scale


def in_place(weight: Tensor, x: Tensor) -> Tensor:
    y = weight * x
    y.add_(1).mul_(weight)
    return y * y


def in_place_beside_a_region(weight: Tensor, x: Tensor) -> Tensor:
    return partly_without_gradient(weight, x).add_(1)


def in_place_inside_a_region(weight: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (weight * x).exp()
        scale.add_(1)
    return weight * scale


def functional(function: Callable[[Tensor, Tensor], Tensor]) -> fx.GraphModule:
    exported = torch.export.export(Scaled(function), (torch.ones(3),), strict=False)
    return functional_graph(exported, "Scaled")[0]


@pytest.mark.parametrize("function", [plain, partly_without_gradient, in_place])
def test_values_and_gradients_are_the_models(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph, model, x = functional(function), Scaled(function), torch.tensor([1.0, 2.0, -0.5])
    expected, found = model(x), graph(model.weight, x)[0]
    torch.testing.assert_close(found, expected)
    (gradient,), (given,) = (torch.autograd.grad(y.sum(), model.weight) for y in (expected, found))
    torch.testing.assert_close(given, gradient)


def test_a_graph_that_writes_nothing_keeps_its_operators() -> None:
    assert torch.ops.aten.reshape.default in [node.target for node in functional(plain).graph.nodes]


def test_no_operator_writes() -> None:
    targets = [node.target for node in functional(in_place).graph.nodes if node.op == "call_function"]
    assert not any(target._schema.is_mutable for target in targets)


@pytest.mark.parametrize("function", [in_place_beside_a_region, in_place_inside_a_region])
def test_writing_beside_a_region_without_gradient_is_refused(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(Unsupported, match=r"^Scaled: operators that write in place, beside a torch.no_grad\(\) region"):
        functional(function)

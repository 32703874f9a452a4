"""Cleaning: what goes, what stays, and that the values are the same."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hydragraph.kernels.varlen_attention  # noqa: F401  registers the operator that cuts know
from hydragraph.passes.clean import SYNONYMS, clean, read_sizes_of_values, remove_dead_code
from tests.thorough import thorough

aten = torch.ops.aten


class _Forward(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> object:
        return self.function(*tensors)


def exported(forward: object, *arguments: Tensor) -> fx.GraphModule:
    """Export a function of tensors as capture does."""

    return torch.export.export(_Forward(forward), arguments, strict=False).run_decompositions({}).graph_module


def targets(graph: fx.GraphModule) -> list[object]:
    return [n.target for n in graph.graph.nodes if n.op == "call_function"]


def test_dead_code_goes_and_placeholders_stay() -> None:
    graph = fx.Graph()
    x, unused = graph.placeholder("x"), graph.placeholder("unused")
    first = graph.call_function(aten.sin.default, (x,))
    graph.call_function(aten.neg.default, (graph.call_function(aten.cos.default, (unused,)),))
    graph.output((first,))
    remove_dead_code(graph)
    assert [n.name for n in graph.nodes] == ["x", "unused", "sin_default", "output"]


def test_sizes_are_read_from_inputs_whose_values_are_read() -> None:
    class Flat(nn.Module):
        def forward(self, values: Tensor, sized: Tensor) -> Tensor:
            return values.view(-1, values.shape[1])

    tokens = torch.export.Dim("tokens", min=2)
    shapes = ({1: tokens}, {1: tokens})
    graph = torch.export.export(Flat(), (torch.ones(1, 4), torch.ones(1, 4)), dynamic_shapes=shapes).graph
    values, sized = graph.find_nodes(op="placeholder")
    (size,) = graph.find_nodes(op="call_function", target=aten.sym_size.int)
    size.args = (sized, 1)
    read_sizes_of_values(graph)
    assert size.args == (values, 1)
    assert not sized.users


@thorough
def test_casts_that_change_nothing_go_and_others_stay() -> None:
    def forward(x: Tensor) -> Tensor:
        return x.to(torch.float32).to(torch.float64).contiguous() + 1

    graph = exported(forward, torch.ones(2))
    cleaned = clean(graph)
    assert targets(cleaned) == [aten._to_copy.default, aten.add.Tensor]
    assert cleaned(torch.ones(2))[0].dtype == torch.float64
    assert clean(exported(lambda x: x.float(), torch.ones(2)))(torch.ones(2))[0].equal(torch.ones(2))


def test_assertions_go() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(aten._assert_tensor_metadata.default, (x, None, None, torch.float32))
    graph.output((graph.call_function(aten.sin.default, (x,)),))
    assert targets(clean(fx.GraphModule({}, graph))) == [aten.sin.default]


def test_the_device_of_the_trace_goes() -> None:
    def forward(x: Tensor) -> Tensor:
        return x + torch.arange(3, device=x.device)

    graph = exported(forward, torch.ones(3, device="meta"))
    assert "meta" in graph.code
    cleaned = clean(graph)
    assert "meta" not in cleaned.code
    assert cleaned(torch.ones(3))[0].tolist() == [1.0, 2.0, 3.0]


def test_no_grad_regions_are_inlined_and_detached() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.exp().sum()
        return x * scale

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    graph = torch.export.export(Module(), (torch.ones(2),), strict=False).graph_module
    assert any("grad_enabled" in str(t) for t in targets(graph))
    cleaned = clean(graph)
    assert not any("grad_enabled" in str(t) for t in targets(cleaned))
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(cleaned(x)[0].sum(), x)
    torch.testing.assert_close(gradient, x.detach().exp().sum().expand(2))


def test_the_graph_given_is_not_changed() -> None:
    graph = make_fx(lambda x: aten.alias.default(x) + 1, tracing_mode="fake")(torch.ones(2))
    before = graph.code
    assert len(targets(clean(graph))) == 1
    assert graph.code == before


def test_a_histogram_of_integers_counts_floats_and_gives_integers() -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.histc(x, bins=3, min=0, max=2).cumsum(0, dtype=torch.int32)

    graph = exported(forward, torch.zeros(4, dtype=torch.int32, device="meta"))
    assert clean(graph)(torch.tensor([0, 2, 2, 1], dtype=torch.int32))[0].tolist() == [1, 2, 4]


def test_copies_into_fresh_values_have_a_derivative() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.new_empty(2, 4)
            y[:, :2], y[:, 2:] = x, 2 * x
            return y

    graph = torch.export.export(Module(), (torch.ones(2, 2),), strict=False).run_decompositions({}).graph_module
    assert aten.copy.default in targets(graph)
    cleaned = clean(graph)
    assert aten.copy.default not in targets(cleaned)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    assert cleaned(x)[0].tolist() == [[1, 2, 2, 4], [3, 4, 6, 8]]
    (gradient,) = torch.autograd.grad(cleaned(x)[0].sum(), x)
    assert gradient.tolist() == [[3, 3], [3, 3]]


def test_second_names_of_operators_become_the_first_and_compute_the_same() -> None:
    for second, first in SYNONYMS.items():
        for overload in getattr(aten, second).overloads():
            if "out" not in overload and overload != "int":
                assert getattr(getattr(aten, first), overload)._schema.arguments  # each has its counterpart

    def forward(x: Tensor) -> Tensor:
        return torch.divide(torch.absolute(x), torch.multiply(x, 3), rounding_mode="floor")

    x = torch.randn(5)
    cleaned = clean(torch.export.export(_Forward(forward), (x,), strict=False).graph_module)
    assert targets(cleaned) == [aten.abs.default, aten.mul.Tensor, aten.div.Tensor_mode]
    assert torch.equal(cleaned(x)[0], forward(x))

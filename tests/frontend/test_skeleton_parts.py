"""Cutting a graph into pieces, and pieces into templates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hydragraph.errors import Unsupported
from hydragraph.frontend.skeleton_parts import extract, template_of


def whole() -> fx.GraphModule:
    """Trace e = 2 w + b, hidden = e + x, out = sin(hidden) with unused u; placeholders are w_1, b_1, x_1, u_1."""

    def forward(w: Tensor, b: Tensor, x: Tensor, u: Tensor) -> tuple[Tensor]:
        return (torch.sin(2 * w + b + x),)

    return make_fx(forward, tracing_mode="fake")(torch.ones(3), torch.ones(1), torch.ones(3), torch.ones(2))


def node(graph: fx.GraphModule, target: object) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.target is target)


def test_extract_takes_what_the_outputs_need() -> None:
    graph = whole()
    part = extract(graph, [node(graph, torch.ops.aten.mul.Tensor)], {})
    assert [n.name for n in part.graph.nodes if n.op == "placeholder"] == ["w_1"]
    assert torch.equal(part(torch.ones(3))[0], torch.full((3,), 2.0))


def test_given_values_become_placeholders() -> None:
    graph = whole()
    last_add = [n for n in graph.graph.nodes if n.target is torch.ops.aten.add.Tensor][-1]
    part = extract(graph, [node(graph, torch.ops.aten.sin.default)], {last_add: "hidden"})
    assert [n.name for n in part.graph.nodes if n.op == "placeholder"] == ["hidden"]
    assert torch.equal(part(torch.ones(3))[0], torch.ones(3).sin())


def test_an_output_may_be_a_given_value_or_a_placeholder() -> None:
    graph = whole()
    x = next(n for n in graph.graph.nodes if n.name == "x_1")
    part = extract(graph, [x, x], {x: "hidden"})
    assert [float(v.sum()) for v in part(torch.ones(3))] == [3.0, 3.0]


def template(graph: fx.GraphModule, where: str = "layer.0", **names: dict[str, str]):  # pyrefly: ignore[unannotated-return]
    names = {
        "parameters": {"w_1": "w.weight"},
        "buffers": {"b_1": "b"},
        "inputs": {"x_1": "hidden", "u_1": "u"},
    } | names
    return template_of(graph, (names["parameters"], names["buffers"], names["inputs"]), where)


def test_a_template_sorts_and_names_its_placeholders_and_drops_unused_ones() -> None:
    graph = whole()
    made = template(graph, inputs={"w_1": "hidden", "u_1": "u"}, parameters={"x_1": "x.weight"})
    assert (made.parameters, made.buffers, made.inputs) == (("x.weight",), ("b",), ("hidden",))
    assert [n.name for n in made.graph.graph.nodes if n.op == "placeholder"] == ["x_weight", "b", "hidden"]
    x, b, w = torch.rand(3), torch.rand(1), torch.rand(3)
    assert torch.equal(made.graph(x, b, w)[0], graph(w, b, x, torch.ones(2))[0])


def test_the_name_is_a_hash_of_the_text_and_the_shapes() -> None:
    def forward(x: Tensor) -> tuple[Tensor]:
        return (x + 1,)

    def other(x: Tensor) -> tuple[Tensor]:
        return (x + 2,)

    def made(f: object, size: int, dtype: torch.dtype = torch.float32) -> str:
        graph = make_fx(f, tracing_mode="fake")(torch.ones(size, dtype=dtype))  # pyrefly: ignore[bad-argument-type]
        return template_of(graph, ({}, {}, {"x_1": "hidden"}), "layer.0").name

    assert made(forward, 2) == made(forward, 2)
    assert len({made(forward, 2), made(other, 2), made(forward, 3), made(forward, 2, torch.float64)}) == 4


def test_constants_made_in_the_forward_are_refused() -> None:
    with pytest.raises(
        Unsupported,
        match=r"layer.3: forward or loss creates a constant tensor \(b_1\); register this tensor as a buffer",
    ):
        template(whole(), where="layer.3", buffers={})

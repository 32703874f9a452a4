"""Communicate placeholders: where they stand in a layer, and which parameters get a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import hydragraph.kernels.varlen_attention  # noqa: F401  registers the operator that templates hold
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Template
from hydragraph.passes.annotate import annotate, differentiable, partial_sums
from hydragraph.passes.find_cuts import find_cuts
from hydragraph.passes.shard import shard
from hydragraph.passes.tensor_cut import Cut, Cuts
from hydragraph.spec.stage_kind import StagePart
from tests.models import captured
from tests.passes.golden_template import check_golden, llama_layer
from tests.thorough import only

aten = torch.ops.aten


def placeholders(template: Template) -> list[tuple[str, str]]:
    """Return (operator before, "enter" or "exit") of every communicate node."""
    return placeholders_of(template.graph)


def placeholders_of(graph: fx.GraphModule) -> list[tuple[str, str]]:
    found = [n.args for n in graph.graph.nodes if n.target is communicate]
    return [(value.target.__name__.split(".")[0], where) for value, where in found]


def test_golden_text_before_and_after() -> None:
    template, parameters = llama_layer()
    check_golden("llama_clean", shard(template, parameters, StagePart()).graph)  # one rank: no placeholders
    check_golden("llama_annotate", template.graph)


@only("llama-expected0", "gpt2-expected1")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [("mul", "enter"), ("linear", "exit"), ("mul", "enter"), ("linear", "exit")]),
        ("gpt2", [("view", "enter"), ("addmm", "exit"), ("view", "enter"), ("addmm", "exit")]),
        ("opt", [("layer_norm", "enter"), ("linear", "exit"), ("layer_norm", "enter"), ("linear", "exit")]),
        ("qwen3", [("mul", "enter"), ("linear", "exit"), ("mul", "enter"), ("linear", "exit")]),
    ],
)
def test_a_layer_enters_and_exits_twice(name: str, expected: list[tuple[str, str]]) -> None:
    program, _ = captured(name)
    assert placeholders(program.templates[program.blocks[1].template]) == expected


def test_experts_exit_behind_the_sum_over_a_tokens_rows() -> None:
    program, _ = captured("mixtral")
    attention = [("mul", "enter"), ("linear", "exit")]
    experts = [("view", "enter"), ("unsqueeze", "enter"), ("view", "exit")]
    assert placeholders(program.templates[program.blocks[1].template]) == attention + experts


def test_copies_of_tokens_for_experts_are_sent_once() -> None:
    def copied(hidden: Tensor, scores: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x = hidden[0].neg()
        rows = (x.repeat(3, 1) * (x @ scores).t().reshape(-1, 1)).view(3, -1, 32)
        return torch.bmm(torch.bmm(rows, up).relu(), down).view(-1, 32).view(3, -1, 32).sum(0)

    found = placeholders_of(annotated(copied, (1, 5, 32), (32, 3), (3, 32, 48), (3, 48, 32)))
    assert found == [("neg", "enter"), ("reshape", "enter"), ("sum", "exit")]


def test_embedding_exits_and_head_enters_where_the_vocabulary_is_cut() -> None:
    program, _ = captured("llama")
    first, last = (program.templates[program.blocks[i].template] for i in (0, -1))
    assert placeholders(first) == [("embedding", "exit")]
    assert placeholders(last) == [("mul", "enter")]


def annotated(forward: object, *shapes: tuple[int, ...]) -> fx.GraphModule:
    """Annotate `forward(hidden, *weights)`."""
    traced = make_fx(forward, tracing_mode="fake", pre_dispatch=True)(*map(torch.zeros, shapes))  # pyrefly: ignore[bad-argument-type]
    hidden, *weights = [n for n in traced.graph.nodes if n.op == "placeholder"]
    return annotate(traced, find_cuts(traced.graph, set(weights), None, set()), set(weights), hidden)


def entered(graph: fx.GraphModule) -> list[str]:
    return [n.args[0].name for n in graph.graph.nodes if n.target is communicate and n.args[1] == "enter"]


def test_one_enter_serves_all_products_of_a_value() -> None:
    def gated(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        return linear(linear(x, a) * linear(x, b), c)

    assert entered(annotated(gated, (5, 32), (48, 32), (48, 32), (32, 48))) == ["x_1"]


def test_a_product_of_a_sum_enters() -> None:
    def chained(hidden: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        return linear(linear(linear(linear(hidden.neg(), a).relu(), b), c).relu(), d)

    found = placeholders_of(annotated(chained, (5, 32), (48, 32), (32, 48), (48, 32), (32, 48)))
    assert found == [("neg", "enter"), ("linear", "exit"), ("communicate", "enter"), ("linear", "exit")]


def test_a_parameter_used_whole_enters_only_if_replicated_values_use_it_too() -> None:
    linear = torch.nn.functional.linear

    def scaled(x: Tensor, a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return linear(linear(x, a) * s, b)

    def mixed(x: Tensor, a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return linear(linear(x, a) * s, b) * s

    shapes = ((5, 32), (48, 32), (32, 48), (1,))
    assert entered(annotated(scaled, *shapes)) == ["x_1"]
    assert entered(annotated(mixed, *shapes)) == ["x_1", "s_1"]


def summed(*steps: Callable[[fx.Graph, fx.Node], fx.Node]) -> list[bool]:
    """Return whether each step behind a product of experts works on parts of a sum."""
    graph = fx.Graph()
    nodes = [graph.call_function(aten._grouped_mm.default, tuple(map(graph.placeholder, ("rows", "experts", "ends"))))]
    cuts = Cuts(rows={nodes[0]: Cut(1, 1, 0, 32, nodes[0], frozenset())})
    for step in steps:
        nodes.append(step(graph, nodes[-1]))
    graph.output(nodes[-1])
    partial = partial_sums(graph, cuts)
    return [node in partial for node in nodes[1:]]


def scaled_by(name: str) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    def step(graph: fx.Graph, x: fx.Node) -> fx.Node:
        given = graph.placeholder(name)
        factor = given if name == "parameter" else graph.call_function(aten.neg.default, (given,))
        return graph.call_function(aten.mul.Tensor, (x, factor))

    return step


def added_up(start: Any) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    def step(graph: fx.Graph, x: fx.Node) -> fx.Node:
        zeros = graph.call_function(start, (graph.placeholder("like"),))
        index = graph.call_function(aten.neg.default, (graph.placeholder("index"),))
        return graph.call_function(aten.index_add.default, (zeros, 0, index, x))

    return step


def chosen(graph: fx.Graph, x: fx.Node) -> fx.Node:
    index = graph.call_function(aten.neg.default, (graph.placeholder("order"),))
    return graph.call_function(aten.index.Tensor, (x, [index]))


def total(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.sum.dim_IntList, (x, [1]))


def squared(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.mul.Tensor, (x, x))


def activated(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.relu.default, (x,))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((scaled_by("weight"), chosen, total, activated), [True, True, True, False]),
        ((scaled_by("weight"), added_up(aten.zeros_like.default)), [True, True]),
        ((added_up(aten.exp.default),), [False]),  # the other term is not zero
        ((squared,), [False]),
        ((scaled_by("parameter"), total), [False, False]),  # its gradient would be partial
    ],
)
def test_parts_of_experts_are_summed_as_late_as_linearity_allows(
    steps: tuple[Callable[[fx.Graph, fx.Node], fx.Node], ...], expected: list[bool]
) -> None:
    assert summed(*steps) == expected


def test_what_two_operators_read_is_summed_first() -> None:
    def both(graph: fx.Graph, x: fx.Node) -> fx.Node:
        one = graph.call_function(aten.sum.dim_IntList, (x, [1]))
        return graph.call_function(aten.add.Tensor, (one, graph.call_function(aten.sum.dim_IntList, (x, [0]))))

    assert summed(both) == [False]


def test_without_cuts_nothing_changes() -> None:
    graph = make_fx(lambda x, a: x * a, tracing_mode="fake")(torch.ones(2), torch.ones(2))
    assert annotate(graph, Cuts(), set(), None).code == graph.code


def test_values_with_a_gradient() -> None:
    def forward(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
        return (x * 2).detach() + w * ids.float() + (w > 0)

    graph = make_fx(forward, tracing_mode="fake", pre_dispatch=True)(
        torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.int64)
    ).graph
    x, w, _ = [n for n in graph.nodes if n.op == "placeholder"]
    learns = [n.name for n in graph.nodes if n in differentiable(graph, {w}, x) and n.op != "placeholder"]
    targets = [n.split("_")[0] for n in learns]
    assert targets == ["mul", "mul", "add", "add"]

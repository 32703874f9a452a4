"""How the text of a graph looks, and how two graphs are compared in one line."""

from __future__ import annotations

import operator

import torch
from torch import fx

from hydragraph.ir.placeholders import communicate
from hydragraph.passes.graph_text import changes, graph_text

aten = torch.ops.aten


def graph_of(*targets: object) -> fx.GraphModule:
    """Return a graph that applies some operators of one operand, one after another."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target in targets:
        arguments = (value, "enter") if target is communicate else (value,)
        value = graph.call_function(target, arguments)  # pyrefly: ignore[bad-argument-type]
    graph.output((value,))
    return fx.GraphModule({}, graph)


def test_a_graph_is_written_one_operator_a_line() -> None:
    text = graph_text(graph_of(aten.neg.default, aten.t.default))
    assert text == "placeholder x\n%1 = aten.neg.default(x)\n%2 = aten.t.default(%1)\nreturn (%2,)\n"


def test_names_of_values_do_not_show() -> None:
    one, other = graph_of(aten.neg.default), graph_of(aten.neg.default)
    next(n for n in other.graph.nodes if n.op == "call_function").name = "another"
    assert graph_text(one) == graph_text(other)


def test_changes_say_what_came_and_what_went() -> None:
    before = graph_of(communicate, aten.neg.default, aten.neg.default)
    assert changes(before, before) == "3 operators: unchanged"
    assert changes(before, graph_of(aten.neg.default, aten.t.default)) == (
        "2 operators: +1 aten.t.default, -1 aten.neg.default, -1 communicate"
    )
    assert changes(None, graph_of(aten.neg.default)) == "1 operator: +1 aten.neg.default"
    turned = changes(graph_of(aten.neg.default, aten.t.default), graph_of(aten.t.default, aten.neg.default))
    assert turned == "2 operators: the same operators, rearranged"


def test_what_python_and_the_runtime_do_has_short_names() -> None:
    graph = fx.Graph()
    group = graph.placeholder("collectives")
    value = graph.call_method("all_reduce", (group, 1))
    graph.output((graph.call_function(operator.getitem, (value, 0)),))
    assert graph_text(fx.GraphModule({}, graph)).splitlines()[1:3] == [
        "%1 = .all_reduce(collectives, 1)",
        "%2 = getitem(%1, 0)",
    ]

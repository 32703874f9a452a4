"""The example of the module's legend: which values of a Llama's layer a rank has for its own tokens only."""

from __future__ import annotations

from hydragraph.ir.placeholders import communicate
from hydragraph.passes.find_cuts import find_cuts
from hydragraph.passes.sequence import find_parts, token_dim, token_symbol
from tests.passes.golden_template import llama_layer


def test_what_is_cut_by_tokens_in_a_llama_layer() -> None:
    template, parameters = llama_layer()
    graph = template.graph.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    cuts = find_cuts(graph, set(placeholders[: len(parameters)]), None, set())
    parts = find_parts(graph, cuts)
    assert set(parts.values()) == {1}
    assert [n.name for n in placeholders if n in parts] == ["hidden"]
    for node in graph.nodes:
        if node.target is communicate:
            assert (node in parts) is (node.args[1] == "exit")
    assert not any(node in parts for node in [*cuts.cut, *cuts.columns, *cuts.rows])
    symbol = token_symbol(graph)
    others = [n for n in graph.nodes if token_dim(n, symbol) is not None and n not in parts and n.op == "call_function"]
    inside = set(cuts.cut) | set(cuts.columns) | set(cuts.rows)
    outside = [n for n in others if n not in inside and n.target is not communicate]
    assert all(user in inside for n in outside for user in n.users), "rotary tables, which cut values use"

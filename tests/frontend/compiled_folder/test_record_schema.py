"""Data that is no graph is refused before anything is built of it: attacks, and mutations of a real graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.frontend.compiled_folder.record_schema import MalformedRecord, check_graphs
from hydragraph.ir.graph_data import decode

X: list[Any] = ["x", "placeholder", "x", [], {}, ["tensor", "float32", "cpu", ["s0", 4], [4, 1], 0]]
Y = ["y", "call_function", "aten::mm.default", [{"node": "x"}, {"node": "c"}], {}, ["tensor", "float32", "cpu", ["s0", 4], [4, 1], 2]]  # fmt: skip  # noqa: E501
C = ["c", "get_attr", ["table", "float32", [1, 1], "AACAPw=="], [], {}, ["tensor", "float32", "cpu", [1, 1], [1, 1], 1]]
OUT: list[Any] = ["output", "output", "output", [{"tuple": [{"node": "y"}]}], {}, None]


def graph_of(*nodes: list[Any]) -> dict[str, Any]:
    return copy.deepcopy({"hints": [8], "graphs": [list(nodes)]})


def test_a_right_graph_passes_and_its_constant_is_what_was_written() -> None:
    data = check_graphs(graph_of(X, C, Y, OUT), 1, "graph")
    (graph,) = decode(data)
    assert graph.table.tolist() == [[1.0]]
    assert [node.name for node in graph.graph.nodes] == ["x", "c", "y", "output"]


def node(**changes: Any) -> list[Any]:
    fields = dict(zip(("name", "kind", "target", "args", "kwargs", "value"), copy.deepcopy(Y), strict=True))
    return list({**fields, **changes}.values())


X2 = {"node": "x"}
ATTACKS: dict[str, Any] = {
    "another function": node(target="os.system", args=["true"]),
    "an operator that maps files": node(target="aten::from_file.default", args=["/etc/passwd"]),
    "an operator that writes": node(target="aten::add_.Tensor", args=[X2, X2]),
    "a method": node(kind="call_method", target="__reduce__", args=[X2]),
    "a collective of a tensor": node(kind="call_method", target="all_reduce", args=[X2, X2]),
    "a module": node(kind="call_module", target="x", args=[X2]),
    "a name that is code": node(name="y; import os"),
    "a name that is a keyword": node(name="lambda"),
    "a name that is taken": node(name="x"),
    "a default that is code": ["y", "placeholder", "y=__import__('os')", [], {}, None],
    "a placeholder's default": ["y", "placeholder", "y", [1], {}, None],
    "a later node": node(args=[X2, {"node": "output"}]),
    "a pickle": node(args=[X2, {"pickle": "gASVCg=="}]),
    "a node that is made of itself": node(args=[{"node": "y"}, X2]),
    "a text for a tensor": node(args=[X2, "x"]),
    "a number for a list": node(target="aten::view.default", args=[X2, {"torch": "float32"}]),
    "a dtype that is a number": node(target="aten::to.dtype", args=[X2, 6]),
    "a view of memory beyond": node(target="aten::_reshape_alias.default", args=[X2, [1 << 20], [1]]),
    "an attribute of torch": node(args=[X2, {"torch": "load"}]),
    "a device that is none": node(args=[X2, {"device": "cpu:os"}]),
    "two kinds of argument": node(args=[X2, {"node": "x", "tuple": []}]),
    "a number that is too large": node(args=[X2, 1 << 70]),
    "an attribute of the module": ["y", "get_attr", ["forward", "float32", [1], "AACAPw=="], [], {}, None],
    "an attribute that is code": ["y", "get_attr", ['a"),__import__("os', "float32", [1], "AACAPw=="], [], {}, None],
    "a constant of another size": ["y", "get_attr", ["t", "float32", [2], "AACAPw=="], [], {}, None],
    "a constant without bound": ["y", "get_attr", ["t", "float32", [1 << 40], "AACAPw=="], [], {}, None],
    "a dtype that is a function": node(value=["tensor", "load", "cpu", [4], [1], 0]),
    "a size that is code": node(value=["tensor", "float32", "cpu", ["__import__('os')"], [1], 0]),
    "a size without end": node(value=["tensor", "float32", "cpu", ["9**9**9**9"], [1], 0]),
    "a size of another graph": node(value=["tensor", "float32", "cpu", ["s7"], [1], 0]),
    "a size in many brackets": node(value=["tensor", "float32", "cpu", ["(" * 300 + "1" + ")" * 300], [1], 0]),
    "a size below zero": node(value=["tensor", "float32", "cpu", [-4], [1], 0]),
    "more memory than there is": node(value=["tensor", "float32", "cpu", [1 << 40, 1 << 40], [1, 1], 0]),
    "two values": node(value=["tensor", "float32"]),
    "arguments that are none": node(args="x"),
    "too few fields": Y[:5],
    "an output in between": ["y", "output", "output", [{"tuple": []}], {}, None],
    "no node": 7,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_no_graph_is_refused(attack: str) -> None:
    with pytest.raises(MalformedRecord, match="graph"):
        check_graphs(graph_of(X, C, ATTACKS[attack], OUT), 1, "graph")


@pytest.mark.parametrize("hint", [0, 1, -1, True, 1.5, "8", None, 1 << 60])
def test_a_size_of_the_trace_that_is_none_is_refused(hint: Any) -> None:
    with pytest.raises(MalformedRecord, match="hints: expected a whole number of at least 2"):
        check_graphs({**graph_of(X, C, Y, OUT), "hints": [hint]}, 1, "graph")


@pytest.mark.parametrize("nodes", [[], [X], [OUT, X], [X, OUT]])
def test_a_graph_ends_in_one_output_of_its_own_nodes(nodes: list[Any]) -> None:
    with pytest.raises(MalformedRecord):
        check_graphs(graph_of(*nodes), 1, "graph")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab/é日", max_size=5)
KEYS = st.sampled_from(["node", "tuple", "a"])
ANYTHING = st.recursive(
    PLAIN | st.sampled_from(["x", "s0", "tensor"]),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(KEYS, inside, max_size=2),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    return [at, *(path for key, each in inside for path in paths(each, (*at, key)))]


@given(data=st.data())
def test_whatever_stands_in_place_of_a_part_is_refused_or_builds(data: st.DataObject) -> None:
    graph: Any = graph_of(X, C, Y, OUT)
    *way, last = data.draw(st.sampled_from(paths(graph)[1:]))
    part = graph
    for key in way:
        part = part[key]
    part[last] = data.draw(ANYTHING)
    try:
        checked = check_graphs(graph, 1, "graph")
    except MalformedRecord:
        return
    decode(checked)

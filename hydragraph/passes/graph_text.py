"""Readable text of FX graphs, one operator per line, and comparison of graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx


def graph_text(module: fx.GraphModule) -> str:
    """Return a graph's text, without names that depend on earlier traces."""
    # Number inputs named "other" from 0; their own numbers depend on transformers' release.
    names: dict[fx.Node, str] = {}
    others = 0
    lines = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            is_other = node.name.startswith("other_")
            names[node] = f"other_{others}" if is_other else node.name
            others += is_other
            lines.append(f"placeholder {names[node]}")
            continue
        names[node] = f"%{len(names)}"
        args: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Name(names[n]))
        if node.op == "output":
            lines.append(f"return {args[0][0]}")
        else:
            operands = [*map(repr, args[0]), *(f"{k}={v!r}" for k, v in args[1].items())]
            lines.append(f"{names[node]} = {operator_name(node)}({', '.join(operands)})")
    return "\n".join(lines) + "\n"


def changes(before: fx.GraphModule | None, after: fx.GraphModule) -> str:
    """Return a graph's operator count and changes: "21 operators: +2 hydragraph.tp_enter.default"."""
    old, new = (_operators(module) for module in (before, after))
    count = f"{new.total()} operator{'s' * (new.total() != 1)}"
    if before is not None and graph_text(before) == graph_text(after):
        return f"{count}: unchanged"
    more = [f"+{times} {name}" for name, times in sorted((new - old).items())]
    fewer = [f"-{times} {name}" for name, times in sorted((old - new).items())]
    return f"{count}: {', '.join(more + fewer) or 'the same operators, rearranged'}"


def operator_name(node: fx.Node) -> str:
    """Return a node's target, such as "aten.mm.default", "getitem", or ".all_reduce"."""
    if isinstance(node.target, str):
        return f".{node.target}" if node.op == "call_method" else node.target
    if node.target.__module__ == "_operator":
        return node.target.__name__
    return str(node.target).split(" at 0x")[0]


def _operators(module: fx.GraphModule | None) -> Counter[str]:
    nodes = module.graph.nodes if module is not None else ()
    # hydragraph's own functions are printed as "<function communicate".
    return Counter(
        operator_name(node).removeprefix("<function ") for node in nodes if node.op not in ("placeholder", "output")
    )


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

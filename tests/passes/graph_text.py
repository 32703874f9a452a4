"""FX graphs as text that a person can compare: one operator a line, values numbered in order."""

from __future__ import annotations

from torch import fx


def graph_text(module: fx.GraphModule) -> str:
    """Return a graph's operators; only placeholders keep their names, since all others vary with what ran before.

    Those of other tensors that a block was called with are counted: releases of transformers differ in how many a block
    does not use.
    """
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
        args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Name(names[n]))
        if node.op == "output":
            lines.append(f"return {args[0][0]}")
        else:
            given = [*map(repr, args[0]), *(f"{k}={v!r}" for k, v in args[1].items())]
            lines.append(f"{names[node]} = {_target(node)}({', '.join(given)})")
    return "\n".join(lines) + "\n"


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


def _target(node: fx.Node) -> str:
    if node.op == "call_method":
        return f".{node.target}"
    return node.target.__name__ if node.target.__module__ == "_operator" else str(node.target).split(" at 0x")[0]  # type: ignore[union-attr]

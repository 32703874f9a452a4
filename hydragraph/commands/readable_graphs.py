"""Runnable Python code of a variant's graphs, with the model's names."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.ir.graph_data import placeholders_of, results_of, value_of
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.graph_passes import modules_of
from hydragraph.private.operator_schemas import is_operator
from hydragraph.private.tracing import symbol_name

_LEGEND = """\
T is the number of tokens in the hidden state or, under sequence parallelism, in the rank's shard. S is the number of
sequences plus one. Instructions that free values are omitted."""
_HEAD = """import torch

import hydragraph.kernels.varlen_attention  # registers torch.ops.hydragraph

aten, hydragraph = torch.ops.aten, torch.ops.hydragraph
"""


def forward_code(variant: Variant, title: str) -> str:
    names = _names(variant.forward, [_identifier(name) for name in variant.inputs])
    results = [f"output {i}" if variant.outputs > 1 else "the output" for i in range(variant.outputs)]
    results += [f"saved.{i}" for i in range(len(results_of(variant.forward)) - variant.outputs)]
    return _text(variant, "forward", names, variant.inputs, results, title)


def backward_code(variant: Variant, title: str) -> str:
    forward = _names(variant.forward, [_identifier(name) for name in variant.inputs])
    saved = {f"saved.{i}": forward[node] for i, node in enumerate(results_of(variant.forward)[variant.outputs :])}
    # An accumulated gradient takes the sum so far and its factor, 0 or 1.
    arguments = [*variant.needs]
    for name in variant.added:
        arguments += [f"total of {name}", f"beta of {name}"]
    names = _names(variant.backward, [saved.get(argument) or _identifier(argument) for argument in arguments])
    results = [f"the gradient of {name}" for name in variant.gradients]
    return _text(variant, "backward", names, arguments, results, title)


def _text(
    variant: Variant, kind: str, names: Mapping[fx.Node, str], inputs: Sequence[str], results: Sequence[str], title: str
) -> str:
    module = modules_of(variant)[kind]
    size = _sizes(variant)
    lines = [f'"""{title}', "", _LEGEND, '"""', "", _HEAD, "", f"def {kind}("]
    for node, meaning in zip(placeholders_of(module), inputs, strict=True):
        comment = "" if names[node] == meaning else f"  # {meaning}"
        lines.append(f"    {names[node]}{_annotation(node, size)},{comment}")
    lines.append("):")
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            lines.append(f"    {names[node]}{_annotation(node, size)} = {_call(node, names)}")
    lines.append("    return (")
    for value, meaning in zip(results_of(module), results, strict=True):
        lines.append(f"        {_argument(value, names)},  # {meaning}")
    return "\n".join([*lines, "    )", ""])


def _names(module: fx.GraphModule, placeholders: Sequence[str]) -> dict[fx.Node, str]:
    names: dict[fx.Node, str] = {}
    used: set[str] = set()
    placeholder_names = iter(placeholders)
    for node in module.graph.nodes:
        name = next(placeholder_names) if node.op == "placeholder" else node.name
        while name in used:
            name += "_"
        names[node] = name
        used.add(name)
    return names


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _sizes(variant: Variant) -> Callable[[object], str]:
    nodes = dict(zip(variant.inputs, placeholders_of(variant.forward), strict=True))
    first = [nodes["hidden"]] if "hidden" in nodes else list(nodes.values())
    # The token count is dimension 1 of the hidden state, or of the first input with a symbol.
    tokens = next((s for node in first for size in _shape(node)[1:2] for s in _symbols(size)), None)

    def write(size: object) -> str:
        return re.sub(r"\b[su]\d+\b", lambda match: "T" if match[0] == tokens else "S", _expression(size))

    return write


def _expression(size: object) -> str:
    return (symbol_name(size) if isinstance(size, torch.SymInt) else None) or str(size)


def _symbols(size: object) -> Iterator[str]:
    return (match[0] for match in re.finditer(r"\b[su]\d+\b", _expression(size)))


def _shape(node: fx.Node) -> Sequence[Any]:
    value = value_of(node)
    return value.shape if isinstance(value, Tensor) else ()


def _annotation(node: fx.Node, size: Callable[[object], str]) -> str:
    value = value_of(node)
    if isinstance(value, Tensor):
        return f': "{str(value.dtype).removeprefix("torch.")}[{", ".join(size(s) for s in value.shape)}]"'
    return f': "{size(value)}"' if isinstance(value, torch.SymInt) else ""


def _call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    arguments = [_argument(a, names) for a in node.args]
    arguments += [f"{key}={_argument(a, names)}" for key, a in node.kwargs.items()]
    if node.target is operator.getitem:
        return f"{arguments[0]}[{arguments[1]}]"
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    if node.op == "get_attr":
        return f"self.{node.target}"
    return f"{_target(node.target)}({', '.join(arguments)})"


def _target(target: Any) -> str:
    return str(target) if is_operator(target) else f"{target.__module__}.{target.__qualname__}"


def _argument(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (tuple, list)):
        inside = ", ".join(_argument(item, names) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return repr(value) if not isinstance(value, float) or math.isfinite(value) else f'float("{value}")'

"""Rejection of operators with incompatible dtypes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.ir.program import Template
from hydragraph.private.operator_schemas import is_operator
from hydragraph.private.tracing import hint_of


def refuse_mixed_dtypes(template: Template, where: str, dtype: torch.dtype) -> None:
    tensors = dict(zip(placeholders_of(template.graph), (*template.parameters, *template.buffers), strict=False))
    # asked: operator and dtypes -> PyTorch's error, or "" if accepted.
    asked: dict[object, str] = {}
    for node in template.graph.graph.nodes:
        floating_operands = [n for n in node.all_input_nodes if _is_floating(value_of(n))]
        dtypes = [value_of(n).dtype for n in floating_operands]
        if not is_operator(node.target) or len(set(dtypes)) < 2:
            continue
        key = (node.target, *dtypes)
        if key not in asked:
            asked[key] = _failure(node)
        if asked[key]:
            named = {value_of(n).dtype: _behind(n, tensors) or n.name for n in reversed(floating_operands)}
            said = " and ".join(f"{kind} ({name})" for kind, name in reversed(named.items()))
            weight = next((name for name in named.values() if name in tensors.values()), "the weight")
            what = f"{node.target} gets operands of {said}, but requires one dtype ({asked[key]})"
            remedy = f"cast the operands used with {weight} to {dtype}, the dtype of all parameters"
            raise Unsupported(what, where=where, remedy=remedy)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _failure(node: fx.Node) -> str:
    target: Any = node.target
    try:
        with torch.no_grad():
            args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), _zeros)
            target(*args, **kwargs)
    except NotImplementedError:
        # Not available on CPUs
        return ""
    except Exception as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def _zeros(argument: Any) -> Any:
    value = value_of(argument) if isinstance(argument, fx.Node) else argument
    if isinstance(value, Tensor):
        return torch.zeros((), dtype=value.dtype).expand([hint_of(size) for size in value.shape])
    if isinstance(value, torch.SymInt):
        return hint_of(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _behind(node: fx.Node, tensors: dict[fx.Node, str]) -> str:
    while node not in tensors:
        inputs = [n for n in node.all_input_nodes if _is_floating(value_of(n))]
        if len(inputs) != 1:
            return ""
        node = inputs[0]
    return tensors[node]

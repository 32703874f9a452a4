"""Conversion of graphs to plain data, for JSON and pickle, and back.

    {"hints": [64, 5],                       sizes of s0, s1
     "graphs": [[["hidden", "placeholder", "hidden", [], {}, ["tensor", "float32", "cpu", [1, "s0", 64], ...]],
                 ["t", "call_function", "aten::t.default", [{"node": "hidden"}], {}, ["tensor", ...]],
                 ["output", "output", "output", [{"tuple": [{"node": "t"}]}], {}, None]]]}

A node is [name, kind, target, args, kwargs, value]. Targets are operators or functions in `PYTHON`; decoding never
evaluates or imports names.
"""

from __future__ import annotations

import base64
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from hydragraph.ir.placeholders import communicate
from hydragraph.private.graph_values import (
    SYMBOLIC,
    TensorForm,
    ValueDecoder,
    ValueEncoder,
    form_in,
    storage_of,
    storages,
)
from hydragraph.private.module_internals import graph_module
from hydragraph.private.operator_schemas import full_name, is_operator

_OPERATORS = "getitem add sub mul floordiv truediv mod pow neg eq ne lt le gt ge and_ or_"
PYTHON: Mapping[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"torch.{f.__name__}": f for f in (torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_not)},
    **{f"math.{f.__name__}": f for f in (math.sqrt, math.ceil, math.floor, math.trunc)},
    **{f"torch.{f.__name__}": f for f in SYMBOLIC},
    "hydragraph.communicate": communicate,
}
_NAMES = {function: name for name, function in PYTHON.items()}


def encode(*graphs: fx.GraphModule) -> dict[str, Any]:
    """Convert the graphs of one trace to data, or raise a ValueError if data cannot represent them."""
    values = ValueEncoder()
    return {"graphs": [[_node(n, graph, values) for n in graph.graph.nodes] for graph in graphs], "hints": values.hints}


def decode(data: Mapping[str, Any]) -> list[fx.GraphModule]:
    """Build graphs from data, or raise a ValueError for an unknown target."""
    values = ValueDecoder(data["hints"])
    return [_graph(nodes, values) for nodes in data["graphs"]]


def placeholders_of(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def results_of(module: fx.GraphModule) -> list[fx.Node]:
    results: Any = module.graph.output_node().args[0]
    return list(results)


def form_of(node: Any) -> TensorForm | None:
    """Return the dtype and sizes of a node's tensor without building it, or None for other values."""
    if isinstance(node, fx.Node) and "val" not in node.meta and "form" in node.meta:
        form: TensorForm | None = node.meta["form"]
        return form
    value = value_of(node)
    return TensorForm(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else None


def value_of(node: Any) -> Any:
    """Return a node's traced value (fake tensor, size, tuple), or None."""
    if not isinstance(node, fx.Node):
        return None
    # Decoded nodes build their values on first use.
    if "val" not in node.meta and "later" in node.meta:
        node.meta["val"] = node.meta["later"]()
    return node.meta.get("val")


def storages_of(node: Any) -> list[tuple[int, TensorForm]]:
    """Return the storage number and form of each tensor in a value."""
    # The data of decoded nodes has the original numbers; equal decoded tensors are one object.
    meta = node.meta if isinstance(node, fx.Node) else {}
    if "forms" in meta:
        return list(zip(meta["storages"], meta["forms"](), strict=True))
    value = value_of(node)
    tensors = [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, Tensor)]
    numbers = meta.get("storages") or list(map(storage_of, tensors))
    forms = (TensorForm(tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    return list(zip(numbers, forms, strict=True))


def _node(node: fx.Node, graph: fx.GraphModule, values: ValueEncoder) -> list[Any]:
    kwargs = {name: _argument(value) for name, value in node.kwargs.items()}
    value = None if node.op == "output" else values.value(value_of(node), node.meta.get("storages", ()))
    return [node.name, node.op, _target(node, graph), [_argument(a) for a in node.args], kwargs, value]


def _target(node: fx.Node, graph: fx.GraphModule) -> Any:
    if node.op == "get_attr":
        constant = operator.attrgetter(str(node.target))(graph)
        if not isinstance(constant, Tensor):
            raise ValueError(
                f"{node.target}: graph data cannot represent an attribute of type {type(constant).__name__}"
            )
        return [str(node.target), *_constant(constant)]
    if is_operator(node.target):
        return full_name(node.target)
    if isinstance(node.target, str):
        return node.target
    if node.target not in _NAMES:
        raise ValueError(f"{node.name}: graph data cannot represent the target {node.target}")
    return _NAMES[node.target]


def _constant(tensor: Tensor) -> list[Any]:
    # Store bytes, because NumPy has no bfloat16.
    elements = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    content = base64.b64encode(elements).decode()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content]


def _constant_of(dtype: str, shape: list[int], content: str) -> Tensor:
    elements = bytearray(base64.b64decode(content))
    if not elements:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(elements, dtype=getattr(torch, dtype)).reshape(shape)


def _argument(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case complex():
            return {"complex": [_argument(value.real), _argument(value.imag)]}
        case fx.Node():
            return {"node": value.name}
        case tuple():
            return {"tuple": [_argument(v) for v in value]}
        case list():
            return [_argument(v) for v in value]
        case slice():
            return {"slice": [_argument(v) for v in (value.start, value.stop, value.step)]}
        case torch.dtype() | torch.memory_format() | torch.layout():
            return {"torch": str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case torch.SymInt() if value.node.is_constant():
            return int(value)
    raise ValueError(f"graph data cannot represent the argument {value!r} of type {type(value).__name__}")


def _graph(nodes: list[Any], values: ValueDecoder) -> fx.GraphModule:
    graph = fx.Graph()
    by_name: dict[str, fx.Node] = {}
    constants: dict[str, Tensor] = {}
    for name, op, target, args, kwargs, value in nodes:
        if op == "get_attr":
            target, *content = target
            constants[target] = _constant_of(*content)
        callee = known_target(target) if op == "call_function" else target
        operands = tuple(_read(a, by_name) for a in args)
        node = graph.create_node(op, callee, operands, {k: _read(v, by_name) for k, v in kwargs.items()}, name)
        # `create_node` changes names of Python builtins.
        node.name = name
        by_name[name] = node
        if value is not None:
            # Most values are never read, so they are built on first use (`value_of`).
            node.meta["later"] = lambda value=value: values.value(value)
            node.meta["storages"] = storages(value)
            node.meta["form"] = form_in(value)
            node.meta["forms"] = partial(values.forms, value)
    return graph_module(constants, graph)


def known_target(name: str) -> Callable[..., Any]:
    """Return the function or operator with the given name, or raise a ValueError."""
    if name in PYTHON:
        return PYTHON[name]
    namespace, _, rest = name.partition("::")
    operator_name, _, overload = rest.partition(".")
    try:
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), operator_name), overload)
        return found
    except AttributeError as error:
        raise ValueError(
            f"a saved graph calls {name}, which this PyTorch does not have: capture the model again"
        ) from error


_FORMATS = (torch.dtype, torch.memory_format, torch.layout)


def _read(value: Any, by_name: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_read(v, by_name) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return by_name[content]
    if kind == "tuple":
        return tuple(_read(v, by_name) for v in content)
    if kind == "slice":
        return slice(*(_read(v, by_name) for v in content))
    if kind == "device":
        return torch.device(content)
    if kind == "float":
        return float(content)
    if kind == "complex":
        return complex(*(_read(v, by_name) for v in content))
    constant = getattr(torch, content, None)
    if kind != "torch" or not isinstance(constant, _FORMATS):
        raise ValueError(f"a saved graph has the unknown argument {value!r}: capture the model again")
    return constant

"""Pass `clean`: remove assertions, no-op casts, fixed devices and dead code from an exported graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.passes.graph_node import CASTS, operands
from hydragraph.private.module_internals import graph_module

aten = torch.ops.aten

GRAD_MODE = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"
NO_OPS = CASTS | {aten.alias.default, aten.dropout.default, aten.contiguous.default}
# Assertions check only traced sizes; `prove_sizes` proves more.
ASSERTIONS = frozenset(
    {aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten.sym_constrain_range_for_size.default}
)
# Operations and methods that are kept even if unused.
IMPURE = frozenset({"output", "placeholder", "addmm_"})
SYNONYMS = {
    "absolute": "abs",
    "divide": "div",
    "fix": "trunc",
    "multiply": "mul",
    "negative": "neg",
    "subtract": "sub",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "true_divide": "div",
    "special_expit": "sigmoid",
}


def clean(graph: fx.GraphModule) -> fx.GraphModule:
    result = graph_module(graph, copy_of(graph))
    inline_regions(result)
    for node in list(result.graph.nodes):
        node.target = _first_name(node.target)
        if node.target in ASSERTIONS:
            result.graph.erase_node(node)
        elif node.target in NO_OPS and _is_no_op(node):
            node.replace_all_uses_with(node.args[0])
            result.graph.erase_node(node)
        elif node.target is aten.copy.default and _fills(node):
            # Export turns x[...] = y into copy(x, y), without a derivative: use y.
            node.replace_all_uses_with(node.args[1])
            result.graph.erase_node(node)
        else:
            on_device(node, torch.device("cpu"))
            if node.target is aten.histc.default:
                _count_floats(result.graph, node)
    remove_dead_code(result.graph)
    result.recompile()
    return result


def _first_name(target: Any) -> Any:
    # aten.multiply.Tensor becomes aten.mul.Tensor, so later passes need one name.
    library, _, name = str(target).partition(".")
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, SYNONYMS[packet]), overload) if library == "aten" and packet in SYNONYMS else target


def copy_of(module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return graph


def remove_dead_code(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if not node.users and IMPURE.isdisjoint((node.op, node.target)):
            graph.erase_node(node)
    graph.lint()


def read_sizes_of_values(graph: fx.Graph) -> None:
    """Read sizes from inputs whose values the graph also reads, so that it needs no input for its size only.

    Tracing reads a size that several inputs share, such as the number of tokens, from any of these inputs.
    """
    # sizes: symbol -> an input and its dimension of this size
    sizes: dict[str, tuple[fx.Node, int]] = {}
    only_sized: list[fx.Node] = []
    for node in graph.find_nodes(op="placeholder"):
        if all(user.target is aten.sym_size.int for user in node.users):
            only_sized.append(node)
        elif isinstance(value := value_of(node), torch.Tensor):
            for d, size in enumerate(value.shape):
                sizes.setdefault(str(size), (node, d))
    for node in only_sized:
        for reader in list(node.users):
            reader.args = sizes.get(str(value_of(reader)), reader.args)


def _is_no_op(node: fx.Node) -> bool:
    if node.target is aten.dropout.default:
        return operands(node)[1] == 0 or not operands(node)[2]
    before = value_of(operands(node)[0])
    after = value_of(node)
    if before is None or after is None:
        return False
    if node.target is aten.contiguous.default and not before.is_contiguous():
        return False
    # Meta devices come from tracing, not from the model.
    return bool(before.dtype == after.dtype and (before.device == after.device or after.device.type == "meta"))


def _fills(node: fx.Node) -> bool:
    into, source = (value_of(n) for n in operands(node)[:2])
    return bool(into.dtype == source.dtype and list(map(str, into.shape)) == list(map(str, source.shape)))


def _count_floats(graph: fx.Graph, node: fx.Node) -> None:
    counted: Any = operands(node)[0]
    dtype = value_of(counted).dtype
    # On CPU, histc rejects integers.
    if dtype.is_floating_point:
        return
    # Counts up to 2^24 are exact in fp32; a micro-batch has fewer tokens.
    with graph.inserting_before(node):
        floats = graph.call_function(aten._to_copy.default, (counted,), {"dtype": torch.float32})
    floats.meta = {**counted.meta, "val": value_of(counted).float()}
    node.args = (floats, *operands(node)[1:])
    with graph.inserting_after(node):
        counts = graph.call_function(aten._to_copy.default, (node,), {"dtype": dtype})
    counts.meta = dict(node.meta)
    node.meta = {**node.meta, "val": value_of(node).float()}
    # Otherwise, `counts` would become its own operand.
    node.replace_all_uses_with(counts, delete_user_cb=lambda user: user is not counts)


def count_integers(node: fx.Node) -> None:
    """Undo `_count_floats`, because GPUs count only integers deterministically."""
    cast = operands(node)[0]
    if cast.target is not aten._to_copy.default:
        return
    counted = operands(cast)[0]
    dtype = value_of(counted).dtype
    if not dtype.is_floating_point and all(
        user.target is aten._to_copy.default and user.kwargs.get("dtype") == dtype for user in node.users
    ):
        node.args = (counted, *operands(node)[1:])
        node.meta = {**node.meta, "val": value_of(node).to(dtype)}


def on_device(node: fx.Node, device: torch.device) -> None:
    node.args = tuple(device if isinstance(value, torch.device) else value for value in node.args)
    node.kwargs = {k: device if isinstance(value, torch.device) else value for k, value in node.kwargs.items()}


def region(module: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    # Operands: (mode, body, *inputs) of no_grad; (device type, dtype, enabled, cache enabled, body,
    # *inputs) of autocast.
    at = 1 if GRAD_MODE in str(node.target) else 4
    body, *arguments = operands(node)[at:]
    return getattr(module, body.target), arguments


def inline_regions(module: fx.GraphModule) -> None:
    """Inline `torch.no_grad()` regions, whose results are detached, and regions that disable autocast."""
    for node in list(module.graph.nodes):
        if GRAD_MODE not in str(node.target) and AUTOCAST not in str(node.target):
            continue
        body, arguments = region(module, node)
        inline_regions(body)
        # First operand: the mode, False for no_grad.
        detaches = GRAD_MODE in str(node.target) and not operands(node)[0]
        inputs = placeholders_of(body)
        with module.graph.inserting_before(node):
            results: Any = module.graph.graph_copy(body.graph, dict(zip(inputs, arguments, strict=True)))
            if detaches:
                results = tuple(_detached(module.graph, r) for r in results)
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[operands(user)[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    result = graph.call_function(aten.detach.default, (value,))
    result.meta = dict(value.meta)
    return result

"""Conversion of an exported program to a functional graph."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from hydragraph.errors import Unsupported
from hydragraph.frontend.chosen_rows import with_all_rows
from hydragraph.frontend.dropout_calls import add_keys, number_calls
from hydragraph.frontend.token_axes import MADE
from hydragraph.frontend.untraceable import watched
from hydragraph.ir.graph_data import placeholders_of, value_of
from hydragraph.passes.clean import AUTOCAST, GRAD_MODE, clean, inline_regions, region, remove_dead_code
from hydragraph.passes.graph_node import operands
from hydragraph.private.argument_trees import tree_leaves
from hydragraph.private.operator_schemas import arguments_of, has_tag, transforms_functions
from hydragraph.private.tracing import decided, meta_as_cpu, quiet, writes

aten = torch.ops.aten

_TWO_DEVICES = ("device", "meta", "cpu")  # words that occur in PyTorch's message about tensors on different devices
# Part of a PyTorch message -> the cause in the model's code, and a remedy.
_KNOWN: Mapping[str, tuple[str, str]] = {
    "leaf Variable that requires grad": (
        "forward writes in place into its arguments, or into a parameter",
        "write into a copy (.clone()), or use an out-of-place operator (x = x + y)",
    ),
    "dynamic but your code specialized it": (
        "the graph is valid for only one number of tokens or sequences, because forward converts a size to a Python "
        "number, or uses a tensor from another call or block",
        "remove .tolist(), int(), torch.vmap and loops over tokens, and pass tensors as arguments",
    ),
    "satisfy the generated guard": (
        "the graph changes with the number of tokens or sequences, for example because it slices along that dimension",
        "compute with all tokens of a row: x[:, 1:] mixes sequences, and labels are already at the positions that "
        "predict them",
    ),
    "data-dependent expression": (
        "a Python decision depends on a tensor's value (if, assert, .item(), or a PyTorch function that checks values)",
        "choose values with torch.where, and remove checks of tensor values",
    ),
    "FlexAttention is only supported": (
        "forward calls flex_attention, which would mix packed sequences",
        "call hydragraph.varlen_attention(q, k, v, cu_seqlens), which supports windows, chunks, caps and sinks",
    ),
    "functorch tensor": ("forward uses torch.func within the trace", "replace torch.func with tensor operators"),
    "fake tensor in the exported program": (
        "forward uses a tensor that the trace does not see: one read through .data, kept from another call or block, "
        "or created within torch.func",
        "read parameters directly or with .detach(), pass tensors as arguments, and replace torch.func with operators",
    ),
}
_NAMED = 4
# Folders of PyTorch and hydragraph.
_NOT_THE_MODELS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_LONGEST = 80


def export(module: nn.Module, arguments: tuple[Any, ...], dynamic: tuple[Any, ...], where: str) -> ExportedProgram:
    """Trace a module with symbolic sizes; convert exceptions to Unsupported."""
    try:
        with watched(where, module), meta_as_cpu(), decided(), quiet():
            return torch.export.export(module, arguments, dynamic_shapes=dynamic, strict=False)
    except Unsupported:
        raise
    except Exception as error:
        raise _refusal(error, module, where) from error


def _refusal(error: Exception, module: nn.Module, where: str) -> Unsupported:
    text = str(error)
    if all(part in text for part in _TWO_DEVICES):
        named = f"a tensor that is not a parameter or buffer{_of_attributes(module)}"
        remedy = (
            "register this tensor with register_buffer, in a module that the model or loss contains, or "
            "create the tensor in forward with device=x.device"
        )
        what = f"forward or loss computes with {named}, which would stay on the CPU"
        return Unsupported(what, where=where, remedy=remedy)
    explanation = next((words for part, words in _KNOWN.items() if part in text), None)
    what, remedy = explanation or (
        f"torch.export cannot trace it with T tokens in N sequences ({_reason(error)})",
        "remove Python decisions on tensor values and token counts (.item(), if, slices) from forward",
    )
    return Unsupported(what + _line_of(error), where=where, remedy=remedy)


def _line_of(error: Exception) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_THE_MODELS) and Path(frame.filename).is_file():
            return f", at {Path(frame.filename).name}:{frame.lineno}, {(frame.line or '').strip()[:_LONGEST]!r}"
    return ""


def _of_attributes(module: nn.Module) -> str:
    names = [
        f"{prefix}.{name}".removeprefix(".").removeprefix("model.").removeprefix("block.")
        for prefix, child in module.named_modules()
        for name, value in vars(child).items()
        if name not in ("_parameters", "_buffers", "_modules")
        and any(isinstance(leaf, Tensor | nn.Module) for leaf in tree_leaves(value))
    ]
    return f" ({', '.join(names[:_NAMED])})" if names else ""


def _reason(error: Exception) -> str:
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()] or [""]
    line = lines[1] if lines[0].startswith("Constraints violated") and len(lines) > 1 else lines[0]
    return f"{type(error).__name__}: {line[:300]}"


def functional_graph(
    exported: ExportedProgram, where: str, block: bool = False
) -> tuple[fx.GraphModule, ExportGraphSignature]:
    """Return an exported program's functional graph, and its signature.

    Args:
        block: whether the graph is a block, in which `chosen_rows` rewrites row selections.

    Raises:
        Unsupported: an in-place write is unsupported, or an operator other than dropout draws random numbers.
    """
    _refuse_changes(exported, where)
    # Number dropout calls before nodes are reordered or removed.
    number_calls(exported.graph_module, where)
    graphs = (module for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule))
    if any(writes(node) for graph in graphs for node in graph.graph.nodes):
        # `run_decompositions` ignores torch.no_grad() regions.
        _refuse_unseen_writes(exported.graph_module, where)
        inline_regions(exported.graph_module)
        exported.graph_module.recompile()
        exported = exported.run_decompositions({})
    graph = clean(exported.graph_module)
    _refuse_operators(graph, where)
    if block:
        graph = with_all_rows(graph, where)
    # Use forms that the graph passes know.
    _write_concatenations(graph.graph)
    _write_linears(graph.graph)
    _write_elementwise_norms(graph.graph)
    add_keys(graph)
    remove_dead_code(graph.graph)
    graph.recompile()
    return graph, exported.graph_signature


def _refuse_unseen_writes(graph: fx.GraphModule, where: str) -> None:
    for node in graph.graph.nodes:
        if GRAD_MODE in str(node.target):
            body, _ = region(graph, node)
            outside = {n: n.name for n in placeholders_of(body)}
            _refuse_writes(body, outside, "under torch.no_grad() into a value from outside that region", where)
            _refuse_unseen_writes(body, where)
    detached = {n: n.name for n in graph.graph.nodes if n.target is aten.detach.default}
    _refuse_writes(graph, detached, "through .detach()", where)


def _refuse_writes(graph: fx.GraphModule, targets: dict[fx.Node, str], how: str, where: str) -> None:
    if _changed(graph, targets):
        remedy = "write into a copy (x.detach().clone()), or use an out-of-place operator"
        raise Unsupported(f"forward writes in place {how}, but autograd ignores this write", where=where, remedy=remedy)


def _refuse_changes(exported: ExportedProgram, where: str) -> None:
    signature = exported.graph_signature
    targets = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    graph = exported.graph_module
    changed = _changed(graph, {n: targets[n.name] for n in placeholders_of(graph) if n.name in targets})
    if changed:
        raise changes(changed.removeprefix("model.").removeprefix("block."), where)
    changed_input = _changed(graph, {n: n.name for n in graph.graph.nodes if n.name in signature.user_inputs})
    if changed_input:
        what = f"forward writes in place into its argument {changed_input.removeprefix('batch_')!r}"
        raise Unsupported(what, where=where, remedy="write into a copy (.clone()), or use an out-of-place operator")


def changes(name: str, where: str) -> Unsupported:
    remedy = "compute the tensor in every forward: buffers do not carry values from one step to the next"
    return Unsupported(f"forward changes {name!r}, but the change would be lost", where=where, remedy=remedy)


def _changed(graph: fx.GraphModule, targets: dict[fx.Node, str]) -> str | None:
    # `targets` grows: writing into a view also changes its target.
    targets = dict(targets)
    for node in graph.graph.nodes:
        if GRAD_MODE in str(node.target) or AUTOCAST in str(node.target):
            body, arguments = region(graph, node)
            inner = zip(placeholders_of(body), arguments, strict=True)
            inside = _changed(body, {n: targets[a] for n, a in inner if a in targets})
            if inside:
                return inside
        for argument in arguments_of(node):
            if argument.aliased and isinstance(argument.value, fx.Node) and argument.value in targets:
                if argument.written:
                    return targets[argument.value]
                targets[node] = targets[argument.value]
    return None


def _refuse_operators(graph: fx.GraphModule, where: str) -> None:
    for node in graph.graph.nodes:
        if transforms_functions(node.target):
            what = (
                "forward transforms a function (torch.cond, torch.vmap or similar); a captured graph has only operators"
            )
            remedy = "use torch.where instead of torch.cond, and einsum or broadcasting instead of torch.vmap"
            raise Unsupported(what, where=where, remedy=remedy)
        # `refuse_mixing` rejects it
        attends = "scaled_dot_product" in str(node.target)
        if not attends and has_tag(node.target, torch.Tag.nondeterministic_seeded):
            what = f"{node.target} draws random numbers, which would differ between ranks"
            remedy = "use torch.nn.functional.dropout, or disable randomness with model.eval() or model.dropout: false"
            raise Unsupported(what, where=where, remedy=remedy)


def _write_concatenations(graph: fx.Graph) -> None:
    """Replace tensors filled slice by slice with concatenations, which can be sharded."""
    for node in graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        parts = None if any(u.target is node.target for u in node.users) else _parts_written(node)
        if parts is not None:
            node.replace_all_uses_with(insert(node, aten.cat.default, parts, operands(node)[2]))


def _parts_written(last: fx.Node) -> list[fx.Node] | None:
    # written: (first, end, part) of each slice_scatter, last write first.
    written: list[tuple[int, int, fx.Node]] = []
    node = last
    dim = (*operands(last), 0)[2]
    while node.target is aten.slice_scatter.default and len(operands(node)) == 5 and operands(node)[2] == dim:
        before, part, _, first, end = operands(node)
        whole = value_of(node).shape[dim]
        if len(before.users) > 1 or not all(isinstance(n, int) for n in (whole, first, end)) or first < 0:
            return None
        written.append((first, min(end, whole), part))
        node = before
    written.sort(key=lambda each: each[0])
    # The parts must cover the dimension: [0, 2) and [2, 5) of 5 give ends = [0, 2, 5].
    ends = [0, *(end for _, end, _ in written)]
    whole = value_of(last).shape[dim]
    full = [first for first, _, _ in written] == ends[:-1] and ends[-1] == whole
    same = all(value_of(part).dtype is value_of(last).dtype for _, _, part in written)
    return [part for _, _, part in written] if full and same and node.target in MADE else None


def _write_linears(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.matmul.default):
        x, turned = operands(node)
        weight = operands(turned)[0] if _turns(turned) else turned
        if weight is not turned and weight.op == "placeholder" and value_of(weight).dim() == 2:
            node.replace_all_uses_with(insert(node, aten.linear.default, x, weight))


def _turns(node: fx.Node) -> bool:
    if node.target in (aten.t.default, aten.numpy_T.default):
        return True
    if node.target is aten.permute.default:
        return [d % 2 for d in operands(node)[1]] == [1, 0]
    return node.target is aten.transpose.int and operands(node)[1] % 2 != operands(node)[2] % 2


def _write_elementwise_norms(graph: fx.Graph) -> None:
    norms = graph.find_nodes(op="call_function", target=aten.batch_norm.default)
    for node in [n for n in norms if not n.args[5] and n.args[3]]:
        # Arguments 5 and 6 are `training` and `momentum`. [C] broadcasts as [C, 1, ...].
        x, weight, bias, mean, variance, _, _, eps, *_ = node.args
        sizes = [-1, *[1] * (len(value_of(x).shape) - 2)]
        with torch.no_grad():
            add = functools.partial(insert, node)
            scale = add(aten.rsqrt.default, add(aten.add.Tensor, variance, eps))
            scale = scale if weight is None else add(aten.mul.Tensor, scale, weight)
            centred = add(aten.sub.Tensor, x, add(aten.view.default, mean, sizes))
            result = add(aten.mul.Tensor, centred, add(aten.view.default, scale, sizes))
            if bias is not None:
                result = add(aten.add.Tensor, result, add(aten.view.default, bias, sizes))
            if value_of(result).dtype is not value_of(node).dtype:
                result = add(aten.to.dtype, result, value_of(node).dtype)
        node.replace_all_uses_with(result)


def insert(place: fx.Node, operator: Any, *arguments: Any) -> fx.Node:
    with place.graph.inserting_before(place):
        node = place.graph.call_function(operator, arguments)
    node.meta = {**place.meta, "val": operator(*fx.map_arg(arguments, value_of))}
    return node

"""Search for the valid ranges of a batch's fields, limited by tables that the fields index, and by the loss.

If a table of 50 rows is read at `position_ids + 2`, as in OPT, valid positions are -2 to 47.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from hydragraph.ir.graph_data import form_of, placeholders_of
from hydragraph.ir.placeholders import communicate
from hydragraph.ir.program import Block, Program
from hydragraph.passes.graph_node import CASTS, COPIES, operands
from hydragraph.passes.operator_rules import MOVES, VIEWS
from hydragraph.spec.field_ranges import FieldRange
from hydragraph.spec.workload import IGNORED

aten = torch.ops.aten

_PARTS = frozenset({aten.squeeze.default, aten.squeeze.dims, aten.select.int, aten.slice.Tensor, aten.t.default})
_SAME = VIEWS | MOVES | CASTS | COPIES | _PARTS | {communicate}
_SUMS: Mapping[Any, int] = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_LOSSES = frozenset(
    {aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss_forward.default}
)

Shifted = tuple[str, int]


def field_ranges_of(program: Program) -> tuple[FieldRange, ...]:
    limits: set[FieldRange] = set()
    aux = program.templates[program.aux.template]
    fields: dict[fx.Node, Shifted] = {}
    limits.update(_lookups(aux.graph, {name: (name, 0) for name in aux.inputs}, program.aux, program, fields))
    # Aux may pass fields, such as positions, to other blocks.
    outputs = next(n for n in aux.graph.graph.nodes if n.op == "output").args[0]
    shared = [fields.get(node) for node in outputs]
    seen = set()
    for block in program.blocks:
        # Layers of one template and equal aux inputs have equal limits.
        key = (block.template, block.aux)
        if key in seen:
            continue
        seen.add(key)
        template = program.templates[block.template]
        others = [name for name in template.inputs if name.startswith("other.")]
        known_inputs: dict[str, Shifted] = {
            name: (name, 0) for name in template.inputs if name not in ("hidden", *others)
        }
        known_inputs |= {name: field for name, at in zip(others, block.aux, strict=True) if (field := shared[at])}
        limits.update(_lookups(template.graph, known_inputs, block, program, {}))
    # Rotary embeddings index no table, so the config gives the maximum position.
    placed = any("position_ids" in template.inputs for template in program.templates.values())
    if program.positions is not None and placed and not any(limit.field == "position_ids" for limit in limits):
        most, setting = program.positions
        limits.add(FieldRange("position_ids", 0, most, f"the model's config ({setting})"))
    return tuple(sorted(limits))


def _lookups(
    graph: fx.GraphModule,
    known_inputs: Mapping[str, Shifted],
    block: Block,
    program: Program,
    fields: dict[fx.Node, Shifted],
) -> Iterator[FieldRange]:
    """Yield a block's limits on fields, and record values that equal a field plus a constant in `fields`."""
    template = program.templates[block.template]
    placeholders = placeholders_of(graph)
    tensor_names = dict(zip(placeholders, (*block.parameters, *block.buffers), strict=False))
    for node, name in zip(placeholders[len(tensor_names) :], template.inputs, strict=True):
        if name in known_inputs and (form := form_of(node)) is not None and form.integral:
            fields[node] = known_inputs[name]
    for node in graph.graph.nodes:
        if node.op == "call_function":
            shifted = _shifted(node, fields)
            if shifted is not None:
                fields[node] = shifted
            yield from _limits(node, fields, tensor_names)


def _shifted(node: fx.Node, fields: Mapping[fx.Node, Shifted]) -> Shifted | None:
    first, *rest = operands(node) or (None,)
    shifted = fields.get(first) if isinstance(first, fx.Node) else None
    form = form_of(node)
    if shifted is None or form is None or not form.integral:
        return None
    if node.target in _SAME:
        return shifted
    sign = _SUMS.get(node.target)
    if sign is not None and type(rest[0]) is int and len(rest) == 1 and not node.kwargs:
        return shifted[0], shifted[1] + sign * rest[0]
    return None


def _limits(
    node: fx.Node, fields: Mapping[fx.Node, Shifted], tensor_names: Mapping[fx.Node, str]
) -> Iterator[FieldRange]:
    arguments = operands(node)
    if node.target is aten.embedding.default:
        yield from _rows(arguments[0], 0, arguments[1], fields, tensor_names)
    elif node.target in (aten.index_select.default, aten.gather.default):
        yield from _rows(arguments[0], arguments[1], arguments[2], fields, tensor_names)
    elif node.target is aten.index.Tensor:
        # Unlike other lookups, indexing accepts -rows to -1.
        for dim, index in enumerate(arguments[1]):
            yield from _rows(arguments[0], dim, index, fields, tensor_names, backwards=True)
    elif node.target in _LOSSES and arguments[1] in fields:
        name, added = fields[arguments[1]]
        sizes = _sizes(arguments[0])
        classes = sizes[1] if len(sizes) > 1 else sizes[0]
        ignored = arguments[4] if len(arguments) > 4 else IGNORED
        if isinstance(classes, int) and added == 0:
            yield FieldRange(name, 0, classes, f"the loss over {classes} classes", ignored)


def _rows(
    table: Any,
    dim: int,
    index: Any,
    fields: Mapping[fx.Node, Shifted],
    tensor_names: Mapping[fx.Node, str],
    backwards: bool = False,
) -> Iterator[FieldRange]:
    if not isinstance(index, fx.Node) or index not in fields:
        return
    sizes = _sizes(table)
    rows = sizes[dim % len(sizes)] if len(sizes) else None
    if isinstance(rows, int):
        name, added = fields[index]
        # field + added must be in [low, rows).
        low = -rows if backwards else 0
        yield FieldRange(name, low - added, rows - added, tensor_names.get(table, f"a table of {rows} rows"))


def _sizes(node: fx.Node) -> tuple[Any, ...]:
    form = form_of(node)
    assert form is not None, "lookups must read a tensor"
    return form.sizes

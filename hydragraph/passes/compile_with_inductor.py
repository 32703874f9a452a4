"""Pass `compile_variant`: compile parts of a variant's graphs with Inductor.

Collectives, operators whose compiled sums are not deterministic, and sequences with too little to fuse stay uncompiled.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from hydragraph.errors import Unsupported
from hydragraph.ir.graph_data import placeholders_of, results_of, value_of
from hydragraph.passes.bind import bind
from hydragraph.passes.clean import remove_dead_code
from hydragraph.passes.collective_operators import RESULT
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.place import require_whole_backward
from hydragraph.private.inductor import (
    LEAST,
    Code,
    Condition,
    compile_graph,
    fake_like,
    missing_compiler,
    mode_of,
    run_fake,
    sources,
    symbols_of,
)
from hydragraph.private.operator_schemas import makes_tensors
from hydragraph.spec.strategy import Strategy

aten = torch.ops.aten

BACKENDS = ("inductor", "eager")
# Inductor tunes kernels for this first symbolic size.
TUNED = 2048
# Maximum versions of a piece: Inductor distinguishes small and large sizes, and 32-bit and 64-bit
# indices.
CODES = 4
WORTH = 2

UNORDERED = frozenset(
    {
        *(aten.embedding_dense_backward.default, aten.index_add.default, aten.index_put.default),
        *(aten._unsafe_index_put.default, aten.scatter_add.default, aten.scatter_reduce.two),
    }
)
# Operators not worth compiling: products run on cuBLAS or oneDNN, and NO_WORK operators change no
# element.
UNFUSED = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
NO_WORK = frozenset({aten._unsafe_view.default, aten.detach.default, aten.scalar_tensor.default})


def choose_backend(asked: str | None, device: torch.device) -> str:
    """Return `asked` or, if None, "inductor" on CUDA and "eager" elsewhere.

    Raises:
        ValueError: `asked` is not a backend.
        Unsupported: Inductor finds no compiler on this host.
    """
    if asked is not None and asked not in BACKENDS:
        raise ValueError(f"'backend' is {asked!r}: use {' or '.join(map(repr, BACKENDS))}, or None to choose by device")
    backend = asked or ("inductor" if device.type == "cuda" else "eager")
    missing = missing_compiler(device) if backend == "inductor" else None
    if missing is not None:
        raise Unsupported(missing, where='backend="inductor"', remedy='install it, or pass backend="eager"')
    return backend


def refuse_halves(strategy: Strategy) -> None:
    require_whole_backward(strategy, "compilation with Inductor", 'pass backend="eager"')


def compile_variant(
    variant: Variant, strides: Mapping[str, tuple[int, ...]], device: torch.device, where: str = "template"
) -> Variant:
    """Return an equivalent variant with compiled graphs.

    Args:
        variant: variant traced on CPU with contiguous weights.
        strides: by parameter name, the strides of the parameter's shard in a flat buffer.
        device: device of the inputs; 0-d integers are on the CPU.

    Raises:
        Unsupported: Inductor fails.
    """
    variant = bind(variant, device)
    fakes = {
        name: _place(value_of(node), device, strides.get(name))
        for node, name in zip(placeholders_of(variant.forward), variant.inputs, strict=True)
    }
    try:
        # results: fake outputs, then saved values, for whose strides the backward is compiled.
        forward, results = _compile(variant.forward, [fakes[name] for name in variant.inputs], strides, variant.inputs)
        saved = {f"saved.{i}": value for i, value in enumerate(results[variant.outputs :])}
        values = fakes | saved | {"tangent": fake_like(results[0], device)}
        backward = variant.backward
        if variant.gradients:
            backward, _ = _compile(variant.backward, [values.get(n) for n in variant.needs], strides, variant.needs)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        what = f"Inductor cannot compile the graph ({type(error).__name__}: {first_line})"
        raise Unsupported(what, where=where, remedy='pass backend="eager"; see the error above') from error
    return replace(variant, forward=forward, backward=backward)


def _place(value: Any, device: torch.device, strides: tuple[int, ...] | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Python reads 0-d integers, so they stay on the CPU.
    number = value.dim() == 0 and not value.is_floating_point()
    return fake_like(value, torch.device("cpu") if number else device, strides)


class GraphPiece(nn.Module):
    """Compiled part of a graph, called with the values of `symbols`, then the inputs.

    The uncompiled `graph` runs if no compiled code supports the sizes.
    """

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        super().__init__()
        self.graph = graph
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self.symbols = symbols_of(inputs)
        self.codes: list[tuple[Code, Condition]] = []
        # Inductor merges symbols of equal size, so use different sizes.
        self._compiled([TUNED + 64 * i for i in range(len(self.symbols))])

    def forward(self, *arguments: Any) -> Sequence[Any]:
        # Use the first code valid for the sizes, or compile another, up to CODES; but not for 0 and
        # 1, on which Inductor specializes.
        sizes = arguments[: len(self.symbols)]
        code = next((code for code, holds in self.codes if holds(sizes)), None)
        if code is None and self.codes and len(self.codes) < CODES and min(sizes) >= LEAST:
            code = self._compiled(sizes)
        return code(list(arguments)) if code is not None else self.graph(*arguments[len(sizes) :])

    def _compiled(self, sizes: Sequence[int]) -> Code | None:
        compiled = compile_graph(self.graph, self._inputs, self._outputs, dict(zip(self.symbols, sizes, strict=True)))
        self.codes += [compiled] if compiled is not None else []
        return compiled[0] if compiled is not None else None


@dataclass
class _Outer:
    module: fx.GraphModule
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    # Symbol -> node
    sizes: dict[Any, fx.Node] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)

    def copy(self, node: fx.Node, value: Any) -> None:
        self.new[node] = self.graph.node_copy(node, lambda n: self.new[n])
        self.values[node] = value


def _compile(
    module: fx.GraphModule, inputs: Sequence[Any], strides: Mapping[str, object], names: Sequence[str]
) -> tuple[fx.GraphModule, list[Any]]:
    outer = _Outer(module)
    placeholders = placeholders_of(module)
    for node, value in zip(placeholders, inputs, strict=True):
        outer.copy(node, value)
    # Compiled code expects contiguous inputs, except shards and saved values.
    for node, name in zip(placeholders, names, strict=True):
        if isinstance(outer.values[node], Tensor) and name not in strides and not name.startswith("saved."):
            outer.new[node] = outer.graph.call_function(aten.contiguous.default, (outer.new[node],))
    _read_sizes(outer, placeholders)
    mode = mode_of(inputs)
    # Keep the graph's order, so that all ranks call collectives in the same order.
    for run in _runs(module):
        values = _run(outer, run, mode)
        if _worth(run, values):
            _add_piece(outer, run, values)
        else:
            for node in run:
                outer.copy(node, values[node])
    results = results_of(module)
    outer.graph.output(tuple(outer.new[n] for n in results))
    remove_dead_code(outer.graph)
    return fx.GraphModule(outer.parts, outer.graph), [outer.values[n] for n in results]


def _read_sizes(outer: _Outer, placeholders: Sequence[fx.Node]) -> None:
    # A symbol is the size of input `index` along `dim` (None: the input itself), divided by
    # `factor`.
    call = outer.graph.call_function
    for symbol, (index, dim, factor) in sources([outer.values[n] for n in placeholders]).items():
        node = outer.new[placeholders[index]]
        size = node if dim is None else call(aten.sym_size.int, (node, dim))
        outer.sizes[symbol] = size if factor == 1 else call(operator.floordiv, (size, factor))


def _runs(module: fx.GraphModule) -> list[list[fx.Node]]:
    # runs: pieces and single kept nodes in graph order. place: node -> index of its run.
    runs: list[list[fx.Node]] = [[]]
    place: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        # A getitem joins its operand's run, so that no tuple enters or leaves pieces.
        if node.target is operator.getitem and node.args[0] in place:
            place[node] = place[node.args[0]]
            runs[place[node]].append(node)
        elif _kept(node):
            place[node] = len(runs)
            runs += [[node], []]
        else:
            place[node] = len(runs) - 1
            runs[-1].append(node)
    return [run for run in runs if run]


def _kept(node: fx.Node) -> bool:
    return node.op != "call_function" or node.target in UNORDERED


def _run(outer: _Outer, run: Sequence[fx.Node], mode: Any) -> dict[fx.Node, Any]:
    values = dict(outer.values)
    for node in run:
        if node.op == "call_function":
            values[node] = run_fake(node, values, mode)
        # A started collective's value is (result, operand).
        elif node.op == "call_method" and node.target == RESULT:
            values[node] = values[node.all_input_nodes[0]][0]
        elif node.op == "call_method":
            values[node] = _received(value_of(node), values[node.all_input_nodes[1]].device)
        else:
            constant = getattr(outer.module, str(node.target))
            outer.parts[str(node.target)] = constant
            values[node] = mode.from_tensor(constant)
    return values


def _received(value: Any, device: torch.device) -> Any:
    return fake_like(value, device) if isinstance(value, Tensor) else tuple(fake_like(v, device) for v in value)


def _worth(run: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    # Calling a piece costs more than calling one operator.
    fusable = [n for n in run if not _kept(n) and n.target not in UNFUSED | NO_WORK and makes_tensors(n.target)]
    ends = {*_entering(run), *_leaving(run)}
    return len(fusable) >= WORTH and all(isinstance(values[n], Tensor | torch.SymInt) for n in ends)


def _entering(run: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(run)
    return list(dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in inside))


def _leaving(run: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(run)
    return [node for node in run if any(user not in inside for user in node.users)]


def _add_piece(outer: _Outer, run: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> None:
    inputs = _entering(run)
    outputs = _leaving(run)
    graph = fx.Graph()
    inner = dict[fx.Node, fx.Node]()
    for node in inputs:
        inner[node] = graph.placeholder(node.name)
    for node in run:
        inner[node] = graph.node_copy(node, lambda n: inner[n])
    graph.output(tuple(inner[n] for n in outputs))
    piece = GraphPiece(fx.GraphModule({}, graph), [values[n] for n in inputs], [values[n] for n in outputs])
    name = f"piece_{len(outer.parts)}"
    outer.parts[name] = piece
    # A piece takes its symbols' values, then inputs, and returns a tuple.
    arguments = [outer.sizes[s] for s in piece.symbols] + [outer.new[n] for n in inputs]
    results = outer.graph.create_node("call_module", name, tuple(arguments))
    for i, node in enumerate(outputs):
        outer.new[node] = outer.graph.call_function(operator.getitem, (results, i))
        outer.values[node] = values[node]

"""Internals of tracing: fake tensors, symbolic shapes, partitioners."""

from __future__ import annotations

import builtins
import contextlib
import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
import torch._functorch.config
import torch._prims
import torch.nn.functional as F
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import SLoc, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from hydragraph.private.module_internals import graph_module
from hydragraph.private.operator_schemas import aten_operators, has_tag

_CASTS = aten_operators("_to_copy to.dtype to.device to.dtype_layout")
# PyTorch inserts `detach` up to version 2.13, later `alias`
_ALIASES = aten_operators("detach alias")


@dataclass(frozen=True)
class TensorSpec:
    """Graph input; strings in `shape` name run-time sizes."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    differentiable: bool = False


def hint_of(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def size_at(size: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
    """Return the value of a size for given values of its symbols, which default to 7."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression.subs({symbol: sizes.get(str(symbol), 7) for symbol in expression.free_symbols}))


def assumptions(values: Iterable[object]) -> list[str]:
    """Return a trace's assumptions: equalities of symbols, and decisions on sizes."""
    fakes = (v.fake_mode for v in values if isinstance(v, FakeTensor))
    env = next((mode.shape_env for mode in fakes if mode.shape_env is not None), None)
    if env is None:
        return []
    decided = [guard.expr for guard in env.guards if not _same_for_all(guard.expr)]
    return [f"{symbol} = {value}" for symbol, value in env.replacements.items()] + [str(guard) for guard in decided]


def _same_for_all(decision: Any) -> bool:
    """Return whether a decision holds for a large sample of sizes from 3."""
    # named: numbers in the decision, such as 64 in s0 < 64, near which its truth may change
    named = {abs(int(n)) for n in decision.atoms(sympy.Integer)}
    near = {a // b + d for a in named for b in {1, *named} - {0} for d in (-1, 0, 1)}
    tried = {*range(3, 65), *(2**k + d for k in range(2, 24) for d in (-1, 0, 1)), *near}
    # Different symbols get different values, to reject equalities between symbols.
    symbols = sorted(decision.free_symbols, key=str)
    return all(decision.subs({s: n + 7 * i for i, s in enumerate(symbols)}) == True for n in tried if n > 2)  # noqa: E712


def symbol_name(size: int | torch.SymInt) -> str | None:
    return str(size.node.expr) if isinstance(size, torch.SymInt) and not size.node.is_constant() else None


def symbols_in(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> set[str]:
    return set() if size.node.is_constant() else {str(symbol) for symbol in size.node.expr.free_symbols}


def is_counted(size: int | torch.SymInt) -> bool:
    """Return whether a size depends on a tensor's values, as in x[mask]."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size))


def is_one_less(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    sizes = [each.node.expr if isinstance(each, torch.SymInt) else each for each in (size, other)]
    return bool(sympy.simplify(sizes[1] - sizes[0]) == 1)


def multiple_of(size: int | torch.SymInt, symbol: str) -> int | None:
    if symbol_name(size) is None:
        return None
    expression = size.node.expr
    if [str(free) for free in expression.free_symbols] != [symbol]:
        return None
    times = sympy.simplify(expression / next(iter(expression.free_symbols)))
    return int(times) if times.is_Integer else None


def fake_mode_of(values: Sequence[object]) -> FakeTensorMode:
    mode = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    assert mode is not None
    return mode


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Compute with fake tensors without recording operators or value-dependent sizes."""
    mode = detect_fake_mode()
    env = mode.shape_env if mode is not None else None
    with disable_proxy_modes_tracing(), env.ignore_fresh_unbacked_symbols() if env else contextlib.nullcontext():
        yield


def constant_of(value: torch.Tensor) -> float | None:
    """Return a traced constant's fill value, even after casts; None for other tensors."""
    mode = get_proxy_mode()
    proxy: Any = None if mode is None else get_proxy_slot(value, mode.tracer, None)
    # Follow casts back to the operator that filled the tensor.
    node = getattr(getattr(proxy, "proxy", None), "node", None)
    while node is not None and node.target in _CASTS:
        node = node.args[0]
    if node is None:
        return None
    fills = {torch.ops.aten.ones.default: 1, torch.ops.aten.zeros.default: 0}
    filled = node.args[1] if node.target is torch.ops.aten.full.default else fills.get(node.target)
    return filled if isinstance(filled, int | float) else None


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """Trace without caching, garbage collection and stack traces, which take a third of the time."""
    # Imports the compiler
    from torch._dynamo import config

    collects = gc.isenabled()
    # Missing in PyTorch 2.11
    traces = getattr(fx_config, "do_not_emit_stack_traces", False)
    gc.disable()
    fx_config.do_not_emit_stack_traces = True
    try:
        with config.patch(fake_tensor_cache_enabled=False), _any_convolution():
            yield
    finally:
        fx_config.do_not_emit_stack_traces = traces
        if collects:
            gc.enable()


@contextlib.contextmanager
def _any_convolution() -> Iterator[None]:
    """Trace convolutions without guards from PyTorch's kernel choice; all kernels return one layout."""
    choose: Any = torch._C._select_conv_backend

    def chosen(*arguments: Any, **options: Any) -> Any:
        # The choice asks about sizes; each answer would become a guard.
        rows = arguments[0] if arguments else options["input"]
        environments = [size.node.shape_env for size in rows.shape if isinstance(size, torch.SymInt)]
        with environments[0].suppress_guards() if environments else contextlib.nullcontext():
            return choose(*arguments, **options)

    with mock.patch.object(torch._C, "_select_conv_backend", chosen):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs and graphs that torch.export writes to stderr before it raises an exception."""
    # Imports much of the compiler
    from torch.export import _trace

    with (
        mock.patch.object(_trace, "print", create=True),
        mock.patch.object(_trace.log, "disabled", True),
        mock.patch.object(symbolic_shapes.log, "disabled", True),
    ):
        yield


@contextlib.contextmanager
def decided() -> Iterator[None]:
    """Evaluate conditions on sizes during tracing, which torch.export would postpone.

    A postponed condition leaves min(64, 64 * T) in a view's strides, or makes attention reject `is_causal=T > 1`.
    """
    attention = F.scaled_dot_product_attention

    def attend(*tensors: Any, **options: Any) -> torch.Tensor:
        causal = {"is_causal": bool(options["is_causal"])} if "is_causal" in options else {}
        return attention(*tensors, **options | causal)

    with (
        mock.patch.object(torch._prims, "min", builtins.min, create=True),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        _Lists(),
    ):
        yield


class _Lists(TorchFunctionMode):
    """Convert x[..., [-2], :] to a slice, because meta index tensors have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(map(_one_place, args[1]))
        return func(*args, **(kwargs or {}))


def _one_place(index: Any) -> Any:
    alone = isinstance(index, list) and len(index) == 1 and type(index[0]) is int
    # [-2] -> slice(-2, -1), but [-1] -> slice(-1, None): slice(-1, 0) is empty
    return slice(index[0], index[0] + 1 or None) if alone else index


@contextlib.contextmanager
def code_when_called() -> Iterator[None]:
    """Make PyTorch's passes generate a graph's code only when the graph is first called."""
    with _use_lazy_graph_module(True):
        yield


def new_symbol(mode: FakeTensorMode, number: int, hint: int) -> torch.SymInt:
    """Return a new symbolic size without assumptions, identified by `number`."""
    # Imports the compiler
    from torch._dynamo.source import ConstantSource

    def summary(is_debug: bool = False, framework_loc: Any = None) -> Any:
        return SLoc(framework_loc, None), ""

    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    source = ConstantSource(f"size_{number}")
    # Stack traces would import Inductor.
    with mock.patch.object(mode.shape_env, "_get_stack_summary", summary):
        seed = mode.from_tensor(torch.empty(hint, device="meta"), symbolic_context=dynamic, source=source)
    size = seed.shape[0]
    assert isinstance(size, torch.SymInt)
    return size


@contextlib.contextmanager
def meta_as_cpu() -> Iterator[None]:
    """Make the meta device behave like the CPU.

    Transformers' rotary embeddings ask whether it autocasts; its nll_loss returns wrong shapes (in PyTorch 2.13).
    """
    asked = torch.is_autocast_enabled
    loss = torch.ops.aten.nll_loss.default
    # PyTorch caches kernels by dispatch key: clear this after every change.
    kernel = loss.py_kernels.pop(torch._C.DispatchKey.Meta, None)
    loss._dispatch_cache.clear()

    def enabled(device_type: str | None = None) -> bool:
        return asked() if device_type is None else asked("cpu" if device_type == "meta" else device_type)

    try:
        with mock.patch.object(torch, "is_autocast_enabled", enabled):
            yield
    finally:
        if kernel is not None:
            loss.py_kernels[torch._C.DispatchKey.Meta] = kernel
            loss._dispatch_cache.clear()


def _fake_inputs(mode: FakeTensorMode, specs: Sequence[TensorSpec], hints: dict[str, int]) -> list[torch.Tensor]:
    """Create a fake CPU tensor per spec. Equal names share a symbol; if "T" and "T/2" occur, "T" is 2 * "T/2"."""
    symbols = {name: new_symbol(mode, i, hint) for i, (name, hint) in enumerate(hints.items())}
    for name in symbols:
        whole, _, parts = name.partition("/")
        if parts and whole in symbols:
            symbols[whole] = symbols[name] * int(parts)

    def empty(spec: TensorSpec) -> torch.Tensor:
        sizes = [symbols[size] if isinstance(size, str) else size for size in spec.shape]
        return torch.empty(sizes, dtype=spec.dtype, requires_grad=spec.differentiable)

    with mode:
        return [empty(spec) for spec in specs]


def trace_joint(
    graph: fx.GraphModule, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], hints: dict[str, int]
) -> tuple[fx.GraphModule, list]:
    """Trace a graph's forward and backward into one joint graph.

    Its inputs are `primals_*` and `tangents_*`; its outputs are the graph's outputs, then the gradients. Gradients of
    unused or non-differentiable inputs are None.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    # Each output's gradient has its shape, so tangents are made from the outputs' specs.
    fakes = _fake_inputs(mode, [*inputs, *outputs], hints)
    primals = fakes[: len(inputs)]
    tangents = fakes[len(inputs) :]
    learning = [i for i, spec in enumerate(inputs) if spec.differentiable]

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> list:
        results = list(fx.Interpreter(graph).run(*primals))
        # Only differentiable outputs start the backward; a graph may have none.
        ends = [i for i, result in enumerate(results) if result.requires_grad]
        if not ends:
            return [*results, *[None] * len(primals)]
        leaving, arriving = [results[i] for i in ends], [tangents[i] for i in ends]
        computed = torch.autograd.grad(leaving, [primals[i] for i in learning], arriving, allow_unused=True)
        gradients = dict(zip(learning, computed, strict=True))
        return [*results, *map(gradients.get, range(len(primals)))]

    # Python's dispatcher keeps composite operators' sizes symbolic.
    with mode, enable_python_dispatcher():
        traced = make_fx(joint)(primals, tangents)
        # The partitioner needs a graph without in-place operators.
        if any(writes(n) for n in traced.graph.nodes):
            traced = _functional(traced, primals, tangents)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(placeholders):
        kind, index = ("primals", i) if i < len(primals) else ("tangents", i - len(primals))
        node.name = node.target = f"{kind}_{index + 1}"
    for node in list(traced.graph.nodes):
        if node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
    traced.graph.set_codegen(fx.graph.CodeGen())
    traced.recompile()
    return traced, [n.meta["val"] for n in placeholders]


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _functional(graph: fx.GraphModule, *arguments: list[torch.Tensor]) -> fx.GraphModule:
    with torch.no_grad():
        functional: fx.GraphModule = make_fx(torch.func.functionalize(graph))(*arguments)
    functional.graph.eliminate_dead_code()
    return functional


def partition(
    joint: fx.GraphModule, inputs: list, outputs: int, partitioner: str = "min_cut"
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward; forward outputs from `outputs` on are saved values."""
    _drop_repeats(joint.graph)
    results = joint.graph.output_node().args[0]
    # For the default partitioner
    for node in ancestors_of(results[:outputs]):
        node.meta["partitioner_tag"] = "is_forward"
    # Imports much of Inductor.
    from functorch.compile import default_partition, min_cut_rematerialization_partition

    cut = {"min_cut": min_cut_rematerialization_partition, "default": default_partition}[partitioner]
    # `_drop_repeats` replaces Inductor's CSE, which imports its pattern matcher.
    with torch._functorch.config.patch(cse=False):
        return cut(joint, inputs, num_fwd_outputs=outputs)


def _drop_repeats(graph: fx.Graph) -> None:
    results = graph.output_node().all_input_nodes
    # A result's memory belongs to the caller, so two results, or a result and an intermediate
    # value, must not become one tensor.
    returned = {number for node in results for number in _memory(node)}
    first_by_key: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or draws(node) or not returned.isdisjoint(_memory(node)):
            continue
        key = node.target, _operands_key(node.args), _operands_key(node.kwargs)
        first = first_by_key.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _memory(node: fx.Node) -> list[int]:
    # in decoded graphs
    if "storages" in node.meta:
        return list(node.meta["storages"])
    value = node.meta.get("val")
    return [value.untyped_storage()._cdata] if isinstance(value, torch.Tensor) else []


def draws(node: fx.Node) -> bool:
    """Return whether an operator's result differs between calls."""
    return has_tag(node.target, torch.Tag.nondeterministic_seeded) or "empty" in str(node.target)


def _operands_key(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value
    if isinstance(value, tuple | list):
        return type(value), *map(_operands_key, value)
    if isinstance(value, dict):
        return tuple((name, _operands_key(part)) for name, part in sorted(value.items()))
    return type(value), repr(value)


def recompute(
    joint: fx.GraphModule, outputs: int, saved: Collection[str] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph like `partition`, but save only the graph's inputs and the values in `saved`."""
    results = list(joint.graph.output_node().args[0])
    # The backward recomputes what it needs from the inputs and `saved`. After its outputs, the
    # forward returns the values that the backward takes.
    backward = _part(joint, results[outputs:], "", saved)
    needed = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
    values = [n for n in joint.graph.nodes if n.name in needed and not n.name.startswith("tangents")]
    return _part(joint, results[:outputs] + values, "primals"), backward


def _part(
    joint: fx.GraphModule, results: Sequence[fx.Node | None], keep: str, given: Collection[str] = ()
) -> fx.GraphModule:
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    inputs = {node: node.name for node in nodes if node.op == "placeholder" or node.name in given}
    part = subgraph(joint, inputs, nodes, results)
    part.graph.eliminate_dead_code()
    for node in part.graph.find_nodes(op="placeholder"):
        if not node.users and not (keep and node.name.startswith(keep)):
            part.graph.erase_node(node)
    return part


def subgraph(
    module: fx.GraphModule, inputs: Mapping[fx.Node, str], nodes: Iterable[fx.Node], results: Sequence[fx.Node | None]
) -> fx.GraphModule:
    """Return a graph of `nodes`, in this order, that returns `results`.

    Args:
        inputs: nodes that become placeholders, with the placeholders' names.
    """
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node, name in inputs.items():
        copied[node] = graph.placeholder(name)
        copied[node].meta = dict(node.meta)
    for node in nodes:
        if node not in copied:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(None if node is None else copied[node] for node in results))
    return graph_module(module, graph)


def ancestors_of(
    results: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda node: node.op != "placeholder"
) -> set[fx.Node]:
    """Return the results and the nodes on which they depend, as far as `through` accepts them."""
    pending = list(results)
    ancestors: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in ancestors and through(node):
            ancestors.add(node)
            pending += node.all_input_nodes
    return ancestors

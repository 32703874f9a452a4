"""The one module that touches what PyTorch does not promise to keep: fake tensors, symbolic shapes, partitioners.

Works with torch 2.11 to 2.13. Everything else in hydragraph goes through these functions.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch._dynamo.config
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

PARTITIONERS = {"min_cut": min_cut_rematerialization_partition, "default": default_partition}


@dataclass(frozen=True)
class TensorSpec:
    """What a graph input looks like: sizes (a string names a run-time size), dtype, and whether it gets a gradient."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    differentiable: bool = False


def symbol_name(size: int | torch.SymInt) -> str | None:
    """Return the text of a symbolic size's expression, or None for a plain number."""
    return str(size.node.expr) if isinstance(size, torch.SymInt) and not size.node.is_constant() else None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Compute with a trace's fake tensors without recording what is computed, or sizes that depend on values."""
    mode = detect_fake_mode()
    env = mode.shape_env if mode is not None else None
    with disable_proxy_modes_tracing(), env.ignore_fresh_unbacked_symbols() if env else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def one_pass() -> Iterator[None]:
    """Trace, where every operator's sizes are seen once, without what pays only for sizes that repeat.

    That is the cache of fake results, which symbolic sizes miss, and looking for garbage among the millions of objects
    of an imported torch: together a third of a capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            yield
    finally:
        if collects:
            gc.enable()


def _fake_inputs(mode: FakeTensorMode, specs: Sequence[TensorSpec], hints: dict[str, int]) -> list[torch.Tensor]:
    """Make one fake CPU tensor per spec; equal names get the same symbol."""
    symbols: dict[str, torch.SymInt] = {}
    for name, hint in hints.items():
        dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        seed = mode.from_tensor(
            torch.empty(hint, device="meta"), symbolic_context=dynamic, source=ConstantSource(f"size_{len(symbols)}")
        )
        symbols[name] = seed.shape[0]
    with mode:
        return [
            torch.empty(
                [symbols[s] if isinstance(s, str) else s for s in spec.shape],
                dtype=spec.dtype,
                requires_grad=spec.differentiable,
            )
            for spec in specs
        ]


def trace_joint(
    graph: fx.GraphModule, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], hints: dict[str, int]
) -> tuple[fx.GraphModule, list]:
    """Trace forward and backward of a graph into one: inputs `primals_*`, `tangents_*`; outputs, then gradients.

    The gradient of an input that is not differentiable, or that nothing depends on, is None.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    primals, tangents = _split(_fake_inputs(mode, [*inputs, *outputs], hints), len(inputs))
    wanted = [i for i, spec in enumerate(inputs) if spec.differentiable]

    def joint(primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> list:
        results = list(fx.Interpreter(graph).run(*primals))
        found = torch.autograd.grad(results, [primals[i] for i in wanted], tangents, allow_unused=True)
        gradients: list[torch.Tensor | None] = [None] * len(primals)
        for i, gradient in zip(wanted, found, strict=True):
            gradients[i] = gradient
        return [*results, *gradients]

    with mode:
        traced = make_fx(joint)(primals, tangents)
    placeholders = [n for n in traced.graph.nodes if n.op == "placeholder"]
    for i, node in enumerate(placeholders):
        kind, index = ("primals", i) if i < len(primals) else ("tangents", i - len(primals))
        node.name = node.target = f"{kind}_{index + 1}"
    traced.graph.set_codegen(fx.graph.CodeGen())
    traced.recompile()
    return traced, [n.meta["val"] for n in placeholders]


def _split(values: list, at: int) -> tuple[list, list]:
    return values[:at], values[at:]


def partition(
    joint: fx.GraphModule, inputs: list, outputs: int, partitioner: str = "min_cut"
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into forward and backward; forward outputs beyond the first `outputs` are saved values."""
    for node in _ancestors(joint, outputs):  # what the default partitioner goes by
        node.meta["partitioner_tag"] = "is_forward"
    chosen: Callable = PARTITIONERS[partitioner]
    return chosen(joint, inputs, num_fwd_outputs=outputs)


def recompute(joint: fx.GraphModule, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph so that nothing but inputs is saved: the backward is all that its gradients need.

    Both graphs look as those of `partition`; the saved values are those `primals_*` that the backward takes.
    """
    results = list(next(n for n in joint.graph.nodes if n.op == "output").args[0])
    backward = _part(joint, lambda copied: [copied.get(g) for g in results[outputs:]], "")
    needed = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
    primals = [n for n in joint.graph.nodes if n.op == "placeholder" and n.name.startswith("primals")]
    kept = results[:outputs] + [n for n in primals if n.name in needed]
    return _part(joint, lambda copied: [copied[n] for n in kept], "primals"), backward


def _part(joint: fx.GraphModule, outputs: Callable, keep: str) -> fx.GraphModule:
    """Copy what some outputs of a graph need, and every placeholder whose name begins with `keep` (if not empty)."""
    graph, copied = fx.Graph(), {}
    for node in joint.graph.nodes:
        if node.op != "output":
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.output(tuple(outputs(copied)))
    graph.eliminate_dead_code()
    for node in [n for n in graph.nodes if n.op == "placeholder" and not n.users]:
        if not (keep and node.name.startswith(keep)):
            graph.erase_node(node)
    return fx.GraphModule(joint, graph)


def _ancestors(joint: fx.GraphModule, outputs: int) -> set[fx.Node]:
    """Return every node that one of the first outputs needs."""
    pending = list(next(n for n in joint.graph.nodes if n.op == "output").args[0][:outputs])
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            pending += node.all_input_nodes
    return found

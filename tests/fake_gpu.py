"""A GPU that is not there: fake CUDA tensors go through graphs, that refuse operands on two devices as real ones do."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydragraph.ir.graph_data import value_of
from hydragraph.passes import compile_with_inductor
from hydragraph.passes.compile_with_inductor import GraphPiece
from hydragraph.passes.differentiate import COLLECTIVES, Variant, saved_names
from hydragraph.passes.graph_passes import VariantSpec, shard_strides
from hydragraph.private.inductor import fake_like, mode_of

GPU = torch.device("cuda:0")


class FakeCollectives:
    """Collectives of one rank of a stage; values have the right shapes and devices, and no content."""

    def __init__(self, size: int) -> None:
        self.size, self.index = size, 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.clone()

    all_reduce_max = all_reduce

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.size, dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        return x.narrow(dim, 0, x.shape[dim] // self.size).clone(memory_format=torch.contiguous_format)

    reduce_scatter = split

    def head_loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, start: Tensor, ignored: int, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert {hidden.device, weight.device, labels.device} == {GPU}
        loss = hidden.new_empty((), dtype=torch.float32)
        return loss, torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)


def misplaced(module: fx.GraphModule) -> list[str]:
    """Return the nodes of a graph, and of the pieces it calls, that name another device than the GPU."""
    found = []
    for node in module.graph.nodes:
        devices = {leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, torch.device)}
        if node.op == "get_attr":
            devices.add(operator.attrgetter(str(node.target))(module).device)
        if node.op == "call_module":
            piece = getattr(module, str(node.target))
            assert isinstance(piece, GraphPiece)
            found += misplaced(piece.graph)
        if devices - {GPU}:
            found.append(node.format_node() or node.name)
    return found


def interpret(variant: Variant, spec: VariantSpec) -> None:
    """Run a variant's graphs on fake tensors of the GPU; assert that all results are there."""
    fakes = _inputs(variant, spec)
    mode = mode_of(fakes.values())
    collectives = FakeCollectives(spec.part.tp)
    with mode, torch.no_grad():
        results = variant.forward(*(fakes.get(name, collectives) for name in variant.inputs))
        _on_gpu(results[: variant.outputs])
        values: dict[str, Any] = fakes | {COLLECTIVES: collectives, "tangent": torch.empty_like(results[0])}
        values |= dict(zip(saved_names(len(results) - variant.outputs), results[variant.outputs :], strict=True))
        totals: list[Any] = []
        for name in variant.added:
            totals += [torch.empty_like(fakes[name], dtype=torch.float32), 1.0]
        if variant.gradients or variant.added:
            _on_gpu(variant.backward(*(values[name] for name in variant.needs), *totals))


def compile_for_gpu(variant: Variant, spec: VariantSpec) -> tuple[Variant, int]:
    """Run the pass that compiles; Inductor's code generation, which asks a driver, only looks at what it is given.

    Returns:
        the compiled variant, and how many graphs Inductor was given.
    """
    given = 0

    def generate(graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        nonlocal given
        given += 1
        for node in graph.graph.nodes:
            for value in tree_leaves(value_of(node)):
                if isinstance(value, Tensor) and not (node.op == "placeholder" and _number(value)):
                    assert value.device == GPU, f"{node.format_node()}: {value.device}"
        return lambda arguments: None

    strides = {name: shard_strides(parameter, spec.part) for name, parameter in spec.parameters.items()}
    with mock.patch("torch._inductor.compile_fx.compile_fx_inner", generate), mock.patch.object(Tensor, "copy_", _copy):
        return compile_with_inductor.compile_variant(variant, strides, GPU, where=spec.where), given


def _copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy below autograd, whose own kernel asks for a device guard that a build for CPUs lacks."""
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.copy_.default(into, source, non_blocking)


def _inputs(variant: Variant, spec: VariantSpec) -> dict[str, Any]:
    placeholders = [n for n in variant.forward.graph.nodes if n.op == "placeholder"]
    named = {name: value_of(node) for node, name in zip(placeholders, variant.inputs, strict=True)}
    return {n: _placed(v) for n, v in named.items() if n != COLLECTIVES}


def _placed(value: Any) -> Any:
    return fake_like(value, torch.device("cpu") if _number(value) else GPU) if isinstance(value, Tensor) else value


def _number(value: Tensor) -> bool:
    return value.dim() == 0 and not value.is_floating_point()


def _on_gpu(results: Any) -> None:
    for result in tree_leaves(results):
        assert not isinstance(result, Tensor) or result.device == GPU, result


class _Scalars(TorchDispatchMode):
    """Reads every number of the GPU as 1: fake tensors have none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == GPU:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def without_a_driver() -> Iterator[None]:
    """Let the host read fake numbers as 1, and do in Python what a build for CPUs cannot do with a fake CUDA tensor."""
    shims = {
        "tolist": _tolist,
        "copy_": _copy,
        "__getitem__": _item,
        "__setitem__": _set,
        "__bool__": lambda self: True,
    }
    with ExitStack() as patched:
        for name, shim in shims.items():
            patched.enter_context(mock.patch.object(Tensor, name, shim))
        patched.enter_context(_Scalars())
        yield


def _tolist(tensor: Tensor) -> Any:
    if tensor.device != GPU:
        return _TOLIST(tensor)
    return 1.0 if not tensor.dim() else [_tolist(part) for part in tensor.unbind()]


def _item(tensor: Tensor, index: Any) -> Tensor:
    if tensor.device != GPU:
        return _ITEM(tensor, index)
    dim = 0
    for each in index if isinstance(index, tuple) else (index,):
        if each is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(each, int):
            tensor, dim = tensor.select(dim, each), dim - 1
        elif each is not Ellipsis:
            assert isinstance(each, slice), f"the shim does not know {each!r}"
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, each.start, each.stop, each.step or 1)
        dim += 1
    return tensor


def _set(tensor: Tensor, index: Any, value: Any) -> None:
    if tensor.device != GPU:
        _SET(tensor, index, value)
    elif isinstance(value, Tensor):
        _copy(_item(tensor, index), value)
    else:
        _item(tensor, index).fill_(value)


_TOLIST, _ITEM, _SET = Tensor.tolist, Tensor.__getitem__, Tensor.__setitem__

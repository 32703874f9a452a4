"""A GPU that is not there: fake CUDA tensors, which like real ones refuse operands on two devices."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hydragraph.cluster.collectives import StartsAtOnce
from hydragraph.ir.graph_data import value_of
from hydragraph.kernels import triton_jit
from hydragraph.kernels.slice_copy import SliceTable
from hydragraph.kernels.triton_jit import Kernel
from hydragraph.passes import compile_with_inductor
from hydragraph.passes.compile_with_inductor import GraphPiece
from hydragraph.passes.differentiate import COLLECTIVES, Variant, saved_names
from hydragraph.passes.graph_passes import shard_strides
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.private.absent_gpu import guard
from hydragraph.private.inductor import fake_like, mode_of
from hydragraph.runtime.exchange import Exchange

GPU = torch.device("cuda:0")


class FakeCollectives(StartsAtOnce):
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
        self, hidden: Tensor, weight: Tensor, labels: Tensor, start: Tensor, *_: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert {hidden.device, weight.device, labels.device} == {GPU}
        loss = hidden.new_empty((), dtype=torch.float32)
        return loss, torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)

    def head_token_losses(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, start: Tensor, ignored: int, rows: int
    ) -> tuple[Tensor, Tensor]:
        assert {hidden.device, weight.device, labels.device} == {GPU}
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        return losses, torch.empty_like(losses)


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
    """Run a variant's graphs on fake tensors of the GPU; assert that all results exist."""
    guard()
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
    guard()
    with mock.patch("torch._inductor.compile_fx.compile_fx_inner", generate):
        return compile_with_inductor.compile_variant(variant, strides, GPU, where=spec.where), given


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


class _Numbers(TorchDispatchMode):
    """Lets the host read 1 (or True) from fake tensors, which have no content, and the true numbers from others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        if not isinstance(args[0], FakeTensor):
            with torch.utils._python_dispatch._disable_current_modes():
                return func(*args)
        return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1


class _OnGpu(TorchDispatchMode):
    """Asserts that operators make tensors on the GPU, except for single numbers, and copies to the host.

    Attributes:
        operators: how many were seen.
        to_host: elements of each tensor that was copied to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.to_host: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operators += 1
        for tensor in tree_leaves(out):
            if not isinstance(tensor, Tensor) or tensor.device == GPU or not tensor.dim():
                continue
            arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            assert arguments, f"{func} makes {tensor}"
            if any(argument.device == GPU for argument in arguments):
                assert func is torch.ops.aten._to_copy.default, f"{func} makes {tensor}"
                self.to_host.append(tensor.numel())
        return out


# Arguments that each kernel of ours writes.
_WRITTEN = {
    "_slice_copy": ("target",),
    "_adamw": ("weights", "moments", "squares", "copies"),
    "_reduce": ("statistics",),
    "_differentiate": ("logits",),
}


def _launcher(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return what stands in for the launch of a kernel: operators that read and write the same tensors."""

    def launch(*args: Any, **constants: Any) -> None:
        names = list(inspect.signature(kernel.function).parameters)
        tensors = {name: value for name, value in zip(names, args, strict=False) if isinstance(value, Tensor)}
        assert {value.device for value in tensors.values()} == {GPU}, f"{kernel.function.__name__}: {tensors}"
        for name, value in tensors.items():
            written = name in _WRITTEN[kernel.function.__name__] and (name != "copies" or constants["COPY"])
            value.zero_() if written else value.sum()

    return launch


def _table(name: str) -> property:
    """Return what stands in for a table of an exchange: made outside of the modes, as its ranges are read."""
    make = vars(Exchange)[name].func

    def table(exchange: Exchange) -> SliceTable:
        assert exchange.device == GPU
        with torch.utils._python_dispatch._disable_current_modes():
            made: SliceTable = make(replace(exchange, device=torch.device("cpu")))
        tiles, origins = (torch.empty(x.shape, dtype=x.dtype, device=GPU) for x in (made.tiles, made.origins))
        return replace(made, tiles=tiles, origins=origins)

    return property(table)  # pyrefly: ignore[bad-return]


@contextmanager
def fake_gpu() -> Iterator[_OnGpu]:
    """Run what is inside on fake tensors: new ones are on the GPU, or a copy to the host, or an error.

    Yields:
        what was seen.
    """
    guard()
    addresses = {
        (Tensor, "data_ptr"): lambda x: (x.untyped_storage()._cdata << 32) + x.storage_offset() * x.element_size(),
        (torch.UntypedStorage, "data_ptr"): lambda storage: storage._cdata << 32,
    }
    with ExitStack() as entered:
        for (owner, name), address in addresses.items():  # those of fake tensors are all 0
            entered.enter_context(mock.patch.object(owner, name, address))
        entered.enter_context(mock.patch.object(Kernel, "__getitem__", _launcher))
        for table in ("gather", "scatter"):
            entered.enter_context(mock.patch.object(Exchange, table, _table(table)))
        entered.enter_context(mock.patch.object(triton_jit, "why_not", return_value=None))
        entered.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        seen = entered.enter_context(_OnGpu())
        entered.enter_context(_Numbers())
        yield seen

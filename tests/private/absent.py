"""Compilations for a GPU that is not there, which run in a process whose Triton does not interpret."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hydragraph.kernels.cubin import ThreadResources, usage
from hydragraph.kernels.gpu_arch import ARCHS
from hydragraph.passes.compile_with_inductor import GraphPiece
from hydragraph.private.absent_gpu import BuiltKernel, absent_gpu, launches
from hydragraph.private.tracing import TensorSpec, _fake_inputs

aten = torch.ops.aten
WIDTH = 256

T = TypeVar("T")


@dataclass(frozen=True)
class Compiled:
    """One graph after its compilation: its launches and kernels, what they use, and whether CUDA is there again."""

    launched: list[str]
    kernels: list[BuiltKernel]
    used: list[ThreadResources]
    available: bool


def apart(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a process of its own, in which Triton compiles."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"), _compiling) as process:
        return process.submit(function, *arguments).result()


def _compiling() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def compile_sum(arch: str) -> Compiled:
    """Compile relu(x @ y) + 1 and its product with y, over T rows in bf16."""
    kernels: dict[str, BuiltKernel] = {}
    with absent_gpu(ARCHS[arch], kernels):
        piece = GraphPiece(*_graph())
        names = [launch.name for launch in launches(piece.codes[0][0])]
    used = [usage(kernel.cubin) for kernel in kernels.values()]
    return Compiled(names, list(kernels.values()), used, _available())


def save_sum(arch: str) -> bytes:
    """Compile the graph of `compile_sum`; return the content of Inductor's cache."""
    with absent_gpu(ARCHS[arch], {}):
        GraphPiece(*_graph())
    artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    return artifacts[0]


def find_sum(arch: str, gpu: str, content: bytes) -> tuple[int, int]:
    """Look for the graph of `compile_sum` in a cache, on another GPU; return how often it was found and not found."""
    with absent_gpu(replace(ARCHS[arch], gpu=gpu), {}):
        torch.compiler.load_cache_artifacts(content)
        GraphPiece(*_graph())
    return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


def _available() -> bool:
    return torch.cuda.is_available()


def _graph() -> tuple[fx.GraphModule, list[object], list[object]]:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    product = graph.call_function(aten.mm.default, (x, y))
    raised = graph.call_function(aten.add.Tensor, (graph.call_function(aten.relu.default, (product,)), 1.0))
    graph.output((graph.call_function(aten.mm.default, (raised, y)),))
    module = fx.GraphModule({}, graph)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    made = _fake_inputs(mode, [TensorSpec(s, torch.bfloat16) for s in (("T", WIDTH), (WIDTH, WIDTH))], {"T": 64})
    with mode:
        inputs = [torch.empty(value.shape, dtype=value.dtype, device="cuda:0") for value in made]
        return module, list(inputs), list(module(*inputs))

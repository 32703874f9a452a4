"""Kernels compiled for a GPU architecture: `kernels.json` in a compiled folder."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.graph_footprint import TracedSizes, head_operands
from hydragraph.data.json_object import read_object
from hydragraph.ir.graph_data import value_of
from hydragraph.kernels.cubin import usage
from hydragraph.passes.collective_operators import RESULT
from hydragraph.passes.compile_with_inductor import NO_WORK, TUNED, GraphPiece
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.graph_passes import modules_of
from hydragraph.private.absent_gpu import BuiltKernel, launches
from hydragraph.private.operator_schemas import makes_tensors
from hydragraph.spec.record import from_record
from hydragraph.spec.stage_kind import StagePart

KERNELS = "kernels.json"
# Contains the cubins
FOLDER = "kernels"

aten = torch.ops.aten
_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
_LOOKUPS = frozenset({aten.embedding.default, aten.embedding_dense_backward.default})


@dataclass(frozen=True)
class KernelRecord:
    """Kernel of a graph.

    Attributes:
        launches: launches per run of the graph.
        configurations: number of configurations to autotune; other fields describe the first.
        spilled_bytes: bytes of stack per thread (see `kernels.cubin`).
        shared_bytes: shared memory per thread block.
        bytes: device memory read and written per launch.
    """

    name: str
    cubin: str
    launches: int
    configurations: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    bytes: int


@dataclass(frozen=True)
class GraphRecord:
    """Work of one graph for a micro-batch of `TUNED` tokens in one sequence.

    Attributes:
        name: variant and direction, such as layer.0.tp1.forward.
        library_launches: launches of operators not compiled by Inductor.
        flops: FLOPs of matrix products, attention and the fused head.
        library_bytes: bytes read and written by embedding lookups and the operators counted in `flops`.
    """

    name: str
    kernels: tuple[KernelRecord, ...]
    library_launches: int
    flops: float
    library_bytes: int

    @property
    def launches(self) -> int:
        return self.library_launches + sum(kernel.launches for kernel in self.kernels)

    @property
    def bytes(self) -> int:
        return self.library_bytes + sum(kernel.launches * kernel.bytes for kernel in self.kernels)

    def least_seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        return max(self.flops / flops_per_s, self.bytes / bytes_per_s)


@dataclass(frozen=True)
class KernelsFile:
    arch: str
    tokens: int
    graphs: tuple[GraphRecord, ...]

    @classmethod
    def load(cls, folder: Path) -> KernelsFile:
        if not (folder / KERNELS).is_file():
            raise ValueError(
                f"{folder} contains no {KERNELS}: write it with "
                f"hydragraph compile CONFIG --device cuda --arch sm_90 --output {folder}"
            )
        kernels: KernelsFile = load_written(cls, folder / KERNELS)
        return kernels

    def save(self, folder: Path, built: Iterable[BuiltKernel]) -> None:
        (folder / FOLDER).mkdir()
        codes = {_digest(kernel): kernel.cubin for kernel in built}
        for record in (kernel for graph in self.graphs for kernel in graph.kernels):
            (folder / record.cubin).write_bytes(codes[Path(record.cubin).stem.rpartition(".")[2]])
        (folder / KERNELS).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load_written(cls: type[Any], path: Path) -> Any:
    remedy = "write the folder again with hydragraph compile"
    data = read_object(path, remedy)
    try:
        return from_record(cls, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}: {remedy}") from None


def graph_records(
    name: str, part: StagePart, traced: Variant, compiled: Variant, built: Mapping[str, BuiltKernel]
) -> tuple[GraphRecord, ...]:
    """Return the records of a variant's graphs; `built` maps kernel sources to kernels."""
    sizes = TracedSizes.of(traced, part, MicroBatch(TUNED, 1))
    records = []
    before = modules_of(traced)
    for direction, module in modules_of(compiled).items():
        library, kernels = _launched(module, built)
        nodes = [node for node in before[direction].graph.nodes if _is_library(node)]
        flops = sum(_flops(node, sizes) for node in nodes)
        moved = sum(_moved(node, sizes) for node in nodes)
        records.append(GraphRecord(f"{name}.{direction}", tuple(kernels), library, flops, moved))
    return tuple(records)


def _digest(kernel: BuiltKernel) -> str:
    return hashlib.sha256(kernel.cubin).hexdigest()[:8]


def _launched(module: fx.GraphModule, built: Mapping[str, BuiltKernel]) -> tuple[int, list[KernelRecord]]:
    # library: launches of PyTorch's libraries.
    # counts: (name, source) of a generated kernel -> launches.
    library = 0
    counts: Counter[tuple[str, str]] = Counter()
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method") and node.target != RESULT:
            library += _is_library(node) or (node.target not in NO_WORK and makes_tensors(node.target))
        piece = getattr(module, str(node.target)) if node.op == "call_module" else None
        for launch in launches(piece.codes[0][0]) if isinstance(piece, GraphPiece) and piece.codes else ():
            if launch.source:
                counts[launch.name, launch.source] += 1
            else:
                library += 1
    return library, [_record(name, built[source], count) for (name, source), count in counts.items()]


def _record(name: str, kernel: BuiltKernel, count: int) -> KernelRecord:
    used = usage(kernel.cubin)
    numbers = (used.registers, used.stack_bytes, kernel.shared_bytes, kernel.bytes)
    return KernelRecord(name, f"{FOLDER}/{name}.{_digest(kernel)}.cubin", count, kernel.configurations, *numbers)


def _is_library(node: fx.Node) -> bool:
    attends = "varlen_attention" in str(node.target)
    return attends or node.target in _PRODUCTS | _LOOKUPS or head_operands(node) is not None


def _shape(node: Any, sizes: TracedSizes) -> list[float]:
    return [sizes.number(size) for size in value_of(node).shape]


def _flops(node: fx.Node, sizes: TracedSizes) -> float:
    if node.target in _PRODUCTS:
        # [.., m, k] times [.., k, n] takes 2 m k n FLOPs; the first argument of addmm and baddbmm
        # is the bias.
        left, right = (_shape(n, sizes) for n in node.args[-2:])
        return 2 * math.prod(left) * right[-1]
    if node.target in _LOOKUPS:
        return 0.0
    name = str(node.target)
    if "varlen_attention" in name:
        # Two products of T x T x width per head, half of them masked if causal: 2 T T width. The
        # backward has five products.
        tokens, heads, width = _shape(_first(node, dims=3), sizes)[-3:]
        return 2 * tokens * tokens * heads * width * (2.5 if "backward" in name else 1)
    operands = head_operands(node)
    assert operands is not None
    # The fused head computes one product and both gradients: 3 x 2 T H V.
    hidden, weight = (_shape(n, sizes) for n in operands)
    return 6 * math.prod(hidden) * weight[0]


def _first(node: fx.Node, dims: int) -> fx.Node:
    return next(n for n in node.all_input_nodes if getattr(value_of(n), "ndim", 0) == dims)


def _moved(node: fx.Node, sizes: TracedSizes) -> int:
    # Views of a storage have one key, so each storage counts once.
    values = {key: size for n in (*node.all_input_nodes, node) for key, size in sizes.storages(n).items()}
    return sum(values.values())

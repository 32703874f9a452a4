"""Graph passes: the steps from a block's template to the graphs that a rank runs (`Variant`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Template
from hydragraph.passes.accumulate import accumulate
from hydragraph.passes.compile_with_inductor import compile_variant
from hydragraph.passes.differentiate import Variant, differentiate
from hydragraph.passes.fuse_head import fuse_head
from hydragraph.passes.overlap_collectives import overlap_collectives
from hydragraph.passes.shard import ShardedTemplate, shard
from hydragraph.passes.sums_in_pieces import sums_in_pieces
from hydragraph.passes.variant_spec import COMPILE, VariantSpec
from hydragraph.spec.stage_kind import StagePart

Graphs = Template | ShardedTemplate | Variant


@dataclass(frozen=True)
class GraphPass:
    """Step from a template to a rank's graphs.

    Attributes:
        when: description of the condition in `VariantSpec.passes`.
    """

    name: str
    when: str
    run: Callable[[VariantSpec, Any], Graphs]

    @property
    def meaning(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


@dataclass(frozen=True, eq=False)
class PassResult:
    name: str
    graphs: Graphs
    seconds: float


def _shard(spec: VariantSpec, graphs: Template) -> Graphs:
    """Shard parameters and sizes for one rank, and replace `communicate` by collectives."""
    return shard(graphs, spec.parameters, spec.part, spec.fused_head)


def _fuse_head(spec: VariantSpec, graphs: ShardedTemplate) -> Graphs:
    """Fuse the head's product and the loss into one operator that never materializes all logits."""
    return replace(graphs, graph=fuse_head(graphs.graph))


def _differentiate(spec: VariantSpec, graphs: ShardedTemplate) -> Graphs:
    """Trace forward and backward together, select the values to save, and split the trace into two graphs."""
    return differentiate(spec, graphs)


def _accumulate(spec: VariantSpec, graphs: Variant) -> Graphs:
    """Fuse the matrix product that computes a weight gradient with the addition to the gradient sum."""
    return accumulate(graphs)


def _sums_in_pieces(spec: VariantSpec, graphs: Variant) -> Graphs:
    """Split products into pieces along the tokens, and all-reduce each piece while the next one is computed."""
    return sums_in_pieces(graphs)


def _overlap_collectives(spec: VariantSpec, graphs: Variant) -> Graphs:
    """Start collectives early and wait for their results late, so that weight gradients are computed meanwhile."""
    return overlap_collectives(graphs)


def _compile(spec: VariantSpec, graphs: Variant) -> Graphs:
    """Compile the graph with Inductor, except for collectives and operators that must run PyTorch's kernels."""
    strides = {name: shard_strides(parameter, spec.part) for name, parameter in spec.parameters.items()}
    return compile_variant(graphs, strides, spec.device, where=spec.where)


GRAPH_PASSES: tuple[GraphPass, ...] = (
    GraphPass("shard", "always", _shard),
    GraphPass("fuse_head", "fused head, unsharded vocabulary", _fuse_head),
    GraphPass("differentiate", "always", _differentiate),
    GraphPass("accumulate", "eager graphs in fp32", _accumulate),
    GraphPass("sums_in_pieces", "sums in pieces", _sums_in_pieces),
    GraphPass("overlap_collectives", "tensor parallelism", _overlap_collectives),
    GraphPass(COMPILE, "backend inductor", _compile),
)


def run_passes(spec: VariantSpec, traced: Variant | None = None) -> Iterator[PassResult]:
    """Run the passes of a spec in order, and yield each result.

    Args:
        traced: variant traced for an equal spec, so that only `compile` runs.

    Raises:
        Unsupported: a pass does not support the block.
    """
    graphs: Graphs = traced or spec.template
    for graph_pass in GRAPH_PASSES:
        if graph_pass.name in spec.passes and (traced is None or graph_pass.name == COMPILE):
            began = time.perf_counter()
            graphs = graph_pass.run(spec, graphs)
            yield PassResult(graph_pass.name, graphs, time.perf_counter() - began)


def make_variant(
    spec: VariantSpec, traced: Variant | None = None, keep: Callable[[VariantSpec, Variant], None] | None = None
) -> tuple[Variant, dict[str, float]]:
    """Return the graphs that a rank runs, and each pass's seconds.

    Args:
        keep: function called with the spec and the variant if this call traces the variant.
    """
    seconds: dict[str, float] = {}
    graphs: Graphs = traced or spec.template
    # Before compilation, graphs are equal on all devices.
    last = [name for name in spec.passes if name != COMPILE][-1]
    for result in run_passes(spec, traced):
        graphs = result.graphs
        seconds[result.name] = result.seconds
        if keep is not None and result.name == last:
            assert isinstance(graphs, Variant)
            keep(spec, graphs)
    assert isinstance(graphs, Variant)
    return graphs, seconds


def modules_of(graphs: Graphs) -> dict[str, fx.GraphModule]:
    if isinstance(graphs, Variant):
        return {"forward": graphs.forward, "backward": graphs.backward}
    return {"forward": graphs.graph}


def shard_strides(parameter: Parameter, part: StagePart) -> tuple[int, ...]:
    elements = sum(hi - lo for lo, hi in parameter.intervals(part.tp, part.index))
    flat = torch.empty(elements, device="meta")
    return tuple(parameter.natural(flat, part.tp, part.index).stride())

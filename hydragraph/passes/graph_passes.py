"""Graph passes: the steps from a block's template to the graphs that one rank of a stage runs, in order.

    Template   a captured block, with the places where tensor parallelism communicates
      shard, fuse_head
    Sharded    a rank's own forward graph
      differentiate, accumulate, compile
    Variant    its forward and its backward

At capture, `clean` and `annotate` have made the templates. Each pass is a pure function: it does not modify its input
graphs. `hydragraph show CONFIG --passes` prints the result of each pass for a model's blocks. The passes that make rank
programs, in which blocks are single instructions, are listed in `hydragraph.passes.pipeline`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from hydragraph.ir.parameter import Parameter
from hydragraph.ir.program import Template
from hydragraph.passes.accumulate import accumulate
from hydragraph.passes.compile_with_inductor import compile_variant
from hydragraph.passes.differentiate import Variant, differentiate
from hydragraph.passes.fuse_head import fuse_head
from hydragraph.passes.shard import ShardedTemplate, shard
from hydragraph.spec.stage_kind import StagePart

COMPILE = "compile"  # name of the last pass, whose graphs are specific to a device

Graphs = Template | ShardedTemplate | Variant


@dataclass(frozen=True)
class VariantSpec:
    """Everything that determines the graphs of one block on one rank.

    Attributes:
        template: template of the block.
        parameters: the template's local parameter names -> the parameters of one block.
        part: rank and kind of the stage.
        dtype: compute dtype of the model.
        learning: what to compute gradients of: local parameter names, and "hidden".
        partitioner: selects the saved values, unless the stage recomputes everything: "min_cut" or "default"
            (functorch's). A stage with a memory budget uses "min_cut".
        fused_head: fuse a head and its loss into one operator.
        added: let products accumulate gradients where possible.
        backend: "eager", or "inductor", which compiles the graphs for `device`.
        device: device that the graphs run on.
        where: name of the block, for errors.
    """

    template: Template
    parameters: Mapping[str, Parameter]
    part: StagePart
    dtype: torch.dtype
    learning: frozenset[str]
    partitioner: str = "min_cut"
    fused_head: bool = False
    added: bool = False
    backend: str = "eager"
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    where: str = "template"

    @property
    def key(self) -> str:
        """64 hex digits that identify the graphs before a backend compiles them, equal in every process."""
        shards = [(p.rule, p.local_shape(self.part.tp, self.part.index)) for p in self.parameters.values()]
        made = [name for name in passes_for(self) if name != COMPILE]
        how = (tuple(self.part.kind), str(self.dtype), sorted(self.learning), self.partitioner, self.fused_head, made)
        return hashlib.sha256(repr((self.template.content, shards, how)).encode()).hexdigest()


@dataclass(frozen=True)
class GraphPass:
    """One step from a template to the graphs that a rank runs.

    Attributes:
        name: name in lists and dumps.
        when: condition for the pass, as text.
        applies: condition for the pass, as a function of the spec.
        run: computes the next graphs from those of the previous pass.
    """

    name: str
    when: str
    applies: Callable[[VariantSpec], bool]
    run: Callable[[VariantSpec, Graphs], Graphs]

    @property
    def meaning(self) -> str:
        """Return its purpose, in a sentence."""
        return " ".join((self.run.__doc__ or "").split())


@dataclass(frozen=True, eq=False)
class PassResult:
    """Graphs made by one pass, and its duration in seconds."""

    name: str
    graphs: Graphs
    seconds: float


def _shard(spec: VariantSpec, graphs: Graphs) -> Graphs:
    """Cut parameters and sizes to this rank's part, and write collectives where communication was annotated."""
    assert isinstance(graphs, Template)
    return shard(graphs, spec.parameters, spec.part, spec.fused_head)


def _fuse_head(spec: VariantSpec, graphs: Graphs) -> Graphs:
    """Make the head's product and the loss one operator, so that the logits never exist as a whole."""
    assert isinstance(graphs, ShardedTemplate)
    return replace(graphs, graph=fuse_head(graphs.graph))


def _differentiate(spec: VariantSpec, graphs: Graphs) -> Graphs:
    """Trace forward and backward together, decide what is saved between them, and cut them apart."""
    assert isinstance(graphs, ShardedTemplate)
    arguments = (spec.template, graphs, spec.parameters, spec.part, spec.dtype, spec.partitioner, spec.where)
    return differentiate(*arguments, spec.learning, spec.fused_head)


def _accumulate(spec: VariantSpec, graphs: Graphs) -> Graphs:
    """Let the product that makes a weight's gradient add it to those of earlier micro-batches."""
    assert isinstance(graphs, Variant)
    return accumulate(graphs)


def _compile(spec: VariantSpec, graphs: Graphs) -> Graphs:
    """Let Inductor compile what lies between collectives and between operators that must stay PyTorch's."""
    assert isinstance(graphs, Variant)
    strides = {name: shard_strides(parameter, spec.part) for name, parameter in spec.parameters.items()}
    return compile_variant(graphs, strides, spec.device, where=spec.where)


def _is_added(spec: VariantSpec) -> bool:
    # Gradient sums are in fp32, so a product can add to one only in that dtype; Inductor fuses its own sums.
    return spec.added and spec.backend == "eager" and spec.dtype is torch.float32


GRAPH_PASSES: tuple[GraphPass, ...] = (
    GraphPass("shard", "always", lambda spec: True, _shard),
    # If the vocabulary is sharded, `shard` has already written the fused operator.
    GraphPass(
        "fuse_head", "fused head, uncut vocabulary", lambda spec: spec.fused_head and spec.part.tp == 1, _fuse_head
    ),
    GraphPass("differentiate", "always", lambda spec: True, _differentiate),
    GraphPass("accumulate", "eager graphs in fp32", _is_added, _accumulate),
    GraphPass(COMPILE, "backend inductor", lambda spec: spec.backend == "inductor", _compile),
)


def passes_for(spec: VariantSpec) -> tuple[str, ...]:
    """Return the names of the passes that apply."""
    return tuple(graph_pass.name for graph_pass in GRAPH_PASSES if graph_pass.applies(spec))


def run_passes(spec: VariantSpec, traced: Variant | None = None) -> Iterator[PassResult]:
    """Run the passes that apply, in order, and yield the result of each.

    Args:
        traced: variant that an earlier process made from an equal spec (`VariantSpec.key`); then only `compile` runs.

    Raises:
        Unsupported: a pass does not support the block, which the message names.
    """
    graphs: Graphs = traced or spec.template
    for graph_pass in GRAPH_PASSES:
        if graph_pass.applies(spec) and (traced is None or graph_pass.name == COMPILE):
            began = time.perf_counter()
            graphs = graph_pass.run(spec, graphs)
            yield PassResult(graph_pass.name, graphs, time.perf_counter() - began)


def make_variant(
    spec: VariantSpec, traced: Variant | None = None, keep: Callable[[VariantSpec, Variant], None] | None = None
) -> tuple[Variant, dict[str, float]]:
    """Run all passes that apply; return the graphs that a rank runs, and pass -> seconds.

    Args:
        traced: as for `run_passes`.
        keep: called with the spec and its variant before a backend compiles it, unless `traced` is that variant.
    """
    # Only the latest graphs are kept: those of a large block have thousands of nodes.
    seconds: dict[str, float] = {}
    graphs: Graphs = traced or spec.template
    last = [name for name in passes_for(spec) if name != COMPILE][-1]
    for result in run_passes(spec, traced):
        graphs = result.graphs
        seconds[result.name] = result.seconds
        if keep is not None and result.name == last:
            assert isinstance(graphs, Variant)
            keep(spec, graphs)
    assert isinstance(graphs, Variant)
    return graphs, seconds


def modules_of(graphs: Graphs) -> dict[str, fx.GraphModule]:
    """Return the graphs by name: "forward", and "backward" once it exists."""
    if isinstance(graphs, Variant):
        return {"forward": graphs.forward, "backward": graphs.backward}
    return {"forward": graphs.graph}


def shard_strides(parameter: Parameter, part: StagePart) -> tuple[int, ...]:
    """Return the strides of a rank's shard as the executor passes it: a view of a flat buffer."""
    elements = sum(hi - lo for lo, hi in parameter.intervals(part.tp, part.index))
    flat = torch.empty(elements, device="meta")
    return tuple(parameter.natural(flat, part.tp, part.index).stride())

"""Memory of a captured model's blocks, from their compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import fx

from hydragraph.cost.footprint import Footprint, HalvesFootprint, MicroBatch
from hydragraph.cost.graph_footprint import footprint, halves_footprint, made_bytes, token_bytes
from hydragraph.ir.program import Block, Program
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.memory_budget import operations
from hydragraph.spec.stage_kind import StageKind, StagePart

VariantOf = Callable[[Block, StagePart], Variant]


class CompiledBlocks:
    """Exact memory of a captured model's blocks, from their compiled graphs.

    Args:
        compiled: returns a block's graphs (`passes.variants.Variants.get`).

    Attributes:
        itemsize: bytes per element of pulled weights.
        push_itemsize: bytes per element of pushed gradients.
        hidden_bytes: bytes of one token's hidden state.
    """

    def __init__(self, program: Program, compiled: VariantOf) -> None:
        self._arguments = program, compiled
        blocks = {b.name: b for b in program.blocks}
        self._footprint = cache(footprint)
        self._halves = cache(halves_footprint)
        self._variant = cache(lambda block, part: compiled(blocks[block], part))
        self.aux_bytes = cache(lambda batch: made_bytes(program.templates[program.aux.template].graph, batch))
        self.outline = program.outline
        self.buckets = program.buckets
        self.itemsize = program.dtype.itemsize
        self.push_itemsize = program.push_dtype.itemsize
        self.hidden_bytes = token_bytes(program.templates[program.blocks[0].template].graph)

    def __reduce__(self) -> tuple[type[CompiledBlocks], tuple[Program, VariantOf]]:  # without caches
        return CompiledBlocks, self._arguments

    def footprint(self, block: str, part: StagePart, batch: MicroBatch) -> Footprint:
        return self._footprint(self._variant(block, part), StagePart(part.kind), batch)

    def halves(self, block: str, part: StagePart, batch: MicroBatch) -> HalvesFootprint:
        return self._halves(self._variant(block, part), StagePart(part.kind), batch)

    def adds(self, block: str, part: StagePart) -> bool:
        """Return whether a block's products add weight gradients directly to the sums of earlier micro-batches."""
        return bool(self._variant(block, part).added)

    def repeated(self, block: str, kind: StageKind) -> float:
        whole = kind._replace(sums_in_pieces=False)
        kinds = (whole._replace(recompute=again) for again in (False, kind.recompute, True))
        plain, budgeted, full = (self._variant(block, StagePart(stage_kind)) for stage_kind in kinds)
        return repeated(plain, budgeted, full)


def repeated(plain: Variant, partial: Variant, full: Variant) -> float:
    """Return the fraction of full recomputation's operations that a memory budget repeats."""
    least, budgeted, most = (_operations(variant.backward) for variant in (plain, partial, full))
    return min(max((budgeted - least) / (most - least), 0.0), 1.0) if most > least else 0.0


def _operations(graph: fx.GraphModule) -> float:
    costs = (operations(node) for node in graph.graph.nodes if node.op == "call_function")
    return sum(cost for cost in costs if cost != float("inf"))

"""Bytes that a rank sends in a block's tensor-parallel collectives."""

from __future__ import annotations

from torch import fx

from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.graph_footprint import TracedSizes
from hydragraph.passes.collective_operators import SENT, STARTS
from hydragraph.passes.differentiate import Variant
from hydragraph.spec.stage_kind import StagePart

_SENT = SENT | {start: SENT[name] for name, start in STARTS.items()}


def collective_bytes(variant: Variant, part: StagePart, micro_batch: MicroBatch) -> int:
    sizes = TracedSizes.of(variant, part, micro_batch)
    moved = sum(_moved(node, sizes) for module in (variant.forward, variant.backward) for node in module.graph.nodes)
    return moved * (part.tp - 1) // part.tp


def _moved(node: fx.Node, sizes: TracedSizes) -> int:
    if node.op != "call_method" or not _SENT.get(str(node.target)):
        return 0
    # A reduce-scatter's operand is the unsharded tensor; in other collectives, the result is.
    result, *operand = sizes.storages(node).values()
    return _SENT[str(node.target)] * (operand[0] if node.target == "start_reduce_scatter" else result)

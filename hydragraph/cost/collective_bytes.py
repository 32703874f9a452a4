"""Bytes that a rank sends for one block in tensor-parallel collectives.

In a ring of t ranks (Patarasuk and Yuan, 2009), each rank sends (t - 1) / t * B for an all-gather or reduce-scatter of
B bytes, and twice as much for an all-reduce. Sums for the loss of a sharded head are not counted.
"""

from __future__ import annotations

from torch import fx

from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.graph_footprint import Sizes
from hydragraph.passes.differentiate import Variant
from hydragraph.spec.stage_kind import StagePart

_TIMES = {
    **dict.fromkeys(("all_reduce_max", "start_all_reduce", "start_all_reduce_product"), 2),
    **dict.fromkeys(("start_all_gather", "start_reduce_scatter"), 1),
}


def collective_bytes(variant: Variant, part: StagePart, micro_batch: MicroBatch) -> int:
    sizes = Sizes.of(variant, part, micro_batch)
    moved = sum(_moved(node, sizes) for module in (variant.forward, variant.backward) for node in module.graph.nodes)
    return moved * (part.tp - 1) // part.tp


def _moved(node: fx.Node, sizes: Sizes) -> int:
    if node.op != "call_method" or node.target not in _TIMES:
        return 0
    # The node's value is (result, operand). Count the unsharded one: for a reduce-scatter, the operand.
    result, *operand = sizes.storages(node).values()
    return _TIMES[str(node.target)] * (operand[0] if node.target == "start_reduce_scatter" else result)

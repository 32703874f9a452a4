"""Sums in pieces: golden text, and which products are taken.

Their numbers are compared with whole graphs' in tests/passes/test_shard.py, and over processes in tests/test_parity.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx

from hydragraph.ir.graph_data import placeholders_of
from hydragraph.passes.accumulate import accumulate
from hydragraph.passes.collective_operators import SUMMED
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.overlap_collectives import overlap_collectives
from hydragraph.passes.sums_in_pieces import sums_in_pieces
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.passes.golden_template import check_golden, layer

KINDS = [StageKind(2), StageKind(2, recompute=True), StageKind(2, recompute=0.5)]


def test_golden_text() -> None:
    after = overlap_collectives(sums_in_pieces(accumulate(layer(StagePart(KINDS[0])))))
    check_golden("llama_sums_in_pieces_tp2_rank0", after.forward)


def calls(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_method"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_sum_of_a_layer_is_of_products(kind: StageKind) -> None:
    before = accumulate(layer(StagePart(kind)))
    after = sums_in_pieces(before)
    for old, new in ((before.forward, after.forward), (before.backward, after.backward)):
        assert SUMMED in calls(new)
        assert [n.name for n in placeholders_of(new)] == [n.name for n in placeholders_of(old)]
        assert calls(new) == [SUMMED if call == "all_reduce" else call for call in calls(old)]
        assert len(new.graph.nodes) <= len(old.graph.nodes), "no operator is added but a view for each sum"
    assert (after.inputs, after.needs, after.outputs) == (before.inputs, before.needs, before.outputs)


def test_scattered_sums_are_left_as_they_are() -> None:
    before = layer(StagePart(StageKind(2, sequence_parallel=True)))
    assert calls(sums_in_pieces(before).forward) == calls(before.forward)


@pytest.mark.parametrize("saved", [False, True])
def test_a_product_that_is_also_saved_is_left(saved: bool) -> None:
    graph = fx.Graph()
    group, x, w = (graph.placeholder(name) for name in ("collectives", "x", "w"))
    x.meta["val"], w.meta["val"] = torch.empty(4, 3), torch.empty(3, 2)
    product = graph.call_function(torch.ops.aten.mm.default, (x, w))
    summed = graph.call_method("all_reduce", (group, product))
    product.meta["val"] = summed.meta["val"] = torch.empty(4, 2)
    graph.output((summed, product) if saved else (summed,))
    module = fx.GraphModule({}, graph)
    after = sums_in_pieces(Variant(module, module, ("collectives", "x", "w"), 1, (), (), {}, ()))
    assert calls(after.forward) == ["all_reduce" if saved else SUMMED]

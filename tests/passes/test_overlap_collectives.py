"""Collectives that overlap with weight gradients: golden text, what runs meanwhile, and their order.

Their numbers are compared with whole graphs' in tests/passes/test_shard.py, and over processes in tests/test_parity.py.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx

from hydragraph.passes.accumulate import accumulate
from hydragraph.passes.collective_operators import RESULT, STARTS
from hydragraph.passes.differentiate import Variant
from hydragraph.passes.overlap_collectives import overlap_collectives
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.passes.golden_template import check_golden, layer
from tests.thorough import thorough

PRODUCTS = (torch.ops.aten.mm.default, "addmm_")
KINDS = [
    StageKind(2),
    StageKind(2, sequence_parallel=True),
    pytest.param(StageKind(2, recompute=True), marks=thorough),
]


@functools.cache
def overlapped(kind: StageKind) -> tuple[Variant, Variant]:
    before = accumulate(layer(StagePart(kind, 0)))
    return before, overlap_collectives(before)


def test_golden_text() -> None:
    check_golden("llama_overlap_collectives_tp2_rank0", overlapped(StageKind(2))[1].backward)


def calls(module: fx.GraphModule) -> list[str]:
    """Return the collectives of a graph in their order."""
    names = (str(n.target) for n in module.graph.nodes if n.op == "call_method")
    return [name.removeprefix("start_") for name in names if name.removeprefix("start_") in STARTS]


def meanwhile(module: fx.GraphModule) -> list[int]:
    """Return the number of products that run between each collective's start and its result."""
    nodes = list(module.graph.nodes)
    places = {node: i for i, node in enumerate(nodes)}
    counts = []
    for start in (n for n in nodes if n.target in STARTS.values()):
        (result,) = start.users
        counts.append(sum(n.target in PRODUCTS for n in nodes[places[start] : places[result]]))
    return counts


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_collective_runs_while_weight_gradients_are_computed(kind: StageKind) -> None:
    before, after = overlapped(kind)
    for old, new in ((before.forward, after.forward), (before.backward, after.backward)):
        assert calls(new) == calls(old), "every rank calls them in this order"
        assert not any(n.target in STARTS for n in new.graph.nodes), "all are started"
    # The MLP's three weight gradients run during its sum, the attention's four during the other.
    assert sorted(meanwhile(after.backward))[-2:] == [3, 4]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_result_is_read_at_once_and_every_operator_runs_once(kind: StageKind) -> None:
    before, after = overlapped(kind)
    for old, new in ((before.forward, after.forward), (before.backward, after.backward)):
        for result in (n for n in new.graph.nodes if n.target == RESULT):
            assert result.next in result.users
        assert len(new.graph.nodes) == len(old.graph.nodes) + len(calls(old))

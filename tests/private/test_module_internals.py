"""The tables in which a module keeps its parts."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from hydragraph.private.module_internals import BATCH_NORMS, empty_tables, graph_module, table_of


def test_a_graph_module_generates_its_code_when_it_is_called() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    module = graph_module({}, graph)
    assert "_code" not in vars(module)
    assert module(torch.tensor(2)) == -2
    assert "neg(x)" in module.code


def test_the_table_has_what_stands_twice_and_can_be_written_to() -> None:
    block = nn.Linear(2, 2)
    listed = nn.ModuleList([block, block])
    assert list(table_of(listed).values()) == [block, block]
    assert len(list(listed.named_children())) == 1
    other = nn.Linear(2, 2)
    table_of(listed)["1"] = other
    assert listed[1] is other


def test_a_module_with_empty_tables_has_no_parts() -> None:
    whole = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    hollow: nn.Module = object.__new__(nn.Sequential)
    vars(hollow).update(vars(whole))
    vars(hollow).update(empty_tables())
    assert not [*hollow.parameters(), *hollow.buffers(), *hollow.children()]
    assert len(list(whole.parameters())) == 4


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.InstanceNorm1d(3)])
def test_norms_over_batches(norm: nn.Module) -> None:
    assert isinstance(norm, BATCH_NORMS)
    assert not isinstance(nn.LayerNorm(3), BATCH_NORMS)

"""The tables in which a module keeps its parts."""

from __future__ import annotations

import pytest
from torch import nn

from hydragraph.private.module_internals import BATCH_NORMS, empty_tables, table_of


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

"""One rank's part of a link: which sums need no table, and that these give the same bits."""

from __future__ import annotations

import pytest
import torch

from hydragraph.ir.layout import GradientKind, Layout, home, propagation
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule
from hydragraph.kernels.slice_copy import slice_copy
from hydragraph.runtime.exchange import Exchange, _sum, push_exchange

BUCKET = Bucket("b", (Parameter("v", (7,)), Parameter("w", (4, 6), rule=ShardRule(0, (4,)))), ("layer.0",))


def gradients(*stages: tuple[int, ...]) -> Layout:
    kinds = {p.name: GradientKind.PARTIAL for p in BUCKET.parameters}
    return propagation(BUCKET, stages, [kinds] * len(stages))


def pushed(ranks: int, *stages: tuple[int, ...]) -> list[Exchange]:
    owners = home(BUCKET.size, range(ranks))
    return [push_exchange(gradients(*stages), owners, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "stages", "copies"),
    [
        (2, [(0,), (1,)], 2),
        (3, [(0,), (2,), (1,)], 3),
        (3, [(0,), (2,)], 2),  # rank 1 computes something else
        (2, [(1,)], 1),
        (2, [(0, 1)], 0),  # a shard comes in parts
    ],
)
def test_how_many_ranks_send_a_whole_shard(ranks: int, stages: list[tuple[int, ...]], copies: int) -> None:
    assert [exchange.whole for exchange in pushed(ranks, *stages)] == [copies] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_whole_shards_are_summed_as_the_table_sums_them(ranks: int) -> None:
    for exchange in (e for e in pushed(ranks, *[(rank,) for rank in range(ranks)]) if e.target):
        incoming = torch.randn(sum(exchange.received), generator=torch.Generator().manual_seed(0))
        by_table, found = torch.zeros(exchange.target), torch.full((exchange.target,), float("nan"))
        slice_copy(incoming, by_table, exchange.scatter, accumulate=True)
        _sum(incoming.view(exchange.whole, -1), found)
        assert torch.equal(found, by_table)

"""One rank's part of a link: which sums need no table, and that these give the same bits."""

from __future__ import annotations

import pytest
import torch

from hydragraph.ir.layout import GradientKind, Layout, home, propagation
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule
from hydragraph.kernels.slice_copy import slice_copy
from hydragraph.runtime.exchange import Exchange, _sum, hand_exchange, push_exchange

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


def test_what_moves_of_a_shard_is_a_part_of_it() -> None:
    """Rank 1 of 3 owns the second third first, and second what is half a bucket away: both ends of it."""
    owners = home(48, range(3), copies=2)
    bucket = Bucket("b", (Parameter("v", (48,)),), ("layer.0",))
    everyone = propagation(bucket, [(0,), (1,), (2,)], [{"v": GradientKind.REPLICA}] * 3)
    push = push_exchange(everyone, owners, 1, 3)
    assert (push.source, push.target_at, push.target, push.whole) == (48, 8, 16, 3)
    handing = hand_exchange(owners, 1, 3)
    assert handing is not None
    assert (handing.source_at, handing.source, handing.sends) == (8, 16, ((8, 8), (0, 8)))
    assert (handing.target_at, handing.target, handing.receives) == (0, 32, ((0, 8), (24, 8)))
    assert not handing.in_order
    assert hand_exchange(home(48, range(3)), 1, 3) is None

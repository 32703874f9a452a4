"""Bytes that an exchange copies, in cases that can be computed by hand."""

from __future__ import annotations

import pytest

from hydragraph.cost.traffic_bytes import BucketTraffic, HomeTraffic, MessageBytes
from hydragraph.ir.layout import GradientKind, home, propagation
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

SIZE = 64
BUCKET = Bucket("b", (Parameter("w", (8, 8), (), ShardRule(0, (8,))),), ("b",))
WHOLE = {"w": GradientKind.REPLICA}


def test_alone_nothing_travels_unless_the_dtype_changes() -> None:
    alone = BucketTraffic(home(SIZE, range(1)), propagation(BUCKET, ((0,),), [WHOLE]))
    assert alone.pulled(0, 1, 4) == alone.pushed(0) == MessageBytes(0, 0)
    assert alone.pulled(0, 1, 2).incoming == 2 * SIZE


@pytest.mark.parametrize("rank", [0, 1])
def test_data_parallel_ranks_send_their_shards_as_they_are(rank: int) -> None:
    both = BucketTraffic(home(SIZE, range(2)), propagation(BUCKET, ((0,), (1,)), [WHOLE, WHOLE]))
    assert both.pulled(rank, 2, 4) == MessageBytes(0, 4 * SIZE)
    assert both.pulled(rank, 2, 2) == MessageBytes(2 * SIZE // 2, 2 * SIZE)  # rounded first
    # The whole gradient is sent as it is; the shard comes from both, its own part too.
    assert both.pushed(rank).outgoing == 0
    assert both.pushed(rank).incoming > 0


def test_where_the_user_owns_all_nothing_is_sent_or_copied() -> None:
    local = BucketTraffic(home(SIZE, [1]), propagation(BUCKET, ((1,),), [WHOLE]))
    for rank in range(2):
        assert local.pulled(rank, 2, 4) == local.pushed(rank) == MessageBytes(0, 0)
        assert local.sums_at_home(rank)
        assert local.pulled(rank, 2, 2) == MessageBytes(0, 2 * SIZE * rank)  # rounded


def test_a_rank_without_a_stage_receives_no_weights() -> None:
    first = BucketTraffic(home(SIZE, range(2)), propagation(BUCKET, ((0,),), [WHOLE]))
    assert first.pulled(1, 2, 4) == MessageBytes(0, 0)
    assert first.pulled(0, 2, 4).incoming == 4 * SIZE
    assert first.pushed(1).outgoing == 0


def test_what_second_owners_add() -> None:
    # Ranks 0 and 1 on one node, 2 and 3 on another, each node with everything; rank 0 computes with all of it.
    owners = home(SIZE, range(4), copies=2, nodes=[0, 0, 1, 1])
    users = propagation(BUCKET, ((0,),), [WHOLE])
    # Two quarters are its own, and those between them come from rank 1.
    assert BucketTraffic(owners, users).pulled(0, 4, 4) == MessageBytes(4 * SIZE, 4 * SIZE)
    # Rank 8 hears from 6, which owns the second half, before it hears from 7, which owns the first.
    apart = home(SIZE, (9, 7, 6, 4), copies=2, nodes=[0, 1, 0, 1], align=1)
    far = propagation(BUCKET, ((8,),), [WHOLE])
    assert BucketTraffic(apart, far).pulled(8, 10, 4).outgoing == 4 * SIZE
    for either in (owners, home(SIZE, range(4))):
        assert BucketTraffic(either, users).pushed(1) == MessageBytes(0, 0)


def test_what_is_handed_on_is_staged_where_it_lies_apart() -> None:
    # First owners of thirds hand halves of them on: rank 1's first half to rank 2, its second to rank 0. Its own second
    # copy is at both ends of its shard.
    bucket = Bucket("b", (Parameter("w", (96,)),), ("b",))
    users = propagation(bucket, ((0,), (1,), (2,)), [WHOLE] * 3)
    owners = home(96, range(3), copies=2)
    found = [BucketTraffic(owners, users).pushed(rank) for rank in range(3)]
    assert found == [MessageBytes(0, 4 * 96), MessageBytes(0, 4 * 96, 4 * 64), MessageBytes(0, 4 * 96)]


def test_buckets_of_equal_form_share_their_traffic() -> None:
    owners = home(SIZE, range(2))
    traffic = HomeTraffic((), lambda _: owners)
    other = Bucket("c", (Parameter("v", (8, 8), (), ShardRule(0, (8,))),), ("c",))
    partial, replica = GradientKind.PARTIAL, GradientKind.REPLICA
    first = traffic.of(BUCKET, ((0,), (1,)), [replica, replica])
    assert traffic.of(other, ((0,), (1,)), [replica, replica]) is first
    assert traffic.of(BUCKET, ((0, 1),), [replica]) is not first
    assert traffic.of(BUCKET, ((0, 1),), [replica]) is not traffic.of(BUCKET, ((0, 1),), [partial])

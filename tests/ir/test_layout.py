"""Layouts: home shards partition, propagation shards equal plain slicing, kinds follow the rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hydragraph.ir.layout import GradientKind, Ints, Layout, home, propagation, whole
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

REPLICA, PARTIAL = GradientKind.REPLICA, GradientKind.PARTIAL


def rows(layout: Layout) -> list[tuple[int, int, int, int, int, bool]]:
    columns = (layout.rank, layout.lo, layout.hi, layout.at, layout.copy, layout.partial)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_the_example_of_the_module() -> None:
    w = Parameter("w", (4, 2), rule=ShardRule(0, (2, 2)))
    layout = propagation(Bucket("layer.0", (w, Parameter("n", (3,))), ("layer.0",)), [(5, 6)], {"n": REPLICA})
    assert rows(layout) == [
        (5, 0, 2, 0, 0, True),
        (5, 4, 6, 2, 0, True),
        (5, 8, 11, 4, 0, False),
        (6, 2, 4, 0, 0, True),
        (6, 6, 8, 2, 0, True),
        (6, 8, 11, 4, 0, False),
    ]
    assert layout.local_size(5) == layout.local_size(6) == 7


def elements(layout: Layout, rank: int) -> Ints:
    """Return which elements of the bucket lie in one rank's local buffer, in order."""
    mine = layout.of(rank)
    buffer = np.full(layout.local_size(rank), -1)
    for lo, hi, at in zip(mine.lo, mine.hi, mine.at, strict=True):
        assert (buffer[at : at + hi - lo] == -1).all()
        buffer[at : at + hi - lo] = np.arange(lo, hi)
    assert (buffer >= 0).all()
    return buffer


def owned(layout: Layout, ranks: Sequence[int]) -> Ints:
    """Count how often each element of the bucket is held."""
    return sum((np.bincount(elements(layout, r), minlength=layout.size) for r in ranks), np.zeros(layout.size, int))


ranks_of_any_kind = st.lists(st.integers(0, 40), min_size=1, max_size=9, unique=True)


@given(st.integers(0, 200), ranks_of_any_kind, st.sampled_from((1, 4, 8)), st.data())
def test_home_partitions_the_bucket(size: int, ranks: list[int], align: int, data: st.DataObject) -> None:
    n = len(ranks)
    weights = st.lists(st.just(0.0) | st.floats(0, 9), min_size=n, max_size=n)
    shares = data.draw(st.none() | weights.filter(lambda w: sum(w) > 0))
    nodes = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=n, max_size=n))
    on = dict(zip(ranks, nodes or range(n), strict=True))
    owning = {on[rank] for rank, share in zip(ranks, shares or [1.0] * n, strict=True) if share}
    copies = data.draw(st.sampled_from((1, 2) if len(owning) > 1 else (1,)))
    layout = home(size, ranks, shares, copies, align, nodes)
    assert (owned(layout, ranks) == copies).all()
    for rank in ranks:
        assert len(np.unique(elements(layout, rank))) == layout.local_size(rank)  # no element twice on one rank
    for copy in range(copies):
        covered = [element for _, lo, hi, _, c, _ in rows(layout) if c == copy for element in range(lo, hi)]
        assert sorted(covered) == list(range(size))
    assert all(layout.local_size(r) == 0 for r, share in zip(ranks, shares or [1.0] * n, strict=True) if not share)
    for rank in ranks:  # what it owns of a parameter is contiguous in its buffer
        assert (np.diff(elements(layout, rank)) > 0).all()
    if copies == 2:
        for rank in ranks:  # the first owner of one interval, the second of as much, to the alignment
            first, second = layout.first.of(rank), layout.second.of(rank)
            assert len(first.rank) <= 1
            assert len(second.rank) <= 2
            assert abs((first.hi - first.lo).sum() - (second.hi - second.lo).sum()) <= 2 * align
        for lost in owning:
            there = [rank for rank in ranks if on[rank] == lost]
            left = layout.without(there)
            assert not set(there) & set(left.ranks)
            assert (owned(left, ranks) >= 1).all()


@given(st.integers(1, 5000), st.lists(st.integers(0, 3), min_size=2, max_size=9), st.data())
def test_two_copies_meet_shares_unless_a_node_has_more_than_half(
    size: int, nodes: list[int], data: st.DataObject
) -> None:
    n = len(nodes)
    shares = data.draw(st.lists(st.floats(0.1, 9), min_size=n, max_size=n))
    of_node = {node: sum(s for s, at in zip(shares, nodes, strict=True) if at == node) for node in nodes}
    assume(len(of_node) > 1)
    layout, most = home(size, range(n), shares, 2, nodes=nodes), max(of_node, key=lambda node: of_node[node])
    capped = of_node[most] > sum(shares) / 2
    for rank, (share, node) in enumerate(zip(shares, nodes, strict=True)):
        ideal = 2 * share / sum(shares)
        if capped:
            ideal = share / of_node[most] if node == most else share / (sum(shares) - of_node[most])
        assert abs(layout.local_size(rank) - size * ideal) <= 16 + 1e-6


@given(st.integers(1, 30), ranks_of_any_kind, st.booleans())
def test_a_divisible_bucket_has_exactly_equal_shards(shard: int, ranks: list[int], explicit: bool) -> None:
    layout = home(shard * len(ranks), ranks, [2.5] * len(ranks) if explicit else None)
    for i, rank in enumerate(ranks):
        assert elements(layout, rank).tolist() == list(range(i * shard, (i + 1) * shard))


@given(st.integers(1, 5000), ranks_of_any_kind, st.data())
def test_uneven_shares_are_met_to_the_alignment(size: int, ranks: list[int], data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.floats(0.1, 9), min_size=len(ranks), max_size=len(ranks)))
    layout = home(size, ranks, shares, align=8)
    equal = len(set(shares)) == 1 and size % len(ranks) == 0
    for rank, share in zip(ranks, shares, strict=True):
        assert abs(layout.local_size(rank) - size * share / sum(shares)) <= 8 + 1e-6
        assert equal or all(lo % 8 == 0 for lo in layout.of(rank).lo)


def test_home_by_hand() -> None:
    tiny = home(10, [5, 1, 9, 4])
    assert rows(tiny) == [(1, 0, 8, 0, 0, True), (4, 8, 10, 0, 0, True)]
    assert tiny.ranks == (1, 4)
    assert tiny.local_size(5) == 0
    twice = home(9, [7, 3, 5], copies=2, align=1)
    assert [row[:5] for row in rows(twice)] == [
        *[(3, 0, 2, 0, 1), (3, 3, 6, 2, 0), (3, 8, 9, 5, 1)],
        *[(5, 2, 4, 0, 1), (5, 6, 9, 2, 0)],
        *[(7, 0, 3, 0, 0), (7, 4, 8, 3, 1)],
    ]
    assert rows(twice.first) == [row for row in rows(twice) if row[4] == 0]
    assert rows(twice.second) == [row for row in rows(twice) if row[4] == 1]
    # Node 0 has more than half of the shares; then nodes that are not neighbours.
    pair_and_one = home(12, [0, 1, 2], copies=2, align=1, nodes=[0, 0, 1])
    assert [row[:3] for row in rows(pair_and_one.first)] == [(0, 0, 3), (1, 3, 6), (2, 6, 12)]
    assert [row[:3] for row in rows(pair_and_one.second)] == [(0, 6, 9), (1, 9, 12), (2, 0, 6)]
    apart = home(12, [0, 1, 2, 3], copies=2, align=1, nodes=[0, 1, 0, 1])
    assert [row[:3] for row in rows(apart.first)] == [(0, 0, 3), (1, 6, 9), (2, 3, 6), (3, 9, 12)]
    assert [row[:3] for row in rows(apart.second)] == [(0, 6, 9), (1, 0, 3), (2, 9, 12), (3, 3, 6)]
    assert rows(whole(12, 3)) == [(3, 0, 12, 0, 0, True)]
    assert rows(whole(12, 3, 5)) == [(3, 0, 12, 0, 0, True), (5, 0, 12, 0, 1, True)]
    with pytest.raises(ValueError, match="read-only"):
        twice.lo[0] = 1


@st.composite
def buckets(draw: st.DrawFn) -> Bucket:
    """Draw parameters that degrees 1, 2, 3, 4 and 6 can cut; heads are 1 (shared by all) or 12."""
    members = []
    for i in range(draw(st.integers(1, 5))):
        shape, rule = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)), None
        if draw(st.integers(0, 2)):
            heads, dim = draw(st.booleans()), draw(st.integers(0, len(shape) - 1))
            units = st.sampled_from((1, 12)) if heads else st.integers(1, 7)
            rule = ShardRule(dim, tuple(draw(st.lists(units, min_size=1, max_size=3))), draw(st.integers(1, 2)), heads)
            shape[dim] = sum(rule.segments) * rule.unit
        members.append(Parameter(f"p{i}", tuple(shape), rule=rule))
    return Bucket("layer.0", tuple(members), ("layer.0",))


@st.composite
def stage_lists(draw: st.DrawFn) -> list[tuple[int, ...]]:
    degrees = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4))
    ranks = iter(draw(st.permutations(range(30))))
    return [tuple(next(ranks) for _ in range(tp)) for tp in degrees]


def shard_elements(bucket: Bucket, tp: int, index: int) -> Ints:
    """Number the bucket's elements, slice the natural tensors, and put the shards in canonical order again."""
    parts, start = [np.zeros(0, np.int64)], 0
    for p in bucket.parameters:
        full = p.natural(torch.arange(start, start + p.size))
        if p.rule is not None and tp > 1:
            segments = torch.split(full, [n * p.rule.unit for n in p.rule.segments], p.rule.dim)
            held = [(segment, p.rule.units(s, tp, index)) for s, segment in enumerate(segments)]
            unit, dim = p.rule.unit, p.rule.dim
            full = torch.cat([segment.narrow(dim, a * unit, (b - a) * unit) for segment, (a, b) in held], dim)
        parts.append(p.canonical(full).numpy())
        start += p.size
    return np.concatenate(parts)


@given(buckets(), stage_lists(), st.data())
def test_propagation_shards_equal_plain_slicing(
    bucket: Bucket, stages: list[tuple[int, ...]], data: st.DataObject
) -> None:
    names = [p.name for p in bucket.parameters if p.rule is None]
    kinds = [{name: data.draw(st.sampled_from(GradientKind)) for name in names} for _ in stages]
    layout = propagation(bucket, stages, kinds)
    assert layout.size == bucket.size
    assert set(layout.ranks) <= {rank for stage in stages for rank in stage}
    offsets = bucket.offsets()
    for copy, stage in enumerate(stages):
        for index, rank in enumerate(stage):
            assert np.array_equal(elements(layout, rank), shard_elements(bucket, len(stage), index))
            assert set(layout.of(rank).copy.tolist()) <= {copy}
            for p in bucket.parameters:
                wanted = len(stage) == 1 or p.rule is not None or kinds[copy][p.name] is PARTIAL
                start, end = offsets[p.name], offsets[p.name] + p.size
                touching = [flag for _, lo, hi, _, _, flag in rows(layout.of(rank)) if lo < end and hi > start]
                assert set(touching) <= {wanted}


def norms_and_matrix() -> Bucket:
    a, b = Parameter("a", (4,)), Parameter("b", (4,))
    w = Parameter("w", (3, 4), rule=ShardRule(1, (4,)))
    return Bucket("layer.0", (a, b, w), ("layer.0",))


def test_adjacent_intervals_are_merged_within_a_kind() -> None:
    stages = [(2, 0), (5,)]
    layout = propagation(norms_and_matrix(), stages, {"a": REPLICA, "b": REPLICA})
    assert rows(layout) == [
        (0, 0, 8, 0, 0, False),
        (0, 14, 20, 8, 0, True),
        (2, 0, 8, 0, 0, False),
        (2, 8, 14, 8, 0, True),
        (5, 0, 20, 0, 1, True),
    ]
    mixed = propagation(norms_and_matrix(), stages, {"a": REPLICA, "b": PARTIAL})
    assert rows(mixed.of(2)) == [(2, 0, 4, 0, 0, False), (2, 4, 14, 4, 0, True)]


def test_kinds_are_needed_only_where_several_ranks_hold_a_parameter() -> None:
    bucket = norms_and_matrix()
    assert propagation(bucket, [(3,)], {}).local_size(3) == 20
    with pytest.raises(ValueError, match=r"layer\.0: no gradient kind for b"):
        propagation(bucket, [(3,), (0, 1)], {"a": REPLICA})
    with pytest.raises(AssertionError, match="a rank may be in only one of the stages"):
        propagation(bucket, [(3,), (2, 3)], {"a": REPLICA, "b": REPLICA})
    assert propagation(bucket, [], {}).ranks == ()

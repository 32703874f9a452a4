"""Link: values and gradient sums against a plain gather and scatter over whole buckets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydragraph.ir import link
from hydragraph.ir.layout import GradientKind, Ints, Layout, home, propagation, whole
from hydragraph.ir.link import Slices
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

REPLICA, PARTIAL = GradientKind.REPLICA, GradientKind.PARTIAL
Stages = list[tuple[int, ...]]
Kinds = list[dict[str, GradientKind]]


@dataclass(frozen=True)
class Case:
    """A bucket with the stages that propagate it and each stage's gradient kinds."""

    bucket: Bucket
    stages: Stages
    kinds: Kinds

    @property
    def layout(self) -> Layout:
        return propagation(self.bucket, self.stages, self.kinds)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw fused, uneven and replicated parameters; heads may be fewer than the ranks of a stage."""
    degrees = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4))
    legal = [n for n in (1, 2, 3, 4, 6, 12) if all(n % t == 0 or t % n == 0 for t in degrees)]
    members = []
    for i in range(draw(st.integers(1, 5))):
        shape, rule = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)), None
        if draw(st.integers(0, 2)):
            heads, dim = draw(st.booleans()), draw(st.integers(0, len(shape) - 1))
            units = st.sampled_from(legal) if heads else st.integers(1, 9)
            rule = ShardRule(dim, tuple(draw(st.lists(units, min_size=1, max_size=3))), draw(st.integers(1, 2)), heads)
            shape[dim] = sum(rule.segments) * rule.unit
        members.append(Parameter(f"p{i}", tuple(shape), rule=rule))
    ranks = iter(draw(st.permutations(range(24))))
    stages = [tuple(next(ranks) for _ in range(tp)) for tp in degrees]
    kinds = [{p.name: draw(st.sampled_from(GradientKind)) for p in members} for _ in stages]
    return Case(Bucket("layer.0", tuple(members), ("layer.0",)), stages, kinds)


@st.composite
def homes(draw: st.DrawFn, size: int, copies: int | None = None) -> Layout:
    """Draw a home over any ranks (some idle, some not in any stage) with even or uneven shares."""
    ranks = draw(st.lists(st.integers(0, 24), min_size=2, max_size=10, unique=True))
    weights = st.lists(st.sampled_from((0.0, 0.5, 1.0, 3.0)), min_size=len(ranks), max_size=len(ranks))
    copies = copies or draw(st.sampled_from((1, 2)))
    shares = draw(st.none() | weights.filter(lambda w: sum(map(bool, w)) >= copies))
    return home(size, ranks, shares, copies, draw(st.sampled_from((1, 8))))


def elements(layout: Layout, rank: int) -> Ints:
    mine = layout.of(rank)
    return np.concatenate([np.arange(lo, hi) for lo, hi in zip(mine.lo, mine.hi, strict=True)])


def buffers(layout: Layout, full: npt.NDArray[np.float64]) -> dict[int, npt.NDArray[np.float64]]:
    """Cut a whole bucket into the local buffers of a layout."""
    return {rank: full[elements(layout, rank)] for rank in layout.ranks}


def check_order(slices: Slices) -> None:
    """Check sorting, that slices are not empty, and that no two neighbours could be merged."""
    keys = list(zip(slices.dst.tolist(), slices.src.tolist(), slices.lo.tolist(), strict=True))
    assert keys == sorted(keys)
    assert (slices.hi > slices.lo).all()
    for i in range(1, len(slices)):
        gaps = [x[i] - x[i - 1] for x in (slices.lo, slices.src_at, slices.dst_at)]
        joined = keys[i][:2] == keys[i - 1][:2] and gaps == [slices.hi[i - 1] - slices.lo[i - 1]] * 3
        assert not joined


def deliver(slices: Slices, source: Layout, target: Layout) -> dict[int, Ints]:
    """Count, per target rank and place in its buffer, what arrives; checks both ends of every slice on the way."""
    held = {rank: elements(source, rank) for rank in source.ranks}
    wanted = {rank: elements(target, rank) for rank in target.ranks}
    counts = {rank: np.zeros(len(x), np.int64) for rank, x in wanted.items()}
    columns = (slices.src, slices.dst, slices.lo, slices.hi, slices.src_at, slices.dst_at)
    for src, dst, lo, hi, src_at, dst_at in zip(*(column.tolist() for column in columns), strict=True):
        assert held[src][src_at : src_at + hi - lo].tolist() == list(range(lo, hi))
        assert wanted[dst][dst_at : dst_at + hi - lo].tolist() == list(range(lo, hi))
        counts[dst][dst_at : dst_at + hi - lo] += 1
    return counts


def move(
    slices: Slices, have: dict[int, npt.NDArray[np.float64]], target: Layout
) -> dict[int, npt.NDArray[np.float64]]:
    """Carry the slices out message by message, adding what arrives."""
    got = {rank: np.zeros(target.local_size(rank)) for rank in target.ranks}
    for src in np.unique(slices.src):
        sends, _ = slices.of(src)
        for dst in np.unique(sends.dst):
            _, receives = slices.of(dst)
            out, into = sends.where(sends.dst == dst), receives.where(receives.src == src)
            spans = zip(out.src_at, out.hi - out.lo, strict=True)
            message = np.concatenate([have[src][at : at + length] for at, length in spans])
            read = 0
            for at, length in zip(into.dst_at, into.hi - into.lo, strict=True):
                got[dst][at : at + length] += message[read : read + length]
                read += length
            assert read == len(message)
    return got


def check_copy(source: Layout, target: Layout) -> None:
    """Compare with the oracle: every target buffer is a cut of the whole bucket, and only what is missing travels."""
    slices = link.copy(source, target)
    check_order(slices)
    assert all((count == 1).all() for count in deliver(slices, source, target).values())
    full = np.random.default_rng(0).standard_normal(source.size)
    got, want = move(slices, buffers(source, full), target), buffers(target, full)
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[rank], want[rank]) for rank in want)
    missing = {r: np.setdiff1d(elements(target, r), elements(source, r)) for r in set(target.ranks) & set(source.ranks)}
    travelling = sum(len(missing[r]) if r in missing else target.local_size(r) for r in target.ranks)
    assert slices.travelling.elements == travelling
    assert slices.elements == sum(target.local_size(r) for r in target.ranks)
    check_nearest(slices, source)


def check_nearest(slices: Slices, source: Layout) -> None:
    """Check that no other holder of any slice is nearer to the receiver than its sender."""
    for src, dst, lo, hi in zip(slices.src, slices.dst, slices.lo, slices.hi, strict=True):
        for at in range(lo, hi):
            holders = source.rank[(source.lo <= at) & (at < source.hi)]
            assert abs(src - dst) == np.abs(holders - dst).min()


@given(cases(), st.data())
def test_pull_equals_gather(case: Case, data: st.DataObject) -> None:
    check_copy(data.draw(homes(case.bucket.size)), case.layout)


@settings(max_examples=40)
@given(cases(), st.data())
def test_copy_out_of_propagation_and_between_strategies(case: Case, data: st.DataObject) -> None:
    check_copy(case.layout, data.draw(homes(case.bucket.size)))
    other = [tuple(rank + 1 for rank in reversed(stage)) for stage in case.stages]
    check_copy(case.layout, propagation(case.bucket, other, case.kinds))
    check_copy(case.layout, whole(case.bucket.size, 3))


@given(st.integers(1, 120), st.integers(2, 9), st.sampled_from(("less", "more", "double")), st.data())
def test_homes_of_different_rank_sets(size: int, n: int, change: str, data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(20)))
    m = {"less": n - 1, "more": n + 1, "double": 2 * n}[change]
    before, after = ranks[:n], sorted(ranks[:m])
    check_copy(
        home(size, before, align=4), home(size, after, copies=data.draw(st.sampled_from((1, 2) if m > 1 else (1,))))
    )
    check_copy(home(size, before, copies=2), home(size, after))


@settings(max_examples=40)
@given(st.integers(1, 90), st.data())
def test_two_copies_survive_the_loss_of_any_rank(size: int, data: st.DataObject) -> None:
    before = data.draw(homes(size, copies=2))
    for lost in before.ranks:
        survivors = before.without([lost])
        check_copy(survivors, home(size, survivors.ranks))


def test_missing_elements_are_an_error() -> None:
    before = home(32, [0, 1, 2, 3])
    with pytest.raises(ValueError, match=r"elements \[16, 24\), which rank 0 needs, are missing"):
        link.copy(before.without([2]), whole(32, 0))
    with pytest.raises(ValueError, match=r"elements \[24, 32\), which rank 1 needs, are missing"):
        link.copy(before.without([3]), home(32, [0, 1]))
    with pytest.raises(ValueError, match=r"elements \[0, 8\)"):
        link.copy(before.without([0]), before)
    with pytest.raises(ValueError, match="32 elements, the target 40"):
        link.copy(before, whole(40, 0))


def gradient_oracle(case: Case, seed: int) -> tuple[dict[int, npt.NDArray[np.float64]], Ints, Ints]:
    """Make whole-number gradients, and by looping over stages and holders their sums and counts of contributions."""
    random, size = np.random.default_rng(seed), case.bucket.size
    sums, counts = np.zeros(size, np.int64), np.zeros(size, np.int64)
    have: dict[int, npt.NDArray[np.float64]] = {}
    for stage, kinds in zip(case.stages, case.kinds, strict=True):
        alike, tp = random.integers(-99, 99, size), len(stage)
        local: dict[int, list[Ints]] = {rank: [] for rank in stage}
        for p in case.bucket.parameters:
            start, replica = case.bucket.offsets()[p.name], p.rule is None and kinds[p.name] is REPLICA
            for index, rank in enumerate(stage):
                for lo, hi in p.intervals(tp, index):
                    a, b = start + lo, start + hi
                    values = alike[a:b] if replica else random.integers(-99, 99, b - a)
                    local[rank].append(values)
                    if not replica or index == 0:
                        sums[a:b] += values
                        counts[a:b] += 1
        have.update({rank: np.concatenate(parts).astype(float) for rank, parts in local.items()})
    return have, sums, counts


@given(cases(), st.data())
def test_push_equals_scatter_and_sum(case: Case, data: st.DataObject) -> None:
    target, source = data.draw(homes(case.bucket.size)), case.layout
    slices = link.reduce(source, target)
    check_order(slices)
    have, sums, counts = gradient_oracle(case, data.draw(st.integers(0, 9)))
    got, arrivals = move(slices, have, target), deliver(slices, source, target)
    handed = link.hand_on(target)
    handed_sums, handed_counts = move(handed, got, target), move(handed, dict(arrivals), target)  # pyrefly: ignore[bad-argument-type]
    for rank in target.ranks:
        owned = elements(target, rank)
        assert np.array_equal(got[rank] + handed_sums[rank], sums[owned])
        assert np.array_equal(arrivals[rank] + handed_counts[rank], counts[owned])


@given(cases(), st.data())
def test_a_replica_is_taken_from_the_owner_itself_where_it_holds_one(case: Case, data: st.DataObject) -> None:
    target, source = data.draw(homes(case.bucket.size, copies=1)), case.layout
    slices = link.reduce(source, target)
    copy_of = {rank: copy for copy, stage in enumerate(case.stages) for rank in stage}
    for rank in set(target.ranks) & set(copy_of):
        mine = source.of(rank)
        own = [np.arange(lo, hi) for lo, hi, p in zip(mine.lo, mine.hi, mine.partial, strict=True) if not p]
        _, receives = slices.of(rank)
        for src, lo, hi in zip(receives.src.tolist(), receives.lo, receives.hi, strict=True):
            if src != rank and copy_of[src] == copy_of[rank]:
                assert not np.isin(np.arange(lo, hi), np.concatenate(own or [np.zeros(0)])).any()


def test_holders_of_a_replica_take_turns() -> None:
    norm = Bucket("head", (Parameter("norm", (64,)),), ("head",))
    source = propagation(norm, [(10, 11, 12, 13)], {"norm": REPLICA})
    slices = link.reduce(source, home(64, range(8)))
    assert np.bincount(slices.src)[10:].tolist() == [2, 2, 2, 2]
    owners = home(16, [0, 1, 4, 5], copies=2, nodes=[0, 0, 1, 1])
    near = link.copy(owners, propagation(norm_of(16), [(2, 7)], {"norm": REPLICA}))
    # Ranks 0 and 4 own the first and the third quarter, 1 and 5 the others: 4 is as near to 2 as 0, but 5 not as 1.
    assert near.where(near.dst == 2).src.tolist() == [0, 0, 1, 1]
    assert near.where(near.dst == 7).src.tolist() == [4, 4, 5, 5]


def test_values_come_from_the_same_node_where_it_has_them() -> None:
    users = propagation(norm_of(16), [(1,), (2,)], {})
    for nodes, senders in (([0, 0, 1, 1], {1: {0, 1}, 2: {2, 3}}), ([0, 1, 1, 0], {1: {1, 2}, 2: {1, 2}})):
        slices = link.copy(home(16, range(4), copies=2, nodes=nodes), users)
        for rank, expected in senders.items():
            assert set(slices.where(slices.dst == rank).src.tolist()) == expected
            one, whole_table = link.copy(home(16, range(4), copies=2, nodes=nodes), users, rank), slices
            assert one.of(rank)[1].src.tolist() == whole_table.of(rank)[1].src.tolist()
    check_copy(home(16, range(4), copies=2, nodes=[0, 0, 1, 1]), whole(16, 9))  # the source layout ignores nodes


@given(cases(), st.data())
def test_sums_are_handed_to_second_owners_once_and_never_stay(case: Case, data: st.DataObject) -> None:
    owners = data.draw(homes(case.bucket.size))
    slices = link.hand_on(owners)
    check_order(slices)
    assert (slices.src != slices.dst).all()
    arrivals = deliver(slices, owners, owners)
    for rank in owners.ranks:
        second = np.zeros(owners.local_size(rank), np.int64)
        for at, length, copy in zip(*(x.tolist() for x in place_of(owners.of(rank))), strict=True):
            second[at : at + length] = copy
        assert np.array_equal(arrivals[rank], second)


def place_of(rows: Layout) -> tuple[Ints, Ints, Ints]:
    return rows.at, rows.hi - rows.lo, rows.copy


def norm_of(size: int) -> Bucket:
    return Bucket("norm", (Parameter("norm", (size,)),), ("head",))


def test_each_copy_must_hold_every_gradient() -> None:
    split = Bucket("w", (Parameter("w", (8,), rule=ShardRule(0, (8,))),), ("w",))
    source = propagation(split, [(0, 1), (2, 3)], {}).without([2])
    with pytest.raises(ValueError, match=r"elements \[0, 4\), which rank 5 needs"):
        link.reduce(source, home(8, [5, 6], shares=[3, 1], align=2))
    with pytest.raises(ValueError, match="missing"):
        link.reduce(propagation(split, [], {}), home(8, [0]))


def test_reduce_by_hand() -> None:
    bucket = Bucket("b", (Parameter("n", (4,)), Parameter("w", (4,), rule=ShardRule(0, (4,)))), ("b",))
    slices = link.reduce(propagation(bucket, [(0, 1), (2,)], {"n": REPLICA}), home(8, [0, 1]))
    columns = (slices.src, slices.dst, slices.lo, slices.hi, slices.src_at, slices.dst_at)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (0, 0, 0, 4, 0, 0),
        (2, 0, 0, 4, 0, 0),
        (0, 1, 4, 6, 4, 0),
        (1, 1, 6, 8, 4, 2),
        (2, 1, 4, 8, 4, 0),
    ]


@given(cases(), st.data())
def test_one_ranks_share_is_its_part_of_the_whole_table(case: Case, data: st.DataObject) -> None:
    owners = data.draw(homes(case.bucket.size))
    rank = data.draw(st.integers(0, 24))
    tables = [(link.copy(owners, case.layout), link.copy(owners, case.layout, rank))]
    tables.append((link.copy(case.layout, owners), link.copy(case.layout, owners, rank)))
    tables.append((link.reduce(case.layout, owners), link.reduce(case.layout, owners, rank)))
    tables.append((link.hand_on(owners), link.hand_on(owners, rank)))
    for table, share in tables:
        expected = table.where((table.src == rank) | (table.dst == rank))
        for name in ("src", "dst", "lo", "hi", "src_at", "dst_at"):
            assert np.array_equal(getattr(expected, name), getattr(share, name))


def test_native_collectives_are_recognised() -> None:
    bucket, kinds = norm_of(24), {"norm": REPLICA}
    everyone = propagation(bucket, [(5,), (2,), (3,)], kinds)
    even = home(24, [2, 3, 5])
    assert link.is_all_gather(even, everyone)
    assert link.is_reduce_scatter(everyone, even)
    assert link.is_all_gather(even, propagation(bucket, [(2, 5, 3)], kinds))  # replicas gather, but do not add up
    assert not link.is_reduce_scatter(propagation(bucket, [(2, 5, 3)], kinds), even)


@pytest.mark.parametrize(
    "owners",
    [
        home(24, [3, 2, 5]),
        home(24, [2, 3, 5], shares=[1, 1, 2], align=2),
        home(24, [2, 3]),
        home(24, [2, 3, 4]),
        home(24, [2, 3, 5, 6]),
    ],
    ids=["order", "shares", "fewer", "others", "more"],
)
def test_other_homes_are_not_native(owners: Layout) -> None:
    everyone = propagation(norm_of(24), [(2,), (3,), (5,)], {})
    assert not link.is_all_gather(owners, everyone)
    assert not link.is_reduce_scatter(everyone, owners)


def test_first_owners_of_equal_shares_add_up_as_if_there_were_no_second() -> None:
    everyone, twice = propagation(norm_of(24), [(2,), (3,), (5,)], {}), home(24, [2, 3, 5], copies=2)
    assert link.is_reduce_scatter(everyone, twice)
    assert not link.is_all_gather(twice, everyone)


def test_tensor_parallel_stages_are_not_native() -> None:
    bucket = Bucket("w", (Parameter("w", (24,), rule=ShardRule(0, (24,))),), ("w",))
    split = propagation(bucket, [(0, 1), (2,)], {})
    assert not link.is_all_gather(home(24, [0, 1, 2]), split)
    assert not link.is_reduce_scatter(split, home(24, [0, 1, 2]))


def test_slices_of_one_rank_and_counts() -> None:
    slices = link.copy(home(16, [0, 1]), propagation(norm_of(16), [(0,), (2,)], {}))
    sends, receives = slices.of(0)
    assert (sends.dst.tolist(), receives.src.tolist()) == ([0, 2], [0, 1])
    assert (len(slices), slices.elements, slices.travelling.elements) == (4, 32, 24)
    with pytest.raises(ValueError, match="read-only"):
        slices.lo[0] = 1


def test_the_example_of_the_module() -> None:
    source = Layout(
        rank=np.array([0, 1, 2]),
        lo=np.array([0, 4, 0]),
        hi=np.array([4, 8, 8]),
        at=np.zeros(3, np.int64),
        copy=np.zeros(3, np.int64),
        partial=np.ones(3, bool),
        size=8,
    )
    needed = Layout(
        rank=np.array([3]),
        lo=np.array([2]),
        hi=np.array([6]),
        at=np.array([0]),
        copy=np.array([0]),
        partial=np.ones(1, bool),
        size=8,
    )
    cells = link.cells_of(source.lo, source.hi, 8)
    assert cells.ends.tolist() == [0, 4, 8]
    assert [cells.rows[a:b].tolist() for a, b in zip(cells.first[:2], cells.first[1:3], strict=True)] == [
        [0, 2],
        [1, 2],
    ]
    pairs = link._pairs(source, needed, np.zeros(3, np.int64), None, needed.rank)
    found = pairs.slices
    assert list(zip(found.src, found.dst, found.lo, found.hi, strict=True)) == [
        (0, 3, 2, 4),
        (2, 3, 2, 4),
        (1, 3, 4, 6),
        (2, 3, 4, 6),
    ]
    slices = link.copy(source, needed)
    assert (slices.src.tolist(), slices.dst.tolist(), slices.lo.tolist(), slices.hi.tolist()) == ([2], [3], [2], [6])

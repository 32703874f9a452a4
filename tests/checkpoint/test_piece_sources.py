"""Fetch plans against brute force: every element that is needed, once, from the nearest place that has it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.checkpoint.piece_sources import PiecePlace, PieceRead, StatePiece, StorageTier, fetch_plan
from hydragraph.ir.layout import Layout, home, propagation
from hydragraph.ir.parameter import Bucket, Parameter, ShardRule

SIZE = 12
BUCKET = Bucket("layer.0", (Parameter("w", (6, 2), (), ShardRule(0, (6,))),), ("layer.0",))


@st.composite
def needs(draw: st.DrawFn, ranks: int) -> Layout:
    """Draw what ranks need: a home, or stages of any tensor-parallel degrees."""
    if draw(st.booleans()):
        shares = draw(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=ranks, max_size=ranks).filter(any))
        return home(SIZE, range(ranks), shares, align=1)
    order = draw(st.permutations(range(ranks)))
    cut = sorted(draw(st.lists(st.integers(0, ranks), max_size=2)))
    stages = [tuple(order[lo:hi]) for lo, hi in itertools.pairwise([0, *cut, ranks]) if 0 < hi - lo <= 6]
    return propagation(BUCKET, stages, {})


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[PiecePlace, list[StatePiece]], list[int], Layout]:
    ranks = draw(st.integers(1, 4))
    nodes = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
    ends = st.lists(st.integers(1, SIZE - 1), max_size=3, unique=True)
    cuts = [[0, *sorted(draw(ends)), SIZE] for _ in range(2)]  # of two owners of everything
    pieces = [StatePiece("layer.0", lo, hi) for cut in cuts for lo, hi in itertools.pairwise(cut)]
    some = st.lists(st.sampled_from(pieces), unique=True)
    held = {PiecePlace(StorageTier.MEMORY, (rank,)): draw(some) for rank in range(ranks)}
    for node in set(nodes):
        held[PiecePlace(StorageTier.DISK, tuple(r for r in range(ranks) if nodes[r] == node))] = draw(some)
    held[PiecePlace(StorageTier.STORE, tuple(range(ranks)))] = draw(st.sampled_from([pieces, pieces, []]) | some)
    return held, nodes, draw(needs(ranks))


def nearest(
    held: dict[PiecePlace, list[StatePiece]], nodes: list[int], rank: int, element: int
) -> tuple[int, int] | None:
    """Return how near the nearest place is that has an element: (how far, tier), by trying all of them."""
    found = []
    for place, pieces in held.items():
        if any(piece.lo <= element < piece.hi for piece in pieces):
            here = any(nodes[other] == nodes[rank] for other in place.ranks)
            far = (
                3
                if place.tier is StorageTier.STORE
                else 0
                if place == PiecePlace(StorageTier.MEMORY, (rank,))
                else 1
                if here
                else 2
            )
            found.append((far, int(place.tier)))
    return min(found, default=None)


@given(worlds())
def test_every_need_is_read_once_from_the_nearest_place(
    world: tuple[dict[PiecePlace, list[StatePiece]], list[int], Layout],
) -> None:
    held, nodes, layout = world
    wanted = {
        (rank, element)
        for rank, lo, hi in zip(layout.rank.tolist(), layout.lo.tolist(), layout.hi.tolist(), strict=True)
        for element in range(lo, hi)
    }
    best = {each: nearest(held, nodes, *each) for each in wanted}
    if None in best.values():
        with pytest.raises(ValueError, match=r"elements \[\d+, \d+\) of bucket layer.0, which rank \d needs"):
            fetch_plan(held, nodes, {"layer.0": layout})
        return
    plan = fetch_plan(held, nodes, {"layer.0": layout})
    got = Counter((rank, e) for fetch in plan for rank in fetch.receivers for e in range(fetch.lo, fetch.hi))
    assert got == Counter(wanted)
    for fetch in plan:
        assert any(
            fetch.piece in pieces and place.tier is fetch.tier and fetch.reader in place.ranks
            for place, pieces in held.items()
        ), "a reader reads what lies where it can read"
        assert fetch.piece.lo <= fetch.lo < fetch.hi <= fetch.piece.hi
        for rank in fetch.receivers:
            far, tier = best[rank, fetch.lo]  # pyrefly: ignore[not-iterable]
            assert (far, tier) == (_far(fetch, nodes, rank), fetch.tier)
    for tier in (
        StorageTier.STORE,
        StorageTier.DISK,
    ):  # once by a node, what is needed there; of its disk, for others too
        for node in set(nodes):
            read = [e for f in plan if f.tier is tier and nodes[f.reader] == node for e in range(f.lo, f.hi)]
            here = {e for (rank, e), there in best.items() if nodes[rank] == node and there in ((3, tier), (1, tier))}
            assert here <= set(read)
            if tier is StorageTier.STORE:
                assert sorted(read) == sorted(here)


def _far(fetch: PieceRead, nodes: list[int], rank: int) -> int:
    if fetch.tier is StorageTier.STORE:
        return 3
    own = fetch.tier is StorageTier.MEMORY and fetch.reader == rank
    return 0 if own else 1 if nodes[fetch.reader] == nodes[rank] else 2


def test_what_is_read_once_serves_all() -> None:
    """One node's disk has everything, the other node has no files, and both need the state."""
    held = {
        PiecePlace(StorageTier.DISK, (0,)): [StatePiece("layer.0", 0, SIZE)],
        PiecePlace(StorageTier.STORE, (0, 1)): [],
    }
    plan = fetch_plan(held, [0, 1], {"layer.0": home(SIZE, [0, 1], [1, 1], 2, 1)})
    assert [(fetch.reader, fetch.receivers, fetch.size) for fetch in plan] == [(0, (0, 1), SIZE)]


def test_reads_are_shared_by_those_who_could() -> None:
    """Two ranks of one node need no common pieces; a third rank, elsewhere, needs pieces that both could send."""
    pieces = [StatePiece("layer.0", at, at + 1) for at in range(SIZE)]
    held = {PiecePlace(StorageTier.DISK, (0, 1)): pieces}
    layout = home(SIZE, [2], align=1)
    plan = fetch_plan(held, [0, 0, 1], {"layer.0": layout})
    assert Counter(fetch.reader for fetch in plan) == {0: SIZE // 2, 1: SIZE // 2}


def test_neighbours_of_one_piece_are_one_read() -> None:
    held = {PiecePlace(StorageTier.STORE, (0, 1)): [StatePiece("layer.0", 0, SIZE)]}
    plan = fetch_plan(held, [0, 0], {"layer.0": home(SIZE, [0, 1], align=1)})
    assert [(fetch.reader, fetch.lo, fetch.hi) for fetch in plan] == [(0, 0, 6), (1, 6, 12)]

"""The order in which pairs of ranks connect."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cluster.connecting import Pair, connecting_order, pairs
from hydragraph.passes.pipeline import rank_programs
from hydragraph.spec.strategy import Strategy
from tests.passes.test_pipeline import model

RANKS = 12


def rounds(chosen: set[Pair]) -> int:
    """Connect as ranks do: each waits at the first pair that it has yet to connect; return after how many rounds."""
    left = {r: sorted((p for p in chosen if r in p), key=connecting_order) for r in range(RANKS)}
    count = 0
    while any(left.values()):
        met = {queue[0] for queue in left.values() if queue and all(left[r][0] == queue[0] for r in queue[0])}
        assert met, f"deadlock: {left}"
        for queue in left.values():
            queue[:] = [pair for pair in queue if pair not in met]
        count += 1
    return count


@given(st.sets(st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1)).filter(lambda p: p[0] != p[1])))
def test_ranks_that_connect_in_order_never_deadlock(chosen: set[Pair]) -> None:
    assert rounds(chosen) <= len(chosen)


def test_a_chain_of_stages_connects_in_four_rounds() -> None:
    chain = {(i, i + 1) for i in range(RANKS - 1)}
    assert rounds(chain | {(high, low) for low, high in chain}) == 4


def test_both_ends_find_a_pair_in_their_programs() -> None:
    programs = rank_programs(model(4), Strategy.parse("<[0,1]x2,[4,2]x2> + <[5]x3,[3]x1>", 4), [3, 2], ranks=6)
    found = [pairs(program) for program in programs]
    every = set().union(*found)
    assert (5, 3) in every
    assert all(found[rank] == {pair for pair in every if rank in pair} for rank in range(6))

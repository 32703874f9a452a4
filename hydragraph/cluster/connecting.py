"""Order in which pairs of ranks connect."""

from __future__ import annotations

from hydragraph.ir.instruction import Op
from hydragraph.ir.rank_program import RankProgram

Pair = tuple[int, int]  # (sender, receiver)


def pairs(program: RankProgram) -> set[Pair]:
    rank = program.rank
    sends = {(rank, i.peer) for i in program.instructions if i.op is Op.SEND and i.peer is not None}
    return sends | {(i.peer, rank) for i in program.instructions if i.op is Op.RECEIVE and i.peer is not None}


def connecting_order(pair: Pair) -> tuple[int, int, int, bool]:
    """Return a pair's sort key, which lets many pairs connect in parallel.

    Pairs at distance d form chains i, i + d, i + 2 d, ...; each chain's 1st, 3rd, 5th, ... pairs come first.

        8 ranks, distance 1      (0, 1) (2, 3) (4, 5) (6, 7), then (1, 2) (3, 4) (5, 6)
    """
    low, high = sorted(pair)
    distance = high - low
    return distance, low // distance % 2, low, pair[0] > pair[1]

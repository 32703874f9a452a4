"""Choice of the rank that reads each checkpoint piece for a node, and of the place to read from.

    nearest place         readers of a piece, for each node that needs it
    memory of the node    each rank that has and needs it; for other ranks, one rank that has it
    disk of the node      one rank that needs it
    another node          one rank of that node, from memory before disk
    only the store        one rank that needs it

The reader sends the piece to the node's other ranks that need it. Of equally near ranks, the one with the least to read
is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

from hydragraph.ir.layout import Layout


class StorageTier(IntEnum):
    MEMORY = 0
    DISK = 1
    STORE = 2


@dataclass(frozen=True, order=True)
class StatePiece:
    """Elements [lo, hi) of a bucket's weights and optimizer state, as written by one owner."""

    bucket: str
    lo: int
    hi: int


@dataclass(frozen=True)
class PiecePlace:
    tier: StorageTier
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class PieceRead:
    """A read of elements [lo, hi) of a bucket, which the ranks `receivers` (ascending) need."""

    reader: int
    tier: StorageTier
    piece: StatePiece
    lo: int
    hi: int
    receivers: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.hi - self.lo


def fetch_plan(
    held: Mapping[PiecePlace, Sequence[StatePiece]], nodes: Sequence[int], needed: Mapping[str, Layout]
) -> list[PieceRead]:
    """Plan which rank reads which elements from which place; all ranks compute the same plan.

    Returns:
        Reads in order of buckets and elements; a rank receives each element once.
    """
    # load: elements that each rank reads; places: piece -> its places;
    #   by_bucket: sorted pieces
    load = [0] * len(nodes)
    places: dict[StatePiece, list[PiecePlace]] = {}
    for place, there in held.items():
        for piece in there:
            places.setdefault(piece, []).append(place)
    by_bucket: dict[str, list[StatePiece]] = {}
    for piece in sorted(places):
        by_bucket.setdefault(piece.bucket, []).append(piece)
    plan: list[PieceRead] = []
    # Index in `plan` of a read that can be extended
    open_at: dict[tuple[object, ...], int] = {}
    for bucket, layout in needed.items():
        pieces = by_bucket.get(bucket, [])
        # Elements between two marks are in the same pieces, and the same ranks need them.
        marks = {*layout.lo.tolist(), *layout.hi.tolist(), *(edge for piece in pieces for edge in (piece.lo, piece.hi))}
        for lo, hi in pairwise(sorted(marks)):
            needing = tuple(sorted(set(layout.rank[(layout.lo <= lo) & (hi <= layout.hi)].tolist())))
            having = {piece: places[piece] for piece in pieces if piece.lo <= lo and hi <= piece.hi}
            for fetch in _fetches(having, nodes, load, bucket, lo, hi, needing):
                load[fetch.reader] += fetch.size
                key = (fetch.reader, fetch.tier, fetch.piece, fetch.receivers, lo)
                at = open_at.pop(key, len(plan))
                if at == len(plan):
                    plan.append(fetch)
                plan[at] = replace(plan[at], hi=hi)
                open_at[(*key[:-1], hi)] = at
    return plan


def _fetches(
    having: Mapping[StatePiece, Sequence[PiecePlace]],
    nodes: Sequence[int],
    load: Sequence[int],
    bucket: str,
    lo: int,
    hi: int,
    needing: Sequence[int],
) -> Iterator[PieceRead]:
    # reach: rank -> nearest place that it can read, and the piece there
    reach: dict[int, tuple[StorageTier, StatePiece]] = {}
    for piece, places in having.items():
        for place in places:
            for rank in place.ranks:
                reach[rank] = min(reach.get(rank, (place.tier, piece)), (place.tier, piece))
    # reads: reader -> ranks that receive its data
    reads: dict[int, list[int]] = {}
    own = [rank for rank in needing if rank in reach and reach[rank][0] is StorageTier.MEMORY]
    for rank in own:
        reads[rank] = [rank]
    # Nodes with a copy come first: they can send it to other nodes.
    left = sorted({nodes[rank] for rank in needing if rank not in own}, key=lambda node: not _on(node, reach, nodes))
    for node in left:
        receivers = [rank for rank in needing if rank not in own and nodes[rank] == node]

        def cost(rank: int, node: int = node, receivers: Sequence[int] = receivers) -> tuple[int, ...]:
            tier = reach[rank][0]
            near = nodes[rank] == node
            # From this node's disk or the store, prefer readers that need the data.
            helps = (
                rank not in receivers
                if tier is not StorageTier.MEMORY and (near or tier is StorageTier.STORE)
                else False
            )
            # The least tuple wins, and False < True: avoid the store, then other nodes, far
            # places, readers without a need, new readers, and readers with more to read.
            return (tier is StorageTier.STORE, not near, tier, helps, rank not in reads, load[rank], rank)

        reader = min(reach, key=cost, default=None)
        if reader is None:
            raise ValueError(
                f"no memory, disk or store holds elements [{lo}, {hi}) of bucket {bucket}, which rank {receivers[0]}"
                " needs: also keep checkpoints in a store, or keep more copies of the state"
            )
        reads.setdefault(reader, []).extend(receivers)
    for reader, receivers in reads.items():
        yield PieceRead(reader, *reach[reader], lo, hi, tuple(sorted(receivers)))


def _on(node: int, reach: Mapping[int, tuple[StorageTier, StatePiece]], nodes: Sequence[int]) -> bool:
    return any(nodes[rank] == node and tier is not StorageTier.STORE for rank, (tier, _) in reach.items())

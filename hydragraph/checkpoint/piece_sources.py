"""Which piece of a checkpoint comes from where: from memory, a node's disk, a peer, or the store, in this order.

A checkpoint in pieces has one piece per bucket and home interval of those who wrote it. Whatever the ranks are that
read it, and however they cut what they need (tensor-parallel degrees up, down or the same, other homes), a need is an
interval of a bucket, and a piece another: what both have in common is read.

    the node that needs it   what is read, by whom                                        read once per
    a rank has it in memory  its memory, by itself, for all of the node that need it      rank that has it and needs it
    its disk has it          the disk, by one of those who need it, for all of the node   node
    another node has it      memory before disk, by a rank there                          node that needs it
    only the store has it    the store, by one of those who need it, for all of the node  node

What a rank has read it sends to all whom it serves, on its node and elsewhere. Among readers that are equally near, the
one that has the least to read so far is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

import numpy as np

from hydragraph.ir.layout import Bools, Layout


class Tier(IntEnum):
    """Where a piece lies; nearer ones first."""

    MEMORY = 0  # of a rank's process
    DISK = 1  # of a node
    STORE = 2  # that all reach


@dataclass(frozen=True, order=True)
class Piece:
    """Elements [lo, hi) of a bucket, in everything that there is per element, as one owner wrote them."""

    bucket: str
    lo: int
    hi: int


@dataclass(frozen=True)
class Place:
    """Something that holds pieces.

    Attributes:
        tier: what it is.
        ranks: who can read it, without asking another.
    """

    tier: Tier
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Holdings:
    """Who holds what of one checkpoint.

    Attributes:
        places: of the ranks that are left; lost ones' memories and nodes' disks are not among them.
        pieces: that there are.
        bitmap: [places, pieces]: whether a place holds a piece.
    """

    places: tuple[Place, ...]
    pieces: tuple[Piece, ...]
    bitmap: Bools

    @staticmethod
    def of(held: Mapping[Place, Sequence[Piece]]) -> Holdings:
        """Make the bitmap of what each place says it holds."""
        places = tuple(held)
        pieces = tuple(sorted({piece for those in held.values() for piece in those}))
        number = {piece: i for i, piece in enumerate(pieces)}
        bitmap = np.zeros((len(places), len(pieces)), bool)
        for row, place in enumerate(places):
            bitmap[row, [number[piece] for piece in held[place]]] = True
        return Holdings(places, pieces, bitmap)


@dataclass(frozen=True)
class Fetch:
    """Elements [lo, hi) of a bucket that one rank reads, for itself or for others.

    Attributes:
        reader: who reads.
        tier: where.
        piece: what they are a part of.
        lo, hi: the elements.
        receivers: who needs them, ascending.
    """

    reader: int
    tier: Tier
    piece: Piece
    lo: int
    hi: int
    receivers: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return self.hi - self.lo


def fetch_plan(holdings: Holdings, nodes: Sequence[int], needed: Mapping[str, Layout]) -> list[Fetch]:
    """Say who reads what from where; a pure function, so that all ranks come to the same.

    Args:
        holdings: who holds what.
        nodes: by rank, the node it is on.
        needed: by bucket, which rank needs which elements.

    Returns:
        Reads in the order of buckets and elements; each rank receives whatever it needs exactly once.

    Raises:
        ValueError: nobody holds something that is needed: which elements of which bucket.
    """
    load = [0] * len(nodes)
    by_bucket: dict[str, list[int]] = {}
    for number, piece in enumerate(holdings.pieces):
        by_bucket.setdefault(piece.bucket, []).append(number)
    plan: list[Fetch] = []
    open_at: dict[tuple[object, ...], int] = {}  # where a read is that may go on
    for bucket, layout in needed.items():
        numbers = by_bucket.get(bucket, [])
        for lo, hi in _cells(layout, [holdings.pieces[number] for number in numbers]):
            needing = tuple(sorted(set(layout.rank[(layout.lo <= lo) & (hi <= layout.hi)].tolist())))
            having = [n for n in numbers if holdings.pieces[n].lo <= lo and hi <= holdings.pieces[n].hi]
            for fetch in _fetches(holdings, having, nodes, load, bucket, lo, hi, needing):
                load[fetch.reader] += fetch.size
                key = (fetch.reader, fetch.tier, fetch.piece, fetch.receivers, lo)
                at = open_at.pop(key, len(plan))
                if at == len(plan):
                    plan.append(fetch)
                plan[at] = replace(plan[at], hi=hi)
                open_at[(*key[:-1], hi)] = at
    return plan


def _cells(layout: Layout, pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Yield the intervals of a bucket within which needs and pieces are the same."""
    marks = {edge for piece in pieces for edge in (piece.lo, piece.hi)}
    yield from pairwise(sorted(marks.union(layout.lo.tolist(), layout.hi.tolist())))


def _fetches(
    holdings: Holdings,
    having: Sequence[int],
    nodes: Sequence[int],
    load: Sequence[int],
    bucket: str,
    lo: int,
    hi: int,
    needing: Sequence[int],
) -> Iterator[Fetch]:
    """Yield the reads of one cell, node by node of those who need it."""
    # By rank, the nearest place that it can read it from, and the piece there.
    reach: dict[int, tuple[Tier, int]] = {}
    for number in having:
        for row in np.flatnonzero(holdings.bitmap[:, number]).tolist():
            place = holdings.places[row]
            for rank in place.ranks:
                reach[rank] = min(reach.get(rank, (place.tier, number)), (place.tier, number))
    reads: dict[int, list[int]] = {}  # reader -> who needs what it reads
    own = [rank for rank in needing if rank in reach and reach[rank][0] is Tier.MEMORY]
    for rank in own:
        reads[rank] = [rank]
    # A node that has it on its disk reads it in any case, and can send what it has read.
    left = sorted({nodes[rank] for rank in needing if rank not in own}, key=lambda node: not _on(node, reach, nodes))
    for node in left:
        receivers = [rank for rank in needing if rank not in own and nodes[rank] == node]

        def cost(rank: int, node: int = node, receivers: Sequence[int] = receivers) -> tuple[int, ...]:
            tier = reach[rank][0]
            near = nodes[rank] == node
            # Disks of the node and the store are read by who needs it.
            helps = rank not in receivers if tier is not Tier.MEMORY and (near or tier is Tier.STORE) else False
            return (tier is Tier.STORE, not near, tier, helps, rank not in reads, load[rank], rank)

        reader = min(reach, key=cost, default=None)
        if reader is None:
            raise ValueError(
                f"elements [{lo}, {hi}) of bucket {bucket}, which rank {receivers[0]} needs, are in no memory, on no"
                " disk and not in the store: keep checkpoints in a store too, or more copies of the state"
            )
        reads.setdefault(reader, []).extend(receivers)
    for reader, receivers in reads.items():
        tier, number = reach[reader]
        yield Fetch(reader, tier, holdings.pieces[number], lo, hi, tuple(sorted(receivers)))


def _on(node: int, reach: Mapping[int, tuple[Tier, int]], nodes: Sequence[int]) -> bool:
    """Say whether a node has it on its disk, or in a memory of its own."""
    return any(nodes[rank] == node and tier is not Tier.STORE for rank, (tier, _) in reach.items())

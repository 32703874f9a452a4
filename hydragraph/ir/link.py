"""Links: slices that ranks send to convert one layout of a bucket into another (values: `copy`, gradients: `reduce`).

Ranks of the *source* layout send to ranks of the *target* layout. Bounds of source intervals divide the elements into
*cells*: a rank stores all of a cell or none. Target intervals are also cut at these bounds, and each piece gets a
sender (as in Hydraulis, section 5.2, but for uneven shards).

Symbols, with the lengths of arrays:

    line           [source rows]  each interval's line: line i is the range [i * size, (i + 1) * size). Values use one
                                  line. Gradients use one line per copy, because all copies contribute
    ends           [cells + 1]    cell c is [ends[c], ends[c + 1])
    first, rows                   source rows that store cell c: rows[first[c] : first[c + 1]]
    row, lo, hi    [T]            the target's intervals, repeated on each line
    item, cell     [S]            slices: intersections of a target interval (index into T) and a cell
    holders        [S]            number of each slice's candidate senders
    turn           [S]            round-robin number, to choose among candidates of equal cost
    piece, holder  [P]            pairs of a slice (index into S) and a candidate (source row)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from hydragraph.ir.layout import Bools, Ints, Layout

# Minimum elements of a piece; maximum pieces of a bucket
_PIECE, _PIECES = 1024, 64


@dataclass(frozen=True, eq=False)
class Slices:
    """Slices between two layouts, sorted by (dst, src, lo). Arrays are 1-D and read-only.

    A slice copies elements [lo, hi) from rank `src` to rank `dst`, possibly the same. In local buffers, they start at
    `src_at` and `dst_at`.
    """

    src: Ints
    dst: Ints
    lo: Ints
    hi: Ints
    src_at: Ints
    dst_at: Ints

    def __post_init__(self) -> None:
        for array in self._columns():
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.src)

    @property
    def elements(self) -> int:
        return int((self.hi - self.lo).sum())

    @property
    def leaving(self) -> Bools:
        leaving: Bools = self.src != self.dst
        return leaving

    @property
    def travelling(self) -> Slices:
        return self.where(self.leaving)

    def of(self, rank: int) -> tuple[Slices, Slices]:
        """Return the slices that a rank sends and receives, both with local copies."""
        return self.where(self.src == rank), self.where(self.dst == rank)

    def where(self, rows: Bools | Ints) -> Slices:
        return Slices(*(column[rows] for column in self._columns()))

    def _columns(self) -> tuple[Ints, ...]:
        return self.src, self.dst, self.lo, self.hi, self.src_at, self.dst_at


def copy(source: Layout, target: Layout, rank: int | None = None) -> Slices:
    """Return the slices of values that cover every target interval exactly once.

    A rank that stores the values copies them locally. Otherwise, the nearest rank (by number) that stores them sends
    them, but ranks on the same node come first. Equally near ranks take turns.

    Args:
        rank: if given, return only this rank's slices, which is faster.

    Raises:
        ValueError: the sizes differ, or the source does not store a needed element.
    """
    pairs = _pairs(source, target, np.zeros_like(source.copy), rank, target.rank)
    return _slices(pairs, _one(pairs, _distance(pairs.slices, source.nodes)), rank)


def move(source: Layout, target: Layout, rank: int | None = None) -> Slices:
    """Return slices like `copy`, but divide intervals over all of the nearest ranks that store them.

    The receiver itself is nearest, then ranks on its node, then all other ranks.
    """
    # Cut source intervals, so that several ranks can send parts of one.
    pieces = np.arange(0, max(source.size, 1), max(_PIECE, source.size // _PIECES), dtype=np.int64)
    parts = source.within(pieces, np.append(pieces[1:], source.size))
    pairs = _pairs(parts, target, np.zeros_like(parts.copy), rank, target.rank)
    nodes = source.nodes
    # cost: 0 for the receiver itself, 1 for other ranks, 2 on another node.
    cost = pairs.slices.leaving.astype(np.int64)
    if nodes is not None:
        cost += cost * (nodes[pairs.slices.src] != nodes[pairs.slices.dst])
    return _slices(pairs, _one(pairs, cost), rank)


def _distance(pairs: Slices, nodes: Ints | None) -> Ints:
    distance: Ints = np.abs(pairs.src - pairs.dst)
    if nodes is None:
        return distance
    # New ranks' nodes are unknown. Ranks on other nodes are farther than all on the node.
    target_has_node = pairs.dst < len(nodes)
    apart = ~target_has_node | (nodes[pairs.src] != nodes[np.where(target_has_node, pairs.dst, 0)])
    return np.where(apart, distance + int(distance.max(initial=0)) + 1, distance)


def reduce(source: Layout, target: Layout, rank: int | None = None) -> Slices:
    """Return the slices of gradients that the target's first owners must sum.

    Every rank sends its PARTIAL intervals. A REPLICA interval is sent by one rank per copy: the owner if possible, or
    the ranks in turn.

    Raises:
        ValueError: the sizes differ, or one of the source's copies does not hold a needed element.
    """
    # One line per copy: gradients of copies are summed, so each copy sends every element.
    lines = np.unique(source.copy, return_inverse=True)[1]
    pairs = _pairs(source, target.first, lines, rank, target.first.rank)
    return _slices(pairs, pairs.partial | _one(pairs, pairs.slices.leaving.astype(np.int64)), rank)


def hand_on(owners: Layout, rank: int | None = None) -> Slices:
    """Return the slices of gradient sums that first owners send to second owners."""
    return copy(owners.first, owners.second, rank)


def stays(source: Layout, target: Layout) -> bool:
    """Return whether `copy` moves no values between ranks."""
    return {*target.ranks} <= {*source.ranks} and _local(partial(copy, source, target), target.ranks)


def sums_stay(source: Layout, target: Layout) -> bool:
    """Return whether `reduce` moves no gradients between ranks."""
    owners = target.first.ranks
    return {*owners} <= {*source.ranks} and _local(partial(reduce, source, target), owners)


def _local(link: Callable[[int | None], Slices], ranks: Sequence[int]) -> bool:
    # Try one rank first: fast, and usually finds a slice between two ranks.
    return all(not len(link(rank).travelling) for rank in (*ranks[:1], None))


def is_all_gather(source: Layout, target: Layout) -> bool:
    """Return whether `copy` is the native all-gather over `source.ranks`."""
    return _equal_shards(source) and _whole_everywhere(target) and np.array_equal(source.rank, target.rank)


def is_reduce_scatter(source: Layout, target: Layout) -> bool:
    """Return whether `reduce` is the native reduce-scatter over `target.ranks`."""
    target = target.first
    # Ranks of a copy may have equal gradients (REPLICA), which a reduce-scatter would sum.
    own_copies = len(np.unique(source.copy)) == len(source.copy)
    same_ranks = np.array_equal(source.rank, target.rank)
    return _equal_shards(target) and _whole_everywhere(source) and own_copies and same_ranks


def _equal_shards(layout: Layout) -> bool:
    n = len(layout.rank)
    if n == 0 or layout.size % n:
        return False
    shard = layout.size // n
    starts = np.arange(n) * shard
    one_each = bool((np.diff(layout.rank) > 0).all())
    return one_each and np.array_equal(layout.lo, starts) and np.array_equal(layout.hi, starts + shard)


def _whole_everywhere(layout: Layout) -> bool:
    one_each = bool((np.diff(layout.rank) > 0).all())
    return one_each and bool((layout.lo == 0).all() and (layout.hi == layout.size).all())


class SourceCells(NamedTuple):
    """Cells of a source (see the module docstring)."""

    ends: Ints
    first: Ints
    rows: Ints


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a slice and a candidate sender. Each slice's pairs begin at `start`."""

    slices: Slices
    partial: Bools
    piece: Ints
    start: Ints
    turn: Ints


def _ragged(counts: Ints) -> tuple[Ints, Ints]:
    """Return each item's group and index: counts [2, 0, 1] yield [0, 0, 2] and [0, 1, 0]."""
    group = np.repeat(np.arange(len(counts)), counts)
    return group, np.arange(len(group)) - (np.cumsum(counts) - counts)[group]


def cells_of(lo: Ints, hi: Ints, end: int) -> SourceCells:
    """Split [0, end) into cells where intervals start or end."""
    # Intervals [0, 4) and [2, 6): ends [0, 2, 4, 6]. Intervals 0, then 0 and 1, then 1 store the
    # cells: first [0, 1, 3, 4, 4], rows [0, 0, 1, 1].
    ends = np.unique(np.concatenate((np.array([0, end]), lo, hi)))
    begin = np.searchsorted(ends, lo)
    row, place = _ragged(np.searchsorted(ends, hi) - begin)
    cell = begin[row] + place
    first = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.bincount(cell, minlength=len(ends)))))
    return SourceCells(ends, first, row[np.argsort(cell, kind="stable")])


def _pairs(source: Layout, target: Layout, line: Ints, rank: int | None, turns: Ints) -> _Pairs:
    size = source.size
    lines = int(line.max(initial=0)) + 1
    if size != target.size:
        raise ValueError(f"link: the source has {size} elements, the target {target.size}: use one bucket's layouts")
    cells = cells_of(source.lo + line * size, source.hi + line * size, lines * size)
    row, lo, hi = _targets(source, target, line, lines, rank)

    # Slices: cut target intervals at ends of cells. head: first cell of each interval.
    head = np.searchsorted(cells.ends, lo, "right") - 1
    item, place = _ragged(np.searchsorted(cells.ends, hi) - head)
    row = row[item]
    cell = head[item] + place
    lo = np.maximum(cells.ends[cell], lo[item])
    hi = np.minimum(cells.ends[cell + 1], hi[item])

    # Every needed cell must have a sender.
    holders = cells.first[cell + 1] - cells.first[cell]
    if not holders.all():
        i = int(np.argmin(holders))
        raise ValueError(
            f"link: elements [{lo[i] % size}, {(hi[i] - 1) % size + 1}), which rank {target.rank[row[i]]} needs, are"
            " missing from the source layout: add a rank that has them, use two home copies, or load a checkpoint"
        )
    # Turns are independent of slices' indices, so all ranks choose the same senders.
    turn = turns[row] + cell

    # Pairs: repeat slices for their candidates; convert positions on lines to positions in the
    # bucket and in both buffers.
    piece, place = _ragged(holders)
    holder = cells.rows[cells.first[cell[piece]] + place]
    row = row[piece]
    lo = lo[piece] - line[holder] * size
    hi = hi[piece] - line[holder] * size
    src_at = source.at[holder] + lo - source.lo[holder]
    dst_at = target.at[row] + lo - target.lo[row]
    slices = Slices(source.rank[holder], target.rank[row], lo, hi, src_at, dst_at)
    return _Pairs(slices, source.partial[holder], piece, np.cumsum(holders) - holders, turn)


def _targets(source: Layout, target: Layout, line: Ints, lines: int, rank: int | None) -> tuple[Ints, Ints, Ints]:
    row = np.tile(np.arange(len(target.rank)), lines)
    shift = np.arange(lines)[:, None] * source.size
    lo = (target.lo + shift).ravel()
    hi = (target.hi + shift).ravel()
    if rank is None:
        return row, lo, hi
    concerned = target.rank[row] == rank
    mine = source.rank == rank
    if mine.any():
        # `_slices` drops slices in gaps between the rank's intervals.
        begin = source.lo[mine] + line[mine] * source.size
        end = source.hi[mine] + line[mine] * source.size
        concerned |= (lo < end.max()) & (hi > begin.min())
    return row[concerned], lo[concerned], hi[concerned]


def _one(pairs: _Pairs, cost: Ints) -> Bools:
    # Slices have one candidate each: keep all pairs.
    if len(pairs.start) == len(cost):
        return np.ones(len(cost), bool)
    cheapest = cost == np.minimum.reduceat(cost, pairs.start)[pairs.piece]
    # before: number of cheapest pairs before each pair. Choose number turn % n of a slice's n
    # cheapest.
    before = np.cumsum(cheapest) - cheapest
    chosen_place = before[pairs.start] + pairs.turn % np.add.reduceat(cheapest.astype(np.int64), pairs.start)
    chosen: Bools = cheapest & (before == chosen_place[pairs.piece])
    return chosen


def _slices(pairs: _Pairs, kept: Bools, rank: int | None) -> Slices:
    if rank is not None:
        kept = kept & ((pairs.slices.src == rank) | (pairs.slices.dst == rank))
    chosen = pairs.slices.where(kept)
    chosen = chosen.where(np.lexsort((chosen.lo, chosen.src, chosen.dst)))
    # Merge slices of the same ranks that are adjacent in the bucket and both buffers.
    opens = np.ones(len(chosen), bool)
    opens[1:] = (np.diff(chosen.src) != 0) | (np.diff(chosen.dst) != 0) | (chosen.lo[1:] != chosen.hi[:-1])
    opens[1:] |= (np.diff(chosen.src_at - chosen.lo) != 0) | (np.diff(chosen.dst_at - chosen.lo) != 0)
    # A merged slice ends where its last part ends.
    return replace(chosen.where(opens), hi=chosen.hi[np.roll(opens, -1)])

"""Number of elements that each rank sends to each other rank in a link of two layouts, without making its slices.

The cost of an exchange depends only on these numbers, and a planner needs them for many layouts of many ranks. The
rules, symbols and worked example are those of `ir.link`: the same cells, with the same sender in each.

Example: of a bucket of 8, rank 0 owns [0, 4) and rank 1 [4, 8). Rank 1 needs all: `copied` is 4 from 0 to 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hydragraph.ir.layout import Ints, Layout
from hydragraph.ir.link import copy, reduce
from hydragraph.kernels.numba_compiler import compiled

_NEAREST, _OWN = range(2)  # how one of several possible senders is chosen: `_cost`


def copied(source: Layout, target: Layout, ranks: int) -> Ints:
    """Return the number of elements from each rank to each other rank in `link.copy(source, target)` [ranks, ranks].

    Raises:
        ValueError: as for `link.copy`.
    """
    nodes = np.zeros(ranks, np.int64)
    if source.nodes is not None:
        nodes = np.append(source.nodes, np.full(ranks, -2))[:ranks]  # ranks beyond the known ones are on another node
    line = np.zeros_like(source.copy)
    cells = _Cells.of(source, target, line, 1)
    sent = _sent(source.rank, source.partial, *_needed(target), cells, source.size, target.rank * 1, nodes, _NEAREST)
    if len(sent) and source.size == target.size:
        return np.asarray(sent)
    raise _refused(copy, source, target)


def reduced(source: Layout, target: Layout, ranks: int) -> Ints:
    """Return the number of elements from each rank to each other rank in `link.reduce(source, target)` [ranks, ranks].

    Raises:
        ValueError: as for `link.reduce`.
    """
    line = np.unique(source.copy, return_inverse=True)[1]
    lines = int(line.max(initial=0)) + 1
    nodes = np.zeros(ranks, np.int64)
    first = target.first
    cells = _Cells.of(source, first, line, lines)
    sent = _sent(source.rank, source.partial, *_needed(first), cells, source.size, first.rank * 1, nodes, _OWN)
    if len(sent) and source.size == target.size:
        return np.asarray(sent)
    raise _refused(reduce, source, target)


def handed_on(owners: Layout, ranks: int) -> Ints:
    """Return the number of elements from each rank to each other rank in `link.hand_on(owners)` [ranks, ranks]."""
    return copied(owners.first, owners.second, ranks)


class _Cells(NamedTuple):
    """The elements divided into C cells, at every beginning and end of a row of the source.

    All elements of a cell are held by the same rows.

    Attributes:
        ends: boundaries of the cells, as elements [C + 1].
        first: cell c has the holders `first[c]` to `first[c + 1] - 1` [C + 1].
        holders: the rows of the source that hold each cell, ascending.
        at: the cell in which each part of the target begins [lines, rows of the target].
    """

    ends: Ints
    first: Ints
    holders: Ints
    at: Ints

    @classmethod
    def of(cls, source: Layout, target: Layout, line: Ints, lines: int) -> _Cells:
        """Divide several copies of the elements.

        Args:
            line: number of the copy that each row of the source holds a part of [rows of the source].
            lines: number of copies.
        """
        size = source.size
        lo, hi = source.lo + line * size, source.hi + line * size
        ends = np.unique(np.concatenate(([0, lines * size], lo, hi)))
        begin, end = np.searchsorted(ends, lo), np.searchsorted(ends, hi)
        cells = np.concatenate([np.arange(*both) for both in zip(begin, end, strict=True)] or [begin])
        rows = np.repeat(np.arange(len(lo)), end - begin)
        counts = np.bincount(cells, minlength=len(ends) - 1)
        wanted = target.lo + size * np.arange(lines)[:, None]
        return cls(
            ends,
            np.concatenate(([0], np.cumsum(counts))),
            rows[np.argsort(cells, kind="stable")],
            np.searchsorted(ends, wanted, "right") - 1,
        )


def _needed(target: Layout) -> tuple[Ints, Ints, Ints]:
    return target.rank, target.lo, target.hi


def _refused(link: Any, source: Layout, target: Layout) -> ValueError:
    """Return the error of `ir.link` for layouts that it cannot link."""
    try:
        link(source, target)
    except ValueError as error:
        return error
    raise AssertionError("ir.link makes slices where none were counted")


@compiled
def _sent(
    source_rank: Ints,
    partial: Any,
    target_rank: Ints,
    target_lo: Ints,
    target_hi: Ints,
    cells: _Cells,
    size: int,
    turns: Ints,
    nodes: Ints,
    way: int,
) -> Ints:
    """Count elements by sender and receiver [ranks, ranks]; [0, 0] if no rank holds some needed element."""
    ranks = len(nodes)
    sent = np.zeros((ranks, ranks), np.int64)
    for number in range(cells.at.shape[0]):
        for item in range(len(target_rank)):
            receiver = target_rank[item]
            lo = target_lo[item] + number * size
            hi = target_hi[item] + number * size
            cell = cells.at[number, item]
            while cell < len(cells.ends) - 1 and cells.ends[cell] < hi:
                elements = min(hi, cells.ends[cell + 1]) - max(lo, cells.ends[cell])
                held = cells.holders[cells.first[cell] : cells.first[cell + 1]]
                if len(held) == 0:
                    return np.zeros((0, 0), np.int64)
                # One of the cheapest sends, in turn, in addition to all whose gradients are partial.
                best, equal = _cheapest(source_rank, held, receiver, nodes, way)
                turn = (turns[item] + cell) % equal
                for row in held:
                    sender = source_rank[row]
                    chosen = False
                    if _cost(sender, receiver, nodes, way) == best:
                        chosen = turn == 0
                        turn -= 1
                    if (chosen or (way != _NEAREST and partial[row])) and sender != receiver:
                        sent[sender, receiver] += elements
                cell += 1
    return sent


@compiled
def _cheapest(rank: Ints, held: Ints, receiver: int, nodes: Ints, way: int) -> tuple[int, int]:
    """Return the lowest cost among the holders of a cell, and how many have it."""
    best = _cost(rank[held[0]], receiver, nodes, way)
    equal = 1
    for row in held[1:]:
        cost = _cost(rank[row], receiver, nodes, way)
        if cost < best:
            best = cost
            equal = 1
        elif cost == best:
            equal += 1
    return best, equal


@compiled
def _cost(sender: int, receiver: int, nodes: Ints, way: int) -> int:
    """Return the cost that decides the sender: its distance (`link.copy`), or whether it is remote (`link.reduce`)."""
    if way == _NEAREST:
        return abs(sender - receiver) + int(nodes[sender] != nodes[receiver]) * 2 * len(nodes)
    return int(sender != receiver)

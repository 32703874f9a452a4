"""Number of elements that a link sends between ranks, computed without building slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hydragraph.ir.layout import Ints, Layout
from hydragraph.ir.link import Slices, SourceCells, cells_of, copy, reduce
from hydragraph.kernels.numba_compiler import compiled

# Preferred sender in `_cost`: the nearest rank, or the receiver itself
_NEAREST, _OWN = range(2)


def copied(source: Layout, target: Layout, ranks: int) -> Ints:
    """Return the number of elements that `link.copy` sends, as an array [senders, receivers]."""
    nodes = np.zeros(ranks, np.int64)
    if source.nodes is not None:
        # -2: unknown node
        nodes = np.append(source.nodes, np.full(ranks, -2))[:ranks]
    return _counted(copy, source, target, np.zeros_like(source.copy), nodes, _NEAREST)


def reduced(source: Layout, target: Layout, ranks: int) -> Ints:
    line = np.unique(source.copy, return_inverse=True)[1]
    return _counted(reduce, source, target.first, line, np.zeros(ranks, np.int64), _OWN)


def handed_on(owners: Layout, ranks: int) -> Ints:
    return copied(owners.first, owners.second, ranks)


def _counted(
    link: Callable[[Layout, Layout], Slices], source: Layout, target: Layout, line: Ints, nodes: Ints, way: int
) -> Ints:
    size = source.size
    lines = int(line.max(initial=0)) + 1
    cells = cells_of(source.lo + line * size, source.hi + line * size, lines * size)
    # at [lines, target rows]: first cell of each target interval.
    at = np.searchsorted(cells.ends, target.lo + size * np.arange(lines)[:, None], "right") - 1
    needed = (target.rank, target.lo, target.hi)
    sent = _sent(source.rank, source.partial, *needed, cells, at, size, target.rank * 1, nodes, way)
    if len(sent) and size == target.size:
        return np.asarray(sent)
    link(source, target)
    raise AssertionError("ir.link accepts layouts that ir.link_volume cannot count: report this bug")


@compiled
def _sent(
    source_rank: Ints,
    partial: Any,
    target_rank: Ints,
    target_lo: Ints,
    target_hi: Ints,
    cells: SourceCells,
    at: Ints,
    size: int,
    turns: Ints,
    nodes: Ints,
    way: int,
) -> Ints:
    ranks = len(nodes)
    sent = np.zeros((ranks, ranks), np.int64)
    for number in range(at.shape[0]):
        for item in range(len(target_rank)):
            receiver = target_rank[item]
            lo = target_lo[item] + number * size
            hi = target_hi[item] + number * size
            cell = at[number, item]
            while cell < len(cells.ends) - 1 and cells.ends[cell] < hi:
                elements = min(hi, cells.ends[cell + 1]) - max(lo, cells.ends[cell])
                holding_rows = cells.rows[cells.first[cell] : cells.first[cell + 1]]
                if len(holding_rows) == 0:
                    return np.zeros((0, 0), np.int64)
                # Choose number `turn` of `equal` cheapest. All holders of partial gradients send.
                best, equal = _cheapest(source_rank, holding_rows, receiver, nodes, way)
                turn = (turns[item] + cell) % equal
                for row in holding_rows:
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
    if way == _NEAREST:
        return abs(sender - receiver) + int(nodes[sender] != nodes[receiver]) * 2 * len(nodes)
    return int(sender != receiver)

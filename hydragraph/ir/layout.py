"""Layouts: which intervals of a bucket's flat state each rank stores, and how gradients are combined.

The flat state is the concatenation of a bucket's parameters. A tensor-parallel shard has one interval per parameter or
fused segment, a home shard one interval. Layouts have arrays with one entry per interval:

    rank     rank that stores the interval
    lo, hi   the interval [lo, hi) of the bucket, in elements
    at       start in the rank's local buffer
    copy     index of the state's copy
    partial  whether the gradients of a stage's ranks must be summed (PARTIAL) or are equal (REPLICA)

Example: a bucket has w [4, 2], with 2 rows each of q and k, and a norm n [3]. Two ranks of a stage store:

    rank 5   q [0, 2) at 0   k [4, 6) at 2   n [8, 11) at 4
    rank 6   q [2, 4) at 0   k [6, 8) at 2   n [8, 11) at 4
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hydragraph.ir.parameter import Bucket

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class GradientKind(Enum):
    # Gradients of all ranks are equal, so any is used
    REPLICA = "replica"
    # The gradients of all ranks are summed
    PARTIAL = "partial"


@dataclass(frozen=True, eq=False)
class Layout:
    """Assignment of a bucket's elements to ranks: one row per non-empty interval, sorted by rank and buffer position.

    A rank's buffer is the concatenation of its intervals. Arrays are 1-D, int64 (partial: bool) and read-only.

    Attributes:
        copy: in a `propagation` layout, the stage's index; in a home layout, 0 for *first owners*, which sum gradients,
            and 1 for *second owners*. Each copy has every element.
        nodes: node of each rank, or -1 if unknown; None if nodes do not matter.
    """

    rank: Ints
    lo: Ints
    hi: Ints
    at: Ints
    copy: Ints
    partial: Bools
    size: int
    nodes: Ints | None = None

    def __post_init__(self) -> None:
        for array in (self.rank, self.lo, self.hi, self.at, self.copy, self.partial):
            array.flags.writeable = False
        if self.nodes is not None:
            self.nodes.flags.writeable = False

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(np.unique(self.rank).tolist())

    def local_size(self, rank: int) -> int:
        mine = self.rank == rank
        return int((self.hi[mine] - self.lo[mine]).sum())

    def of(self, rank: int) -> Layout:
        return self._where(self.rank == rank)

    def without(self, ranks: Collection[int]) -> Layout:
        return self._where(~np.isin(self.rank, list(ranks)))

    def renamed(self, before: Sequence[int | None], nodes: Sequence[int] | None = None) -> Layout:
        """Return the layout with the rank numbers of a new world, without ranks that left.

        Args:
            before: old number of each new rank; None if it joined.
        """
        names = {old: new for new, old in enumerate(before) if old is not None}
        rank = np.array([names.get(old, -1) for old in self.rank.tolist()], np.int64)
        row = np.flatnonzero(rank >= 0)
        # A stable sort keeps each rank's buffer order.
        row = row[np.argsort(rank[row], kind="stable")]
        places = None if nodes is None else np.array(nodes, np.int64)
        return replace(self._where(row), rank=rank[row], nodes=places)

    def within(self, lo: Ints, hi: Ints) -> Layout:
        """Restrict the layout to disjoint intervals, without changing positions in buffers."""
        # low, high [rows, intervals]: intersections of rows and intervals.
        low = np.maximum(self.lo[:, None], lo)
        high = np.minimum(self.hi[:, None], hi)
        row, which = np.nonzero(low < high)
        low = low[row, which]
        high = high[row, which]
        at = self.at[row] + low - self.lo[row]
        return Layout(self.rank[row], low, high, at, self.copy[row], self.partial[row], self.size, self.nodes)

    @cached_property
    def first(self) -> Layout:
        """Rows of the first owners, at unchanged buffer positions."""
        return self if (self.copy == 0).all() else self._where(self.copy == 0)

    @cached_property
    def second(self) -> Layout:
        return self._where(self.copy != 0)

    @property
    def missing(self) -> tuple[Ints, Ints]:
        """Starts and ends of intervals that no rank stores, ascending."""
        # end[i]: end of the first i intervals (0 at first). begin[i]: start of the next.
        row = np.argsort(self.lo, kind="stable")
        end = np.maximum.accumulate(np.concatenate((np.zeros(1, np.int64), self.hi[row])))
        begin = np.append(self.lo[row], self.size)
        gap = np.flatnonzero(begin > end)
        return end[gap], begin[gap]

    def _where(self, rows: Bools | Ints) -> Layout:
        columns = {name: getattr(self, name)[rows] for name in ("rank", "lo", "hi", "at", "copy", "partial")}
        return replace(self, **columns)


def home(
    size: int,
    ranks: Sequence[int],
    shares: Sequence[float] | None = None,
    copies: int = 1,
    align: int = 8,
    nodes: Sequence[int] | None = None,
) -> Layout:
    """Make the home layout of a bucket. Each copy has one interval per rank, in the order of `ranks`.

    If shares are equal and the number of ranks divides `size`, intervals have equal lengths, as native collectives
    require. Otherwise, boundaries are multiples of `align`, and some ranks may get no elements of a small bucket.

    Args:
        ranks: distinct ranks, in any order.
        shares: one number per rank, at least 0 and not all 0, or None for equal shares. With two copies, a node with
            more than half of all shares owns one copy of every element.
        copies: 1, or 2 to give every element a second owner on another node. Then ranks of two nodes must have shares.
        nodes: each rank's node, or None if all ranks are on different nodes.
    """
    n = len(ranks)
    weights = np.ones(n) if shares is None else np.asarray(shares, float)
    owners = np.asarray(ranks, np.int64)
    if copies == 1:
        cuts = _cuts(size, weights, align)
        return _layout(owners, cuts[:-1], cuts[1:], np.zeros(n, np.int64), np.ones(n, bool), size)
    which, lo, hi, copy = _twice(size, weights, range(n) if nodes is None else nodes, align)
    rank = owners[which]
    # Sort each rank's intervals by element, so that its part of a parameter is contiguous.
    row = np.lexsort((lo, rank))
    layout = _layout(rank[row], lo[row], hi[row], copy[row], np.ones(len(row), bool), size)
    if nodes is None:
        return layout
    by_rank = np.full(max(ranks) + 1, -1, np.int64)
    by_rank[owners] = nodes
    return replace(layout, nodes=by_rank)


def _cuts(size: int, weights: npt.NDArray[np.float64], align: int) -> Ints:
    n = len(weights)
    if size % n == 0 and (weights == weights[0]).all():
        return np.arange(n + 1, dtype=np.int64) * (size // n)
    # Round each boundary, so that errors do not accumulate.
    ideal = size * (np.concatenate(([0.0], np.cumsum(weights))) / weights.sum())
    cuts: Ints = np.minimum(np.rint(ideal / align).astype(np.int64) * align, size)
    # The last rank with a share also gets the remainder, and later ranks get no elements. 20
    # elements, 3 equal ranks, align 8: cuts 0, 8, 16, 20.
    cuts[np.flatnonzero(weights)[-1] + 1 :] = size
    return cuts


def _twice(
    size: int, weights: npt.NDArray[np.float64], nodes: Sequence[int], align: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Split two copies of a bucket into intervals, the second shifted by half a bucket.

    A node's ranks are adjacent and own at most half of a copy, so no node owns an element twice.
    """
    # Keep a node's ranks together; order nodes by first rank.
    first = {node: i for i, node in reversed(list(enumerate(nodes)))}
    order = sorted(range(len(nodes)), key=lambda i: first[nodes[i]])
    # A rounded sum could exceed half of the total
    exact = [Fraction(float(weights[i])) for i in order]
    total = sum(exact)
    of_node: dict[int, Fraction] = {}
    for i, weight in zip(order, exact, strict=True):
        of_node[nodes[i]] = of_node.get(nodes[i], Fraction(0)) + weight
    # A node with over half of the shares gets half of each copy.
    largest = max(of_node, key=lambda node: of_node[node])
    # Ends of intervals, as fractions of the bucket
    ends = [Fraction(0)]
    for i, weight in zip(order, exact, strict=True):
        if 2 * of_node[largest] <= total:
            part = weight / total
        else:
            part = weight / (2 * (of_node[largest] if nodes[i] == largest else total - of_node[largest]))
        ends.append(ends[-1] + part)
    unit = 1 if size % len(nodes) == 0 and len(set(exact)) == 1 else align

    def cut(at: Fraction) -> int:
        # Equal rounding in both copies avoids overlaps.
        return min(round(at * size / unit) * unit, size) if at < 1 else size

    rows = [(i, cut(lo), cut(hi), 0) for i, lo, hi in zip(order, ends, ends[1:], strict=False)]
    # The second copy is the first, moved by half a bucket. An interval that crosses the bucket's
    # end is split, and continues at the bucket's beginning.
    half = Fraction(1, 2)
    for i, lo, hi in zip(order, ends, ends[1:], strict=False):
        for begin, end in ((lo + half, min(hi + half, Fraction(1))), (max(lo - half, Fraction(0)), hi - half)):
            if begin < end:
                rows.append((i, cut(begin), cut(end), 1))
    which, los, his, copy = np.array(rows, np.int64).T
    return which, los, his, copy


def propagation(
    bucket: Bucket,
    stages: Sequence[tuple[int, ...]],
    kinds: Mapping[str, GradientKind] | Sequence[Mapping[str, GradientKind]],
) -> Layout:
    """Return a bucket's layout for forward and backward: every stage has one copy, sharded over its ranks.

    Args:
        stages: ranks of each stage that uses the bucket, in tensor-parallel order, without repetition.
        kinds: gradient kinds of replicated parameters, for all stages or per stage; ignored for stages of one rank.

    Raises:
        ValueError: a replicated parameter has no kind in a stage of several ranks.
    """
    members = [rank for stage in stages for rank in stage]
    assert len(set(members)) == len(members), (
        f"bucket {bucket.name}: a rank may be in only one of the stages {list(stages)}"
    )
    assert all(stages), f"bucket {bucket.name}: every stage must have a rank"
    kinds_by_stage = [kinds] * len(stages) if isinstance(kinds, Mapping) else kinds
    # cuts: (parameters' partial flags, degree) -> stages (copies) that are sharded alike.
    cuts: dict[tuple[tuple[bool, ...], int], list[int]] = {}
    for copy, (stage, kind) in enumerate(zip(stages, kinds_by_stage, strict=True)):
        cuts.setdefault((_partial(bucket, len(stage), kind), len(stage)), []).append(copy)
    parts = [np.zeros((5, 0), np.int64)]
    for (partial, tp), copies in cuts.items():
        # Such stages differ only in ranks, so columns are broadcast to [stages, intervals].
        index, lo, hi, flag = _shards(bucket, tp, partial)
        rank = np.array([stages[copy] for copy in copies], np.int64)[:, index]
        rows = (rank, lo, hi, np.array(copies)[:, None], flag)
        parts.append(np.stack([np.broadcast_to(row, rank.shape).ravel() for row in rows]))
    rank, lo, hi, copy_of, flag = np.concatenate(parts, axis=1)
    return _layout(rank, lo, hi, copy_of, flag.astype(bool), bucket.size)


def whole(size: int, *ranks: int) -> Layout:
    rank = np.array(ranks, np.int64)
    zeros = np.zeros(len(ranks), np.int64)
    return _layout(rank, zeros, zeros + size, np.arange(len(ranks)), np.ones(len(ranks), bool), size)


def _partial(bucket: Bucket, tp: int, kinds: Mapping[str, GradientKind]) -> tuple[bool, ...]:
    # Gradients of one rank are all PARTIAL, so that adjacent intervals are merged.
    if tp == 1:
        return (True,) * len(bucket.parameters)
    for parameter in bucket.parameters:
        if parameter.rule is None and parameter.name not in kinds:
            raise ValueError(
                f"bucket {bucket.name}: no gradient kind for {parameter.name}, which a stage of {tp} ranks replicates:"
                " specify REPLICA or PARTIAL in kinds"
            )
    return tuple(p.rule is not None or kinds[p.name] is GradientKind.PARTIAL for p in bucket.parameters)


def _shards(bucket: Bucket, tp: int, partial: tuple[bool, ...]) -> Ints:
    offsets = bucket.offsets()
    rows = [
        (index, offsets[parameter.name] + lo, offsets[parameter.name] + hi, flag)
        for index in range(tp)
        for parameter, flag in zip(bucket.parameters, partial, strict=True)
        for lo, hi in parameter.intervals(tp, index)
    ]
    return np.array(rows, np.int64).reshape(-1, 4).T


def _layout(rank: Ints, lo: Ints, hi: Ints, copy: Ints, partial: Bools, size: int) -> Layout:
    kept = np.flatnonzero(hi > lo)
    kept = kept[np.argsort(rank[kept], kind="stable")]
    rank, lo, hi, copy = (column[kept] for column in (rank, lo, hi, copy))
    partial = partial[kept]
    # Merge adjacent rows of equal rank, copy and flag. opens: whether a row begins an interval.
    opens = np.ones(len(rank), bool)
    same = (rank[1:] == rank[:-1]) & (copy[1:] == copy[:-1]) & (partial[1:] == partial[:-1])
    opens[1:] = ~same | (lo[1:] != hi[:-1])
    rank, lo, copy = (column[opens] for column in (rank, lo, copy))
    partial = partial[opens]
    # The last row of each merged interval
    hi = hi[np.roll(opens, -1)]
    end = np.cumsum(hi - lo)
    at = end - (hi - lo)
    at -= at[np.searchsorted(rank, rank)]
    return Layout(rank, lo, hi, at, copy, partial, size)

"""One mini-batch to be spread over pipelines, as the arrays that the search and the bound compute with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.profile import PipelineCost
from hydragraph.errors import Unsupported
from hydragraph.planner.local_search import EQ3, FORMED, Floats, Ints

Bubble = Literal["longest", "constant"]


@dataclass(frozen=True, eq=False)
class Problem:
    """Sequences in descending length, and pipelines grouped into kinds of equal ones.

    Attributes:
        pipelines: as given.
        kinds: the different ones.
        kind: which each pipeline is [P].
        counts: pipelines of each kind [K].
        order: what the caller calls each item [n].
        lengths: tokens [n].
        cost: a l^2 + b l [n, K], infinite where a sequence is longer than MaxLen.
        shape: see `local_search` [K, 8].
    """

    pipelines: tuple[PipelineCost, ...]
    kinds: tuple[PipelineCost, ...]
    kind: Ints
    counts: Floats
    order: Ints
    lengths: Floats
    cost: Floats
    shape: Floats

    def shares(self, placed: Ints) -> tuple[tuple[int, ...], ...]:
        """Return which of the caller's sequences each pipeline gets."""
        found: list[list[int]] = [[] for _ in self.pipelines]
        for i, p in zip(self.order.tolist(), placed.tolist(), strict=True):
            found[p].append(i)
        return tuple(map(tuple, found))

    def only(self, allowed: NDArray[np.bool_]) -> Floats:
        """Return the cost with everything else forbidden."""
        return np.where(allowed, self.cost, np.inf)


def problem(
    pipelines: Sequence[PipelineCost], lengths: Sequence[int], formed: bool = False, bubble: Bubble = "longest"
) -> Problem:
    """Return the arrays of a mini-batch; sequences of length 0 are left out.

    Args:
        lengths: tokens per sequence.
        formed: pipelines cut their work into micro-batches; otherwise they are priced by Eq. 3.
        bubble: of Eq. 3: (PP - 1) T(longest assigned sequence), or (PP - 1) T(MaxLen), a constant of the pipeline.

    Raises:
        Unsupported: a sequence is longer than every pipeline's MaxLen.
        ValueError: there is no pipeline, or a length is negative or no whole number.
    """
    if not pipelines:
        raise ValueError("no pipelines: give at least one scheme")
    given = _checked(lengths)
    order = np.argsort(-given, kind="stable")
    order = order[given[order] > 0]
    sizes = given[order].astype(np.float64)
    longest = max(p.max_len for p in pipelines)
    if len(sizes) and sizes[0] > longest:
        raise Unsupported(
            f"sequence {order[0]} has {int(sizes[0])} tokens, more than MaxLen = {longest} of every pipeline",
            where="planner",
            remedy="truncate it (max_length in the data), or give more devices to a pipeline (tensor or pipeline "
            "parallelism, more devices in all)",
        )
    kinds = tuple(dict.fromkeys(pipelines))
    kind = np.array([kinds.index(p) for p in pipelines], dtype=np.int64)
    cost = np.stack([np.where(sizes <= k.max_len, k.work(sizes), np.inf) for k in kinds], axis=1)
    shape = np.array([_shape(k, formed, bubble) for k in kinds])
    counts = np.bincount(kind, minlength=len(kinds)).astype(np.float64)
    return Problem(tuple(pipelines), kinds, kind, counts, order, sizes, cost, shape)


def _checked(lengths: Sequence[int]) -> Ints:
    given = np.asarray(lengths)
    if given.ndim != 1 or (len(given) and (given.dtype.kind not in "iu" or given.min() < 0)):
        raise ValueError("lengths must be whole numbers of tokens, one per sequence, none negative")
    return given.astype(np.int64)


def _shape(kind: PipelineCost, formed: bool, bubble: Bubble) -> list[float]:
    """Return the row that `local_search.finish` reads; every pipeline in use pays c once for its last micro-batch."""
    depth = float(kind.stages - 1)
    if formed:
        return [depth, 0.0, kind.a, kind.b, kind.c, kind.max_len, kind.util_len, FORMED]
    if bubble == "constant":
        fixed = kind.c + depth * kind.micro_batch_seconds([kind.max_len])
        return [0.0, fixed, kind.a, kind.b, kind.c, kind.max_len, kind.util_len, EQ3]
    return [depth, kind.c, kind.a, kind.b, kind.c, kind.max_len, kind.util_len, EQ3]

"""A mini-batch and its pipelines as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.local_search import EQ3, FORMED, AssignmentArrays, Floats, Ints
from hydragraph.planner.quick_plan import too_long


@dataclass(frozen=True, eq=False)
class AssignmentProblem:
    """Sequences, longest first, and kinds of pipelines (symbols: `local_search`).

    Attributes:
        counts: number of pipelines of each kind [K].
        order: caller's index of each sequence [n].
    """

    pipelines: tuple[PipelineCost, ...]
    kinds: tuple[PipelineCost, ...]
    kind_of: Ints
    counts: Floats
    order: Ints
    lengths: Floats
    cost: Floats
    terms: Floats

    @property
    def instance(self) -> AssignmentArrays:
        return AssignmentArrays(self.cost, self.lengths, self.kind_of, self.terms)

    @property
    def hardest(self) -> list[tuple[float, list[int]]]:
        """Pairs (length, kinds): the longest sequence that fits exactly these kinds of pipelines has this length."""
        fits = np.isfinite(self.cost)
        longest = np.flatnonzero(np.diff(fits.sum(1), prepend=-1))
        return [(float(self.lengths[i]), np.flatnonzero(fits[i]).tolist()) for i in longest]

    def shares(self, placed: Ints) -> tuple[tuple[int, ...], ...]:
        """Return the caller's indices of each pipeline's sequences."""
        of_pipeline: list[list[int]] = [[] for _ in self.pipelines]
        for i, p in zip(self.order.tolist(), placed.tolist(), strict=True):
            of_pipeline[p].append(i)
        return tuple(map(tuple, of_pipeline))


def problem_of(pipelines: Sequence[PipelineCost], lengths: Sequence[int], formed: bool = False) -> AssignmentProblem:
    """Convert a mini-batch to arrays, skipping empty sequences.

    Unless `formed`, pipelines do not divide their work into micro-batches, and Hydraulis's Eq. 2 gives their end times.
    """
    if not pipelines:
        raise ValueError("no pipelines: give at least one scheme")
    tokens = _checked(lengths)
    order = np.argsort(-tokens, kind="stable")
    order = order[tokens[order] > 0]
    sizes = tokens[order].astype(np.float64)
    longest = max(p.max_len for p in pipelines)
    if len(sizes) and sizes[0] > longest:
        raise too_long(int(order[0]), int(sizes[0]), longest)
    kinds = tuple(dict.fromkeys(pipelines))
    kind_of = np.array([kinds.index(p) for p in pipelines], dtype=np.int64)
    cost = np.stack([np.where(sizes <= k.max_len, k.work(sizes), np.inf) for k in kinds], axis=1)
    terms = np.array([_terms(k, formed) for k in kinds])
    terms = np.concatenate([terms, _near_terms(kinds)], axis=1)
    counts = np.bincount(kind_of, minlength=len(kinds)).astype(np.float64)
    return AssignmentProblem(tuple(pipelines), kinds, kind_of, counts, order, sizes, cost, terms)


def _checked(lengths: Sequence[int]) -> Ints:
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or (len(tokens) and (tokens.dtype.kind not in "iu" or tokens.min() < 0)):
        raise ValueError("lengths must be whole numbers of tokens, at least 0, one per sequence")
    return tokens.astype(np.int64)


def _near_terms(kinds: Sequence[PipelineCost]) -> Floats:
    nears = [dict(kind.near) for kind in kinds]
    reaches = sorted({reach for near in nears for reach in near}, key=lambda each: each.order)
    rows = [[value for r in reaches for value in (*r.order, near.get(r, 0.0))] for near in nears]
    return np.array(rows, dtype=np.float64).reshape(len(kinds), -1)


def _terms(kind: PipelineCost, formed: bool) -> Floats:
    row = np.zeros(local_search.COLUMNS)
    row[local_search.QUADRATIC] = kind.a
    row[local_search.LINEAR] = kind.b
    row[local_search.OVERHEAD] = kind.c
    row[local_search.MAX_LEN] = kind.max_len
    row[local_search.UTIL_LEN] = kind.util_len
    row[local_search.MODE] = FORMED if formed else EQ3
    row[local_search.BUBBLE] = float(kind.stages - 1)
    row[local_search.FIXED] = 0.0 if formed else kind.c
    return row

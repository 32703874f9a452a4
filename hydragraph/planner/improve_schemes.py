"""Improvement of candidate strategies on sample mini-batches, by exchanges of schemes.

The proposal (Hydraulis, section 7) ignores bubbles, so its candidates are only starting points. For example, one
exchange turns 2 <tp4,pp1> into <tp4,pp1> + 2 <tp2,pp1>, 4 <tp2,pp1>, or <tp8,pp1>.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hydragraph.cost.measured_profile import Scheme
from hydragraph.cost.schemes import Schemes
from hydragraph.planner.tuning_set import Strategy, TuningSet

# Maximum candidates to improve per group of mini-batches, and exchanges per candidate.
STARTS = 4
ROUNDS = 16
WORTH = 1e-3


def homogeneous(profile: Schemes, devices: int) -> list[list[Scheme]]:
    """Return one strategy for each scheme, with as many pipelines as fit on the devices."""
    every = [[s] * (devices // size(s)) for s in profile.schemes if size(s) <= devices]
    return [strategy for strategy in every if profile.max_len(strategy[0], sum(map(size, strategy))) > 0]


def refine(
    candidates: Sequence[Sequence[Scheme]],
    profile: Schemes,
    batches: Sequence[Sequence[int]],
    devices: int,
    *,
    context: int | None = None,
) -> list[list[Scheme]]:
    """Return the best static strategy, then the most useful alternatives, then all others.

    Args:
        context: longest sequence that the static strategy must fit; default: the longest of `batches`.
    """
    tuning = TuningSet(profile, batches, devices)
    longest = context if context is not None else max(tuning.longest, default=0)
    starts = list(dict.fromkeys(tuple(sorted(c, reverse=True)) for c in candidates))
    seen = dict.fromkeys(starts)
    everything = np.arange(len(tuning.longest))
    for group, reach in [(everything, longest), *groups(tuning, profile, devices)]:
        able = [s for s in starts if tuning.reach(s) >= reach]
        for start in sorted(able, key=lambda s: (_total(tuning, s, group), s))[:STARTS]:
            seen[climbed(start, tuning, group, reach, profile, devices)] = None
    chosen = complementary(tuning, longest)
    rest = sorted(seen, key=lambda s: (tuning.reach(s) < longest, _total(tuning, s, everything), s))
    return [list(s) for s in dict.fromkeys([*chosen, *rest])]


def groups(tuning: TuningSet, profile: Schemes, devices: int) -> list[tuple[NDArray[np.int64], int]]:
    """Return groups of mini-batches that need the same MaxLen (not the largest), and each group's longest length."""
    limits = sorted({profile.max_len(s, devices) for s in profile.schemes if size(s) <= devices})
    longest = np.array(tuning.longest)
    which = np.searchsorted(limits, longest)
    members = [np.flatnonzero(which == level) for level in np.unique(which)[:-1]]
    return [(group, int(longest[group].max())) for group in members]


def climbed(
    start: Strategy, tuning: TuningSet, group: NDArray[np.int64], reach: int, profile: Schemes, devices: int
) -> Strategy:
    """Improve a strategy on a group of mini-batches; the result fits sequences of `reach` tokens.

    The additional cost of unequal pipelines is ignored, because later exchanges may save more.
    """

    def price(strategy: Strategy) -> float:
        return float(tuning.computing(strategy)[group].sum())

    at = start
    for _ in range(ROUNDS):
        able = [s for s in exchanges(at, profile, devices) if tuning.reach(s) >= reach]
        best = min(able, key=lambda s: (price(s), s), default=at)
        if price(best) >= price(at):
            break
        at = best
    return at


def complementary(tuning: TuningSet, reach: int) -> list[Strategy]:
    """Return the best strategy in `tuning.priced` that fits `reach` tokens, then its most useful alternatives."""
    priced = list(tuning.priced)
    if not priced or not tuning.longest:
        return []
    table = np.array([tuning.seconds(s) for s in priced])  # [strategies, mini-batches]
    totals = np.where([tuning.reach(s) >= reach for s in priced], table.sum(1), np.inf)
    at = min(range(len(priced)), key=lambda i: (totals[i], priced[i]))
    if not np.isfinite(totals[at]):
        return []
    chosen = [priced[at]]
    quickest = table[at]
    while True:
        together = np.minimum(table, quickest).sum(1)
        at = min(range(len(priced)), key=lambda i: (together[i], priced[i]))
        if together[at] >= quickest.sum() * (1 - WORTH):
            return chosen
        chosen.append(priced[at])
        quickest = np.minimum(quickest, table[at])


def exchanges(strategy: Strategy, profile: Schemes, devices: int) -> Iterator[Strategy]:
    usable = [s for s in profile.schemes if size(s) <= devices and profile.max_len(s, devices) > 0]
    for old, new in product(dict.fromkeys(strategy), usable):
        count = strategy.count(old)
        free = devices - sum(map(size, strategy))
        fewest = -(-max(size(new) - free, 0) // size(old))
        if old == new or fewest > count:
            continue
        others = [s for s in strategy if s != old]
        for removed in {fewest, count}:
            added = (free + removed * size(old)) // size(new)
            yield tuple(sorted([*others, *[old] * (count - removed), *[new] * added], reverse=True))


def size(scheme: Scheme) -> int:
    return scheme[0] * scheme[1]


def _total(tuning: TuningSet, strategy: Strategy, group: NDArray[np.int64]) -> float:
    return float(tuning.seconds(strategy)[group].sum())

"""Improve candidate strategies on sample mini-batches: exchange pipelines of one scheme for pipelines of another.

The proposal (Hydraulis, section 7) prices no bubbles and rounds every scheme by itself. So its candidates, and the
homogeneous strategies beside them, are only where this search starts from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from hydragraph.cost.profile import Profile, Scheme
from hydragraph.planner.problem import problem
from hydragraph.planner.spread import longest_first, value

Strategy = tuple[Scheme, ...]

STARTS = 4  # candidates that are improved
ROUNDS = 12  # exchanges for each of them at most


def homogeneous(profile: Profile, devices: int) -> list[list[Scheme]]:
    """Return every strategy of equal pipelines that fills the devices."""
    fitting = [s for s in profile.schemes if devices % size(s) == 0 and profile.max_len(s, devices) > 0]
    return [[s] * (devices // size(s)) for s in fitting]


def refine(
    candidates: Sequence[Sequence[Scheme]], profile: Profile, batches: Sequence[Sequence[int]], devices: int
) -> list[list[Scheme]]:
    """Return the candidates and what they were improved to, the quickest on the sample first.

    Args:
        candidates: strategies, such as those of `propose` and `homogeneous`.
        batches: sequence lengths of sample mini-batches.
        devices: how many there are.

    Each improvement takes pipelines of one scheme away and puts as many of another as fit into the room. A strategy
    is priced by the quick plan of each mini-batch, bubbles included, with `profile.hetero_sync_s` if pipelines differ.
    """
    known: dict[Strategy, float] = {}

    def price(strategy: Strategy) -> float:
        if strategy not in known:
            known[strategy] = seconds(strategy, profile, batches)
        return known[strategy]

    starts = [tuple(sorted(c, reverse=True)) for c in candidates]
    found = list(dict.fromkeys(starts))
    for start in sorted(found, key=lambda s: (price(s), s))[:STARTS]:
        at = start
        for _ in range(ROUNDS):
            best = min(exchanges(at, profile, devices), key=lambda s: (price(s), s), default=at)
            if price(best) >= price(at):
                break
            at = best
        found.append(at)
    return [list(s) for s in sorted(dict.fromkeys(found), key=lambda s: (price(s), s))]


def seconds(strategy: Strategy, profile: Profile, batches: Sequence[Sequence[int]]) -> float:
    """Return what a strategy takes for all mini-batches by their quick plans, infinite where it cannot take them."""
    pipelines = profile.pipelines(strategy)
    reach = max(p.max_len for p in pipelines)
    if any(max(lengths, default=0) > reach for lengths in batches):
        return float("inf")
    total = 0.0
    for lengths in batches:
        given = problem(pipelines, lengths, formed=True)
        total += value(given, longest_first(given))
    return total + (profile.hetero_sync_s * len(batches) if len(set(strategy)) > 1 else 0.0)


def exchanges(strategy: Strategy, profile: Profile, devices: int) -> Iterator[Strategy]:
    """Yield the strategies that one exchange leads to: fewer pipelines of one scheme, or none, and more of another."""
    usable = [s for s in profile.schemes if size(s) <= devices and profile.max_len(s, devices) > 0]
    for old, new in product(dict.fromkeys(strategy), usable):
        count = strategy.count(old)
        free = devices - sum(map(size, strategy))
        fewest = -(-max(size(new) - free, 0) // size(old))
        if old == new or fewest > count:
            continue
        others = [s for s in strategy if s != old]
        for taken in {fewest, count}:
            added = (free + taken * size(old)) // size(new)
            yield tuple(sorted([*others, *[old] * (count - taken), *[new] * added], reverse=True))


def size(scheme: Scheme) -> int:
    """Return the devices of a scheme."""
    return scheme[0] * scheme[1]

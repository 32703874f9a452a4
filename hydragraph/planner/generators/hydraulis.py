"""Proposal of strategies from the data's length histogram (Hydraulis, section 7).

The paper computes t[n][l], the least time of n devices for all sequences of length <= l (Eq. 4). This module computes
F(l), the least number of devices that process these sequences within a time t:

    F(l) = min over schemes k with MaxLen(k) >= l and l' < l of F(l') + units(k, l', l, t),

where an interval (l', l] needs d >= S_k(l', l) / t pipelines of scheme k. Bisection on F(L) <= N finds t[N][L].

    N, L        number of devices, and the longest length
    l, l'       levels of 128 tokens: `upto` and `above` in code
    k, d        a scheme, and its number of pipelines, a multiple of 0.1
    S_k(l', l)  seconds of sequences in (l', l] on one pipeline: a difference of `Histogram.work`
    units       F(l) in tenths of a device

Hydraulis's equations -> functions:

    Eq. 4, t[n][l]                               `needed` for one t, `least` for the t of N devices
    the strategy S[n][l] for every l             `proposals`
    rounding to neighboring integers             `roundings`
    the order of the candidates (ours)           `expected_seconds`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from hydragraph.cost.measured_profile import Scheme
from hydragraph.cost.schemes import Schemes
from hydragraph.errors import Unsupported
from hydragraph.kernels.numba_compiler import compiled
from hydragraph.planner.assignment.local_search import Floats, Ints

# Tokens per level, and parts of a pipeline, as in the paper.
STEP = 128
PIPELINE_STEPS = 10
# Smallest maximum length of proposed strategies, in levels.
SHORTEST = 8
# Factor between successive t; smaller t yield strategies for shorter sequences.
SWEEP = 1.03


@dataclass(frozen=True, eq=False)
class Histogram:
    """Work of the data, by length and scheme (tp, pp).

    Attributes:
        schemes: schemes in which some sequence fits [K].
        devices: devices per pipeline of each scheme [K].
        levels: highest level (length) that fits in each scheme [K].
        work: seconds of all sequences up to each level on one pipeline [K, levels + 1].
    """

    schemes: tuple[Scheme, ...]
    devices: Ints
    levels: Ints
    work: Floats


@dataclass(frozen=True)
class Share:
    """A multiple of 0.1 pipelines of one scheme, for sequences with lengths in (above, upto]."""

    scheme: Scheme
    pipelines: float
    above: int
    upto: int


@dataclass(frozen=True)
class FractionalStrategy:
    """The best strategy with fractional pipelines, for sequences up to a length; `seconds` is t[N][L]."""

    seconds: float
    shares: tuple[Share, ...]


def propose(
    profile: Schemes, lengths: Sequence[int], devices: int, context: int, *, limit: int | None = 64
) -> list[list[Scheme]]:
    """Return strategies as lists of one scheme per pipeline, the lowest expected time first.

    Args:
        lengths: tokens of each sequence of the data or a sample; sequences above `context` count as `context`.
        devices: number of devices; some may be idle.
        context: maximum tokens of a sequence.

    Raises:
        Unsupported: no measured scheme fits `context` tokens on the devices.
    """
    data = histogram(profile, lengths, devices, context)
    expected: dict[tuple[Scheme, ...], float] = {}
    for proposal in proposals(data, devices):
        for strategy in roundings(proposal, profile, devices, context):
            if strategy not in expected:
                expected[strategy] = expected_seconds(strategy, data, proposal.shares[-1].upto)
    longest = len(data.work[0]) - 1
    ranked = sorted(expected, key=lambda s: (expected_seconds(s, data, longest), s))
    return [list(s) for s in ranked[:limit]]


def histogram(profile: Schemes, lengths: Sequence[int], devices: int, context: int) -> Histogram:
    tokens = np.minimum(np.asarray(lengths, dtype=np.int64), context)
    tokens = tokens[tokens > 0]
    if not len(tokens) or devices < 1 or context < 1:
        raise ValueError(f"{len(tokens)} sequences, {devices} devices, context {context}: each must be at least 1")
    usable = [
        s for s in profile.schemes if s[0] * s[1] <= devices and profile.max_len(s, devices) >= min(STEP, context)
    ]
    last = -(-int(context) // STEP)
    # A level fits if its longest sequence does. The last ends at `context`, not at a multiple of
    # STEP.
    reach = {s: min(last, profile.max_len(s, devices) // STEP) for s in usable}
    reach |= {s: last for s in usable if profile.max_len(s, devices) >= context}
    if max(reach.values(), default=0) < last:
        longest = max((profile.max_len(s, devices) for s in usable), default=0)
        raise Unsupported(
            f"no measured scheme fits {context} tokens on {devices} device{'s' * (devices > 1)} (the longest MaxLen is "
            f"{longest})",
            where=f"profile {profile.name}",
            remedy="lower the context length, add devices, or measure schemes of more devices",
        )
    level = -(-tokens // STEP)
    rows = []
    for scheme in usable:
        pipeline = profile.pipeline(scheme, devices)
        # Every sequence gets its share of a full micro-batch's fixed cost c.
        seconds = pipeline.work(tokens) + pipeline.c * tokens / pipeline.max_len
        rows.append(np.concatenate([[0.0], np.cumsum(np.bincount(level, seconds, last + 1)[1:])]))
    return Histogram(
        tuple(usable),
        np.array([tp * pp for tp, pp in usable], dtype=np.int64),
        np.array([reach[s] for s in usable], dtype=np.int64),
        np.array(rows),
    )


@compiled
def needed(t: float, steps: int, devices: Ints, levels: Ints, work: Floats, units: Ints, by: Ints, below: Ints) -> None:
    """Write F(l) for each l, in units of 1 / `steps` devices, and the last interval's scheme and l'."""
    last = work.shape[1] - 1
    units[0] = 0
    for upto in range(1, last + 1):
        best = np.int64(1) << 60
        scheme = -1
        source = -1
        for k in range(len(devices)):
            if upto > levels[k]:
                continue
            # From short to long intervals, which have more work, so `grown` never shrinks.
            for above in range(upto - 1, -1, -1):
                # Rounding errors must not add a tenth of a pipeline.
                d = math.ceil((work[k, upto] - work[k, above]) * steps / t * (1.0 - 1e-12))
                grown = max(d, 1) * devices[k]
                if grown >= best:
                    # Longer intervals need no fewer devices
                    break
                total = units[above] + grown
                if total < best:
                    best = total
                    scheme = k
                    source = above
        units[upto] = best
        by[upto] = scheme
        below[upto] = source


def proposals(data: Histogram, devices: int) -> list[FractionalStrategy]:
    """Return the best fractional strategies, the longest length first; the first strategy, for t[N][L], is exact."""
    plans = [least(data, devices)]
    t = plans[0].seconds
    # A smaller t needs more devices per length, so N devices suffice only for shorter sequences.
    while True:
        t /= SWEEP
        units, by, below = _needs(t, data)
        within = np.flatnonzero(units <= devices * PIPELINE_STEPS)
        upto = int(within[-1])
        if upto < SHORTEST or data.work[:, upto].max() <= 0:
            return plans
        plans.append(_proposal(data, upto, units, by, below))


def least(data: Histogram, devices: int) -> FractionalStrategy:
    last = data.work.shape[1] - 1
    budget = devices * PIPELINE_STEPS
    low = 0.0
    # Accurate enough for a tenth of a pipeline.
    high = float(data.work[data.levels >= last, last].max()) * PIPELINE_STEPS
    best: FractionalStrategy | None = None
    while best is None or high - low > 1e-12 * high:
        t = high if best is None else (low + high) / 2
        units, by, below = _needs(t, data)
        if units[last] <= budget:
            plan = _proposal(data, last, units, by, below)
            if best is None or plan.seconds < best.seconds:
                best = plan
            high = min(t, best.seconds)
        elif best is None:
            high *= 2
        else:
            low = t
    return best


def _needs(t: float, data: Histogram) -> tuple[Ints, Ints, Ints]:
    size = data.work.shape[1]
    units, by, below = (np.zeros(size, dtype=np.int64) for _ in range(3))
    needed(t, PIPELINE_STEPS, data.devices, data.levels, data.work, units, by, below)
    return units, by, below


def _proposal(data: Histogram, upto: int, units: Ints, by: Ints, below: Ints) -> FractionalStrategy:
    shares = []
    seconds = 0.0
    while upto:
        k = int(by[upto])
        above = int(below[upto])
        # The recorded interval's pipelines take at most t, because d was rounded up.
        d = (units[upto] - units[above]) / data.devices[k] / PIPELINE_STEPS
        seconds = max(seconds, float(data.work[k, upto] - data.work[k, above]) / d)
        shares.append(Share(data.schemes[k], float(d), above * STEP, upto * STEP))
        upto = above
    return FractionalStrategy(seconds, tuple(reversed(shares)))


def roundings(proposal: FractionalStrategy, profile: Schemes, devices: int, context: int) -> list[tuple[Scheme, ...]]:
    """Return roundings that fit the longest length and leave too few devices to round another number up."""
    fractional: dict[Scheme, float] = {}
    for share in proposal.shares:
        fractional[share.scheme] = fractional.get(share.scheme, 0.0) + share.pipelines
    schemes = sorted(fractional, key=lambda s: -profile.max_len(s, devices))
    # 1.3 pipelines of one scheme and 2 of another: counts (1, 2) and (2, 2).
    low = [math.floor(fractional[s] + 1e-9) for s in schemes]
    choices = [(n, n + 1) if fractional[s] > n + 1e-9 else (n,) for n, s in zip(low, schemes, strict=True)]
    sizes = [tp * pp for tp, pp in schemes]
    # The last level may exceed the context
    reach = min(proposal.shares[-1].upto, context)
    longest = [profile.max_len(s, devices) >= reach for s in schemes]
    kept = []
    for counts in product(*choices):
        free = devices - sum(n * size for n, size in zip(counts, sizes, strict=True))
        # If another number could be rounded up, devices would be idle needlessly.
        more = any(n < c[-1] and size <= free for n, c, size in zip(counts, choices, sizes, strict=True))
        if free >= 0 and not more and any(n and fits for n, fits in zip(counts, longest, strict=True)):
            kept.append(counts)
    return [tuple(s for n, s in zip(counts, schemes, strict=True) for _ in range(n)) for counts in kept]


def expected_seconds(strategy: Sequence[Scheme], data: Histogram, upto: int) -> float:
    """Estimate a strategy's time for sequences up to a level, if pipelines share each level's sequences by speed."""
    index = {s: k for k, s in enumerate(data.schemes)}
    counts = np.bincount([index[s] for s in strategy], minlength=len(data.schemes)).astype(np.float64)
    levels = data.levels
    used = np.flatnonzero(counts)
    if max(levels[used]) < upto:
        return math.inf
    of_level = np.diff(data.work[:, : upto + 1], axis=1)  # [K, levels]
    worst = 0.0
    for above in sorted({0, *(int(levels[k]) for k in used if levels[k] < upto)}):
        able = [k for k in used if levels[k] > above]
        # Only schemes that fit sequences above `above` can run them; the busiest such set
        # determines the time.
        rate = np.array([counts[k] / np.maximum(of_level[k, above:], 1e-300) for k in able])
        usable = np.array([np.arange(above + 1, upto + 1) <= levels[k] for k in able])
        total = np.where(usable, rate, 0.0).sum(0)
        busy = of_level[able[0], above:] > 0
        worst = max(worst, float((1.0 / total[busy]).sum())) if busy.any() else worst
    return worst

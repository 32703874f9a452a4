"""Linear program that chooses owners of all buckets within the ranks' memory.

Class k has n_k buckets of z_k elements. Candidate c gives rank r the fraction p_cr of a bucket and takes e_kc seconds.
There are m copies, and M_r elements fit on rank r. Choose the fraction x_kc of class k that uses candidate c:

    minimize    sum_kc n_k e_kc x_kc
    subject to  sum_c x_kc = 1                            for every class k
                m sum_kc n_k z_k p_cr x_kc <= M_r         for every rank r
                x_kc >= 0

As many buckets as possible use one candidate; the other buckets mix several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydragraph.cost.home_candidates import Parts

EXACT = 1e-9
# Margin for rounding by the solver and at shard boundaries
FULL = 1 - 1e-6


def within(
    counts: Sequence[int],
    sizes: Sequence[int],
    choices: Sequence[Sequence[Parts]],
    seconds: Sequence[Sequence[float]],
    room: Parts,
) -> list[list[Parts]] | None:
    """Return the ranks' fractions of each bucket, by class; None if memory does not suffice.

    Args:
        counts: number of buckets of each class.
        sizes: number of elements of a bucket in all copies, by class.
        room: M [ranks].
    """
    # Needed only if the best owners do not fit
    from scipy.optimize import linprog

    flat = [(k, parts, cost) for k, row in enumerate(choices) for parts, cost in zip(row, seconds[k], strict=True)]
    cost = np.array([counts[k] * candidate_s for k, _, candidate_s in flat])
    owned = np.array([counts[k] * sizes[k] * parts for k, parts, _ in flat]).T
    whole = np.zeros((len(counts), len(flat)))
    whole[[k for k, _, _ in flat], np.arange(len(flat))] = 1.0
    scale = max(float(cost.max()), EXACT)
    limit = FULL * np.maximum(room, 0.0)
    unit = max(float(limit.max()), 1.0)
    solved = linprog(cost / scale, owned / unit, limit / unit, whole, np.ones(len(counts)), method="highs")
    if not solved.success:
        return None
    fractions: list[list[Parts]] = []
    for k, count in enumerate(counts):
        chosen = [(parts, count * x) for (at, parts, _), x in zip(flat, solved.x, strict=True) if at == k]
        fractions.append(dealt(chosen, count))
    return fractions


def dealt(chosen: Sequence[tuple[Parts, float]], count: int) -> list[Parts]:
    """Convert pairs (fractions, number of buckets) to the ranks' fractions of each of `count` buckets."""
    buckets: list[Parts] = []
    left = np.zeros_like(chosen[0][0])
    for parts, times in chosen:
        alone = int(times + EXACT * count)
        buckets += [parts] * alone
        left += max(0.0, times - alone) * parts
    mixed = count - len(buckets)
    return [*buckets, *[left / left.sum()] * mixed] if mixed else buckets

"""Lower bound of the assignment of a mini-batch to any pipelines of some kinds, with a given number of devices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost
from hydragraph.cost.stage_arrays import stage_terms
from hydragraph.planner.assignment.assign_mini_batch import line_terms
from hydragraph.planner.assignment.bounds import alone, least_of
from hydragraph.planner.assignment.problem import problem_of
from hydragraph.planner.bisection import above, bisect

# Number of prefixes of the sequences that are examined.
PREFIXES = 12


def bound_devices(kinds: Sequence[PipelineCost], lengths: Sequence[int], devices: int) -> float:
    """Return a lower bound of any assignment to any pipelines of these kinds with `devices` devices in total.

    By z, a pipeline of kind k can do z - fill_k of the work of sequences above some length (`bounds.Least`). So
    each sequence takes at least the fraction cost[i, k] / (z - fill_k) of a pipeline and its devices. If these
    exceed the devices, with the best kind for each sequence, z is excluded.
    """
    problem = problem_of(kinds, lengths, formed=True)
    if not len(problem.lengths):
        return 0.0
    terms = line_terms(problem, stage_terms(problem.kinds, len(problem.lengths)))
    least = least_of(problem, terms)
    cost = least.divided(problem)
    devices_of = np.array([k.devices for k in problem.kinds])
    looked_at = np.unique(np.linspace(0, len(least.prefixes) - 1, PREFIXES).astype(np.int64))

    # Feasibility is monotonic in z, so bisection finds the least z that is not excluded.
    def enough(z: float) -> bool:
        for prefix, fill in zip(least.prefixes[looked_at], least.fill[looked_at], strict=True):
            with np.errstate(divide="ignore"):
                each = np.where(fill < z, devices_of / (z - fill), np.inf)
            if (cost[: prefix + 1] * each).min(1).sum() > devices:
                return False
        return True

    low = alone(problem, terms)
    return low if enough(low) else bisect(enough, low, above(enough, low), 1e-6)[0]

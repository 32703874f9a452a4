"""Our own plans on published constants: candidates, what pull and push add to each, and the columns (a) to (d)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published.dispatching import dispatch
from benchmarks.published.rivals import Spent, charge
from benchmarks.published.workload import Lengths, fixed_length, pipeline_seconds
from hydragraph import planner
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.planner.assignment.assign_mini_batch import PlannedAssignment, assign_pipelines, bounded_pipelines
from hydragraph.planner.assignment.best_candidate import compare_pipelines

Candidate = tuple[Scheme, ...]

KEPT = 16  # candidates that refining puts first
KEPT_UNEQUAL = 4  # and of unequal pipelines that take the context
ABLE = 14  # of these, by their bounds, that traffic is priced for
PER_BATCH = 5  # of them for each tuning mini-batch


def reach(candidate: Candidate, profile: Profile) -> int:
    """Return the longest sequence that a strategy takes."""
    devices = sum(tp * pp for tp, pp in candidate)
    return max(profile.max_len(scheme, devices) for scheme in set(candidate))


def candidates_of(
    profile: Profile, devices: int, context: int, sample: Lengths, tuning: Sequence[Lengths]
) -> list[Candidate]:
    """Return homogeneous strategies and those that refining puts first, by what computing takes."""
    alike = planner.homogeneous(profile, devices)
    starts = [*planner.propose(profile, sample, devices, context), *alike]
    refined = [tuple(s) for s in planner.refine(starts, profile, tuning, devices, context=context)]
    unequal = [s for s in refined if len(set(s)) > 1 and reach(s, profile) >= context]
    every = [*refined[:KEPT], *unequal[:KEPT_UNEQUAL], *map(tuple, alike)]
    return list(dict.fromkeys(tuple(sorted(s, reverse=True)) for s in every))


def promising(profile: Profile, every: Sequence[Candidate], context: int, tuning: Sequence[Lengths]) -> list[Candidate]:
    """Return those candidates whose bounds are least, for each tuning mini-batch and for those that take the context.

    The best homogeneous one by its bounds is always among them.
    """
    bounds = {
        s: [
            bounded_pipelines(profile.pipelines(s), batch).seconds if reach(s, profile) >= max(batch) else math.inf
            for batch in tuning
        ]
        for s in every
    }
    whole = sorted((s for s in every if reach(s, profile) >= context), key=lambda s: sum(bounds[s]))
    equal = [s for s in whole if len(set(s)) == 1]
    found: dict[Candidate, None] = dict.fromkeys([*equal[:3], *whole[:4]])
    for at in range(len(tuning)):
        found |= dict.fromkeys(sorted(every, key=lambda s: bounds[s][at])[:PER_BATCH])
    return list(found)[: max(ABLE, len(equal[:3]) + 4)]


@dataclass(frozen=True)
class Priced:
    """Candidates with what moving and updating states adds to each.

    Attributes:
        profile: published constants.
        candidates: strategies.
        charges: seconds, by candidate.
        context: the longest sequence that a static strategy must take.
    """

    profile: Profile
    candidates: tuple[Candidate, ...]
    charges: tuple[float, ...]
    context: int

    @classmethod
    def of(cls, profile: Profile, devices: int, context: int, sample: Lengths, tuning: Sequence[Lengths]) -> Priced:
        """Find candidates and simulate a tuning mini-batch on each, with traffic and without."""
        every = candidates_of(profile, devices, context, sample, tuning)
        able = promising(profile, every, context, tuning)
        charges = []
        for candidate in able:
            limit = reach(candidate, profile)
            batch = next((b for b in tuning if max(b) <= limit), [min(n, limit) for n in tuning[0]])
            assignment = planner.assign(candidate, profile, batch)
            charges.append(charge(profile, devices, candidate, assignment))
        return cls(profile, tuple(able), tuple(charges), context)

    def static(self, tuning: Sequence[Lengths], equal: bool) -> int:
        """Return the index of the best strategy to stay with: of equal pipelines, or of any."""
        able = [
            i
            for i, s in enumerate(self.candidates)
            if reach(s, self.profile) >= self.context and (len(set(s)) == 1 or not equal)
        ]
        if not able:
            raise ValueError(f"no published scheme takes {self.context} tokens")
        return min(able, key=lambda i: statistics.fmean(self.stayed(i, batch).whole for batch in tuning))

    def packed_to_context(self, index: int, lengths: Lengths) -> Spent:
        """(a): dispatched by Eq. 3, then packed first-fit decreasing to the context length, or what memory holds."""
        schemes = self.candidates[index]
        pipelines = self.profile.pipelines(schemes)
        ends = []
        for pipeline, share in zip(pipelines, dispatch(schemes, self.profile, lengths).pipelines, strict=True):
            packed = fixed_length([lengths[i] for i in share], min(self.context, pipeline.max_len))
            ends.append(pipeline_seconds([pipeline.micro_batch_seconds(m) for m in packed], pipeline.stages))
        return self._spent(max(ends), index)

    def stayed(self, index: int, lengths: Lengths) -> Spent:
        """(b), (c): one strategy, its sequences assigned by us."""
        assignment = assign_pipelines(self.profile.pipelines(self.candidates[index]), lengths)
        return self._spent(assignment.seconds, index)

    def chosen(self, lengths: Lengths) -> tuple[int, PlannedAssignment, Spent]:
        """(d): the best candidate for this mini-batch, its assignment, and what it takes."""
        pipelines = [self.profile.pipelines(s) for s in self.candidates]
        choice = compare_pipelines(pipelines, lengths, self.charges)
        return choice.index, choice.assignment, self._spent(choice.assignment.seconds, choice.index)

    def _spent(self, computing: float, index: int) -> Spent:
        return Spent(computing, self.charges[index], self.charges[index])

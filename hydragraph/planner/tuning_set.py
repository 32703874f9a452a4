"""Quick prediction of many strategies' times for sample mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from hydragraph.cost.measured_profile import PipelineCost, Scheme
from hydragraph.cost.schemes import Schemes
from hydragraph.planner.assignment.local_search import AssignmentArrays, Floats, quick_end
from hydragraph.planner.assignment.problem import AssignmentProblem, problem_of

Strategy = tuple[Scheme, ...]

# Maximum sequences times devices; only the first mini-batches of larger sets are used.
WORK = 3_000_000


class TuningSet:
    """Cached times of strategies; `priced` has each strategy's computation seconds for each mini-batch [B]."""

    def __init__(self, profile: Schemes, batches: Sequence[Sequence[int]], devices: int) -> None:
        work = np.cumsum([len(lengths) * devices for lengths in batches])
        self._batches = [list(b) for b, upto in zip(batches, work.tolist(), strict=True) if upto <= WORK] or [
            list(b) for b in batches[:1]
        ]
        self._profile = profile
        self._tables = cache(self._tables_for)
        self.longest = [max(lengths, default=0) for lengths in self._batches]
        self.priced: dict[Strategy, Floats] = {}

    def reach(self, strategy: Strategy) -> int:
        kinds, column, _ = self._tables(sum(tp * pp for tp, pp in strategy))
        return max(kinds[column[s]].max_len for s in strategy)

    def seconds(self, strategy: Strategy) -> Floats:
        """Return each mini-batch's time [B], infinite if it does not fit."""
        return self.computing(strategy) + self._profile.charge_in_search(strategy)

    def computing(self, strategy: Strategy) -> Floats:
        if strategy not in self.priced:
            self.priced[strategy] = self._price(strategy)
        return self.priced[strategy]

    def _price(self, strategy: Strategy) -> Floats:
        _, column, problems = self._tables(sum(tp * pp for tp, pp in strategy))
        kind_of = np.array([column[s] for s in strategy], dtype=np.int64)
        reach = self.reach(strategy)
        return np.array(
            [
                quick_end(AssignmentArrays(problem.cost, problem.lengths, kind_of, problem.terms))
                if problem is not None and longest <= reach
                else np.inf
                for problem, longest in zip(problems, self.longest, strict=True)
            ]
        )

    def _tables_for(
        self, devices: int
    ) -> tuple[Sequence[PipelineCost], dict[Scheme, int], list[AssignmentProblem | None]]:
        pipelines = {s: self._profile.pipeline(s, devices) for s in self._profile.schemes if s[0] * s[1] <= devices}
        kinds = list(dict.fromkeys(pipelines.values()))
        reach = max(kind.max_len for kind in kinds)
        batches = zip(self._batches, self.longest, strict=True)
        problems = [problem_of(kinds, batch, formed=True) if n <= reach else None for batch, n in batches]
        return kinds, {s: kinds.index(pipeline) for s, pipeline in pipelines.items()}, problems

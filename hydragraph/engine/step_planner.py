"""Plan of one iteration, made ahead of time, on demand, or by a quick heuristic."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydragraph.engine.planning_service import PlanService
from hydragraph.planner.policy import Policy
from hydragraph.planner.quick_plan import assign_pipelines
from hydragraph.planner.request import PlanAnswer, PlanRequest, answer
from hydragraph.spec.assignment import Assignment

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class IterationPlan:
    """Strategy and assignment.

    Attributes:
        seconds: expected time of the iteration, or 0 for the quick plan.
        late: whether this is the quick plan, used if the full plan is late.
    """

    candidate: int
    assignment: Assignment
    seconds: float
    hidden_s: float
    late: bool = False


class IterationPlanner:
    """Planner of iterations on one rank.

    Args:
        static: index of the candidate to use if the longest sequence fits, or None to choose every time.
    """

    def __init__(self, request: PlanRequest, policy: Policy, static: int | None = None) -> None:
        self._policy = policy
        self._service: PlanService | None = None
        self._hurries = False
        self._latest: tuple[tuple[int, ...], IterationPlan] | None = None
        self.change(request, static)

    def announce(self, lengths: Sequence[int]) -> None:
        if self._policy.workers and self._service is None:
            self._service = PlanService(self._chosen, self._policy.workers, self._policy.ahead)
        if self._service is not None and self._static_takes(lengths):
            self._service.submit(tuple(lengths))

    def plan(self, lengths: Sequence[int]) -> IterationPlan:
        """Return a mini-batch's plan; the next call reuses it if lengths are equal.

        Raises:
            Unsupported: no candidate can run the longest sequence.
        """
        began = time.perf_counter()
        key = tuple(lengths)
        if self._latest is None or self._latest[0] != key:
            self._latest = None
            plan = self._anew(key, began)
            if not plan.late:
                self._latest = key, plan
            return plan
        if self._service is not None:
            # Free this mini-batch's place in the queue
            self._service.take(key, 0.0)
        return replace(self._latest[1], hidden_s=0.0)

    def _anew(self, key: tuple[int, ...], began: float) -> IterationPlan:
        if not self._static_takes(key):
            if self._service is not None:
                # Discard a plan that was requested before `change`
                self._service.take(key, 0.0)
            return self._planned(answer(self._request, key), began, None)
        # Without processes, or with a full queue, this process plans while the step waits.
        if self._service is None or not self._service.submit(key):
            return self._planned(answer(self._chosen, key), began, self.static)
        # Wait for the plan, unless processes have just started after a recovery.
        starting = self._hurries and not self._service.answered
        planned = self._service.take(key, 0.0 if starting else self._policy.patience_s)
        return self._planned(planned, began, self.static) if planned is not None else self._quick(key, began)

    def change(self, request: PlanRequest, static: int | None) -> None:
        """Use other candidates or costs, and plan announced mini-batches again."""
        self._request = request
        self.static = static
        self._chosen = request if static is None else request.only(static)
        self._last = static or 0
        self._latest = None
        if self._service is not None:
            self._service.change(self._chosen)

    def take_over(self, before: IterationPlanner | None) -> None:
        """Take over a planner's processes, not its mini-batches; plan quickly until a process answers."""
        self._hurries = True
        if before is None:
            return
        self._service = before._service
        before._service = None
        if self._service is not None:
            self._service.change(self._chosen, forget=True)

    def close(self) -> None:
        if self._service is not None:
            self._service.close()

    def _static_takes(self, lengths: Sequence[int]) -> bool:
        longest = max(lengths, default=0)
        return self.static is None or self._request.guessed or self._request.reach(self.static) >= longest

    def _planned(self, planned: PlanAnswer, began: float, static: int | None) -> IterationPlan:
        if planned.choice is None:
            raise planned.error or AssertionError("an answer without a choice has an error")
        choice = planned.choice
        # Planning processes know only the static candidate, as number 0.
        self._last = choice.index if static is None else static
        assignment = Assignment(choice.assignment.micro_batches, choice.assignment.lengths)
        waited = time.perf_counter() - began
        hidden = max(0.0, planned.seconds - waited)
        seconds = 0.0 if self._request.guessed else self._request.seconds(self._last, assignment)
        _LOG.debug("planned %s micro-batches of strategy %d, waited %.3g s", assignment.counts, self._last, waited)
        return IterationPlan(self._last, assignment, seconds, hidden)

    def _quick(self, lengths: tuple[int, ...], began: float) -> IterationPlan:
        longest = max(lengths, default=0)
        request = self._request.reaching(longest)
        reach = [request.reach(i) for i in range(len(request.candidates))]
        chosen = self._last if reach[self._last] >= longest else reach.index(max(reach))
        assignment = assign_pipelines(request.candidates[chosen], lengths)
        _LOG.info(
            "the plan was not ready after %.2g s: strategy %d is used, with the sequences assigned longest first",
            time.perf_counter() - began,
            chosen,
        )
        return IterationPlan(chosen, assignment, 0.0, 0.0, late=True)

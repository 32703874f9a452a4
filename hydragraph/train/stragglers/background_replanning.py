"""Planning for slow ranks in a separate process."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from hydragraph.cluster.module_process import GONE, Worker
from hydragraph.cost.costs import Costs
from hydragraph.errors import Unsupported
from hydragraph.planner.policy import Policy, static_or_dynamic
from hydragraph.planner.request import PlanRequest
from hydragraph.spec.strategy import Strategy

_LOG = logging.getLogger(__name__)

# Seconds until a search returns its best plan so far
DEADLINE_S = 20.0
# Attempts per question: the process may be killed
ATTEMPTS = 2
_NONE_FITS = "no strategy can run on the remaining ranks"


@dataclass(frozen=True)
class ReplanQuestion:
    """Inputs of a search for a plan.

    Attributes:
        costs: costs with current slowdowns and home.
        deadline_s: time limit; None: no limit, so that the result is deterministic.
        at_once: whether to plan quickly, from one mini-batch.
        streaming: whether stages may stream weights, as in ZeRO-3.
    """

    costs: Costs
    lengths: tuple[tuple[int, ...], ...]
    running: tuple[Strategy, ...]
    first: tuple[Strategy, ...]
    request: PlanRequest
    policy: Policy
    deadline_s: float | None = DEADLINE_S
    at_once: bool = False
    streaming: bool = True


@dataclass(frozen=True)
class Replanned:
    """Answer to a ReplanQuestion.

    Attributes:
        static: index of the strategy for all mini-batches; None: each mini-batch gets its own.
        before_s, after_s: expected mean seconds per step of the running and the new plan.
        refused: reason why no strategy was found, or "".
    """

    strategies: tuple[Strategy, ...] = ()
    request: PlanRequest | None = None
    static: int | None = None
    before_s: float = 0.0
    after_s: float = 0.0
    took_s: float = 0.0
    refused: str = ""

    @property
    def chosen(self) -> tuple[Strategy, ...]:
        return self.strategies if self.static is None else (self.strategies[self.static],)


def with_caches(costs: Costs, before: Costs | None) -> Costs:
    """Return `costs`, with `before`'s caches if only health and home differ."""
    inputs = costs.profile, costs.cluster, costs.corrections
    if before is None or (before.profile, before.cluster, before.corrections) != inputs:
        return costs
    return before.changed(health=costs.health, home=costs.home)


def replan(question: ReplanQuestion) -> Replanned:
    began = time.perf_counter()
    try:
        replanned = _at_once(question) if question.at_once else _at_length(question)
    except Unsupported as error:
        replanned = Replanned(refused=str(error))
    return replace(replanned, took_s=time.perf_counter() - began)


def _at_once(question: ReplanQuestion) -> Replanned:
    # This import loads numba and scipy
    from hydragraph.planner.immediate_plan import plan_at_once, sample
    from hydragraph.planner.price_mini_batches import traffic_in_line
    from hydragraph.spec.training_workload import Workload

    costs = question.costs
    workload = Workload(lengths=question.lengths)
    estimate = plan_at_once(costs, workload, (*question.running, *question.first))
    if estimate is None:
        return Replanned(refused=_NONE_FITS)
    choice = question.request.choose(sample(workload))
    try:
        before = traffic_in_line(costs, question.running[choice.index])(choice.assignment)
    except Unsupported:
        # The running plan uses a lost rank
        before = math.inf
    request = PlanRequest((estimate.pipelines,), (estimate.charge,), question.policy.seed)
    return Replanned((estimate.strategy,), request, 0, before, estimate.seconds)


def _at_length(question: ReplanQuestion) -> Replanned:
    from hydragraph.planner.plan import plan
    from hydragraph.spec.training_workload import Workload

    costs = question.costs
    try:
        # Without slow ranks, changed costs caused the search.
        several = len(costs.cluster.types) > 1 or not costs.health.rates
        planned = plan(
            costs,
            Workload(lengths=question.lengths),
            method="auto" if several else "straggler",
            running=question.running[0],
            deadline_s=question.deadline_s,
            streaming=question.streaming,
        )
        strategies = planned.strategies
    except Unsupported as error:
        strategies = ()
        _LOG.info("no other plan was found: %s", error)
    # Compare the plan with running and initial strategies, without duplicates.
    every = tuple(dict.fromkeys((*question.running, *question.first, *strategies)))
    able = tuple(s for s in every if _takes(costs, s))
    if not able:
        return Replanned(refused=_NONE_FITS)
    request = PlanRequest(tuple(map(costs.pipelines, able)), tuple(map(costs.fixed, able)), question.policy.seed)
    decision = static_or_dynamic(request.candidates, request.charges, question.lengths, question.policy)
    count = len(question.lengths[: question.policy.sample])
    # seconds: total for each strategy alone, then for the best one per mini-batch.
    after = decision.seconds[-1 if decision.dynamic else decision.static or 0] / count
    static = None if decision.dynamic else decision.static
    return Replanned(able, request, static, _as_now(question), after)


def _takes(costs: Costs, strategy: Strategy) -> bool:
    try:
        return all(cost.max_len > 0 for cost in costs.pipelines(strategy))
    except Unsupported:
        return False


def _as_now(question: ReplanQuestion) -> float:
    lengths = question.lengths[: question.policy.sample]
    total = 0.0
    for mini_batch in lengths:
        choice = question.request.choose(mini_batch)
        try:
            total += question.costs.seconds(question.running[choice.index], choice.assignment)
        except Unsupported:
            return math.inf
    return total / len(lengths)


class Replanner:
    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._thread: threading.Thread | None = None
        self._answer: Replanned | None = None
        self._unwanted = False
        self._closing = False

    @property
    def busy(self) -> bool:
        # Drop an unwanted answer that has arrived, so that the next question can be sent.
        if self._unwanted and self._thread is not None and not self._thread.is_alive():
            self.answer()
        return self._thread is not None

    def start(self) -> None:
        self._closing = False
        self._worker = self._worker or _started()

    def ask(self, question: ReplanQuestion) -> None:
        """Send a question; if the process dies, restart it once."""
        assert not self.busy, "one question at a time"
        self._answer = None
        self.start()
        self._thread = threading.Thread(target=self._serve, args=(question,), name="hydragraph-replanner", daemon=True)
        self._thread.start()

    def answer(self) -> Replanned | None:
        """Return the answer once; None until it arrives."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        unwanted, self._unwanted = self._unwanted, False
        return None if unwanted else self._answer

    def forget(self) -> None:
        self._unwanted = self._thread is not None

    def close(self) -> None:
        self._closing = True
        # The thread may restart a killed process once, so repeat.
        while (worker := self._worker) is not None:
            worker.process.kill()
            if self._thread is not None:
                # The thread must end before its pipes close
                self._thread.join()
            if self._worker is worker:
                self._end(worker)

    def _serve(self, question: ReplanQuestion) -> None:
        for _ in range(ATTEMPTS):
            worker = self._worker = self._worker or _started()
            if self._closing:
                # `close` ends the process
                return
            try:
                self._answer = cast(Replanned, worker.ask(question))
                return
            except GONE as error:
                self._answer = Replanned(refused=f"the planning process has ended ({error!r})")
                self._end(worker)
                if self._closing or self._unwanted:
                    return

    def _end(self, worker: Worker) -> None:
        self._worker = None
        worker.end()


_started = partial(Worker, "hydragraph.train.stragglers.replanning_worker")

"""Another plan for ranks of which some are slow: made in a process of its own, while training goes on.

`replan` is the pure part: a question, with all that a plan depends on, to an answer: a good one at once, or the best
one after a while, as the question says. `Replanner` asks it of a process that lives as long as the run, in a thread
that waits for the answer; training looks now and then whether it is there.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, cast

from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.errors import Unsupported
from hydragraph.planner.policy import Policy, static_or_dynamic
from hydragraph.planner.request import PlanRequest
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.health import Health
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

_LOG = logging.getLogger(__name__)

DEADLINE_S = 20.0  # after which the best plan so far is taken
ATTEMPTS = 2  # at an answer; a process may be killed for want of memory that was another's
# What a pipe to a process that is gone raises.
_GONE = (BrokenPipeError, EOFError, OSError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Question:
    """What a plan depends on.

    Attributes:
        profile, cluster, home: what the run has, healthy. State stays where it lives: only strategies change.
        health: of the ranks now.
        lengths: sequence lengths of the last mini-batches.
        running: what the run chooses from now.
        first: what it chose from at first, which is the best again, perhaps, once all are well.
        request: by what it chooses from those that run, with rates as they were known then.
        policy: how mini-batches are planned.
        deadline_s: after which the best plan so far is taken; None: equal questions have equal answers.
        at_once: answer with a good plan soon, known by an estimate of one mini-batch; the deadline is another then.
    """

    profile: Profile
    cluster: Cluster
    home: Home
    health: Health
    lengths: tuple[tuple[int, ...], ...]
    running: tuple[Strategy, ...]
    first: tuple[Strategy, ...]
    request: PlanRequest
    policy: Policy
    deadline_s: float | None = DEADLINE_S
    at_once: bool = False


@dataclass(frozen=True)
class Replanned:
    """An answer.

    Attributes:
        strategies: to choose from now.
        request: by what.
        static: the strategy to stay with; None: choose for every mini-batch.
        before_s, after_s: what a step is expected to take, on average, under the health that was asked for: as it is
            planned now, and under the answer.
        took_s: seconds of planning.
        refused: why there is no answer; "" where there is one.
    """

    strategies: tuple[Strategy, ...]
    request: PlanRequest | None
    static: int | None
    before_s: float
    after_s: float
    took_s: float
    refused: str = ""


def costs_of(question: Question, before: Costs | None = None) -> Costs:
    """Return the costs that a question goes by.

    Args:
        before: of an earlier question: what depends on neither health nor home stays known.
    """
    if before is not None and (before.profile, before.cluster) == (question.profile, question.cluster):
        return before.changed(health=question.health, home=question.home)
    return Costs(question.profile, question.cluster, question.health, home=question.home)


def replan(question: Question, costs: Costs | None = None) -> Replanned:
    """Find strategies for ranks of these rates, and say what they gain over going on as now.

    What runs now stays among the candidates: often it is enough to give a slow pipeline fewer sequences.

    Args:
        costs: see `costs_of`.
    """
    began = time.perf_counter()
    costs = costs or costs_of(question)
    found = _at_once(question, costs) if question.at_once else _at_length(question, costs)
    return replace(found, took_s=time.perf_counter() - began)


def _at_once(question: Question, costs: Costs) -> Replanned:
    from hydragraph.planner.immediate_plan import plan_at_once, sample  # needs numba and scipy
    from hydragraph.planner.price_mini_batches import traffic_in_line
    from hydragraph.spec.training_workload import Workload

    workload = Workload(lengths=question.lengths)
    others = (*question.running, *question.first)
    try:
        found = plan_at_once(costs, workload, others)
    except Unsupported as error:
        return _refusal(str(error))
    if found is None:
        return _refusal("no strategy fits the ranks there are")
    choice = question.request.choose(sample(workload))
    try:
        before = traffic_in_line(costs, question.running[choice.index])(choice.assignment)
    except Unsupported:
        before = math.inf  # a rank of it is lost
    request = PlanRequest((found.pipelines,), (found.charge,), question.policy.seed)
    return Replanned((found.strategy,), request, 0, before, found.seconds, 0.0)


def _refusal(why: str) -> Replanned:
    return Replanned((), None, None, 0.0, 0.0, 0.0, why)


def _at_length(question: Question, costs: Costs) -> Replanned:
    from hydragraph.planner.plan import plan  # needs numba and scipy, which only planning needs
    from hydragraph.spec.training_workload import Workload

    try:
        several = len(question.cluster.types) > 1
        planned = plan(
            costs,
            Workload(lengths=question.lengths),
            method="auto" if several else "straggler",
            running=question.running[0],
            deadline_s=question.deadline_s,
        )
        found = planned.strategies
    except Unsupported as error:
        found = ()
        _LOG.info("no other plan: %s", error)
    every = tuple(dict.fromkeys((*question.running, *question.first, *found)))
    able = tuple(s for s in every if _takes(costs, s))
    if not able:
        return _refusal("no strategy fits the ranks there are")
    request = PlanRequest(
        tuple(costs.pipelines(s) for s in able), tuple(costs.fixed(s) for s in able), question.policy.seed
    )
    decision = static_or_dynamic(request.candidates, request.charges, question.lengths, question.policy)
    count = len(question.lengths[: question.policy.sample])
    after = decision.seconds[-1 if decision.dynamic else decision.static or 0] / count
    static = None if decision.dynamic else decision.static
    return Replanned(able, request, static, _as_now(question, costs), after, 0.0)


def _takes(costs: Costs, strategy: Strategy) -> bool:
    """Say whether a strategy can run at all: it names no rank that is lost, and fits where state lives now."""
    try:
        return all(cost.max_len > 0 for cost in costs.pipelines(strategy))
    except Unsupported:
        return False


def _as_now(question: Question, costs: Costs) -> float:
    """Return what steps take that are planned as now, on ranks as they are; infinite where one of them is lost."""
    lengths = question.lengths[: question.policy.sample]
    total = 0.0
    for each in lengths:
        choice = question.request.choose(each)
        try:
            strategy = question.running[choice.index]
            total += costs.seconds(strategy, choice.assignment)
        except Unsupported:
            return float("inf")
    return total / len(lengths)


class Replanner:
    """One process that plans, one question at a time; from one to the next it keeps what stays the same."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._answer: Replanned | None = None
        self._unwanted = False  # what is under way
        self._closing = False

    @property
    def busy(self) -> bool:
        """Whether a question is under way, or its answer has not been taken."""
        if self._unwanted and self._thread is not None and not self._thread.is_alive():
            self.answer()
        return self._thread is not None

    @property
    def process(self) -> int | None:
        """The number of the process that plans; None: there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process now, so that the first question need not wait for it."""
        self._closing = False
        if self._process is None:
            self._process = _started()

    def ask(self, question: Question) -> None:
        """Begin to answer a question: twice, where the process ends amid the first answer."""
        assert not self.busy, "one question at a time"
        self._answer = None
        self.start()
        self._thread = threading.Thread(target=self._serve, args=(question,), name="hydragraph-replanner", daemon=True)
        self._thread.start()

    def answer(self) -> Replanned | None:
        """Take the answer; None: it is not there yet."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        unwanted, self._unwanted = self._unwanted, False
        return None if unwanted else self._answer

    def forget(self) -> None:
        """Drop the question under way, if there is one: it is about other ranks. The process stays."""
        self._unwanted = self._thread is not None

    def close(self) -> None:
        """End the process, also while it answers: the thread that waits for it then ends as well."""
        self._closing = True
        while (process := self._process) is not None:
            process.kill()
            if self._thread is not None:
                self._thread.join()  # it must not read from what is closed
            if self._process is process:
                self._end(process)

    def _serve(self, question: Question) -> None:
        for _ in range(ATTEMPTS):
            process = self._process = self._process or _started()
            if self._closing:
                return  # it was not there yet when others were ended: `close` waits for this thread, and ends it
            try:
                pickle.dump(question, cast(IO[bytes], process.stdin))
                cast(IO[bytes], process.stdin).flush()
                self._answer = cast(Replanned, pickle.load(cast(IO[bytes], process.stdout)))
                return
            except _GONE as error:
                self._answer = _refusal(f"the process that plans has ended ({error!r})")
                self._end(process)
                if self._closing or self._unwanted:
                    return

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        _reap(process)


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was to be written finds nobody
            cast(IO[bytes], pipe).close()


def _started() -> subprocess.Popen[bytes]:
    # The process must import this very package, installed or not.
    package = str(Path(__file__).parents[3])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "hydragraph.train.stragglers.replanning_worker",
        ],  # -P: nothing comes from the current directory
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )

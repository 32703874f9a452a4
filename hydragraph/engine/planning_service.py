"""Planning of mini-batches in worker processes during training."""

from __future__ import annotations

import logging
import queue
import threading
from typing import cast

from hydragraph.cluster.module_process import GONE, Worker
from hydragraph.errors import Unsupported
from hydragraph.planner.request import PlanAnswer, PlanRequest

_LOG = logging.getLogger(__name__)

Lengths = tuple[int, ...]

# Maximum attempts to plan a mini-batch
ATTEMPTS = 3


class PlanService:
    """Worker processes that plan mini-batches from a bounded queue, and are replaced if they die.

    Args:
        ahead: maximum number of mini-batches that are queued, in planning, or planned but not taken.
    """

    def __init__(self, request: PlanRequest, workers: int = 1, ahead: int = 4) -> None:
        self._request = request
        self._ahead = ahead
        self._jobs: queue.Queue[Lengths | None] = queue.Queue()
        # None means that the plan is not ready
        self._plans: dict[Lengths, PlanAnswer | None] = {}
        self._changed = threading.Condition()
        self._workers: list[Worker | None] = [None] * workers
        # The request's version
        self._number = 0
        # Version of the request that each process has, or -1
        self._told = [-1] * workers
        self._closed = False
        self.answered = False
        self._threads = [
            threading.Thread(target=self._tend, args=(i,), name=f"hydragraph-planner-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lengths: Lengths) -> bool:
        with self._changed:
            if lengths in self._plans:
                return True
            if len(self._plans) >= self._ahead or self._closed:
                return False
            self._plans[lengths] = None
        self._jobs.put(lengths)
        return True

    def take(self, lengths: Lengths, patience_s: float) -> PlanAnswer | None:
        """Remove and return a mini-batch's plan; None if not requested or not ready in time."""
        with self._changed:
            if lengths not in self._plans:
                return None
            self._changed.wait_for(lambda: self._plans[lengths] is not None, patience_s)
            return self._plans.pop(lengths)

    def change(self, request: PlanRequest, forget: bool = False) -> None:
        """Use new candidates and costs; plan submitted mini-batches again or, if `forget`, discard them."""
        with self._changed:
            self._request = request
            self._number += 1
            # None marks plans to be made again. Mini-batches in work are queued again:
            # their plans have the old number.
            self._plans = {} if forget else dict.fromkeys(self._plans)
            again = list(self._plans)
        for lengths in again:
            self._jobs.put(lengths)

    def close(self) -> None:
        with self._changed:
            self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for worker in self._workers:
            if worker is not None:
                worker.process.kill()
        for thread in self._threads:
            thread.join()

    def _tend(self, index: int) -> None:
        while (lengths := self._jobs.get()) is not None and not self._closed:
            with self._changed:
                number = self._number
                planned = lengths not in self._plans or self._plans[lengths] is not None
            # A mini-batch may be queued twice
            if planned:
                continue
            plan = self._answered(index, lengths)
            with self._changed:
                # Discard the plan if its step used the quick plan, or the request has changed.
                if lengths in self._plans and number == self._number:
                    self._plans[lengths] = plan
                self._changed.notify_all()
        self._end(index)

    def _answered(self, index: int, lengths: Lengths) -> PlanAnswer:
        for _ in range(ATTEMPTS):
            try:
                return self._ask(index, lengths)
            except GONE:
                if self._closed:
                    break
                _LOG.info("planning process %d died; another process plans its mini-batch", index)
                self._end(index)
            except Exception as raised:
                # Keep this thread alive
                return PlanAnswer(None, raised, 0.0)
        died = Unsupported(
            f"{ATTEMPTS} planning processes died while they planned one mini-batch",
            where="planner",
            remedy="look at their output on stderr, or plan without processes (Policy(workers=0))",
        )
        return PlanAnswer(None, died, 0.0)

    def _ask(self, index: int, lengths: Lengths) -> PlanAnswer:
        worker = self._workers[index] = self._workers[index] or Worker("hydragraph.engine.planning_worker")
        with self._changed:
            # Send the request only if the process does not have this version.
            request = None if self._told[index] == self._number else self._request
            self._told[index] = self._number
        answer = cast(PlanAnswer, worker.ask((request, lengths)))
        self.answered = True
        return answer

    def _end(self, index: int) -> None:
        worker, self._workers[index], self._told[index] = self._workers[index], None, -1
        if worker is not None:
            worker.end()

"""Process that plans mini-batches on request."""

from __future__ import annotations

from collections.abc import Callable

from hydragraph.cluster.module_process import serve
from hydragraph.planner.request import PlanAnswer, PlanRequest, answer, get_ready

Question = tuple[PlanRequest | None, tuple[int, ...]]


def prepare() -> Callable[[Question], PlanAnswer]:
    # Loads lazy modules
    get_ready()
    current: PlanRequest | None = None

    def plan(question: Question) -> PlanAnswer:
        nonlocal current
        request, lengths = question
        current = current if request is None else request
        assert current is not None, "the first question must contain a request"
        return answer(current, lengths)

    return plan


if __name__ == "__main__":
    serve(prepare)

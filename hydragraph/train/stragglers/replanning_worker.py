"""Planning process, which answers questions with plans."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from hydragraph.cluster.module_process import serve
from hydragraph.cost.costs import Costs
from hydragraph.train.stragglers.background_replanning import Replanned, ReplanQuestion, replan, with_caches


def prepare() -> Callable[[ReplanQuestion], Replanned]:
    costs: Costs | None = None

    def answer(question: ReplanQuestion) -> Replanned:
        nonlocal costs
        try:
            costs = with_caches(question.costs, costs)
            return replan(replace(question, costs=costs))
        except Exception as error:
            # Training continues and reports this error
            return Replanned(refused=f"{type(error).__name__}: {error}")

    return answer


if __name__ == "__main__":
    os.nice(5)
    serve(prepare)

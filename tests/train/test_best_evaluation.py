"""The lowest evaluation loss of a run, compared with a search over all prefixes."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hydragraph.train.best_evaluation import lowest, without_improvement
from hydragraph.train.step_metrics import Metrics

LOSSES = st.lists(st.one_of(st.none(), st.integers(0, 5).map(float), st.just(math.nan)), max_size=12)


def history(losses: list[float | None]) -> list[Metrics]:
    return [
        Metrics(i + 1, 1.0, 1.0, 1.0, 1, 1.0, 1.0, "<tp1,pp1>", 1, (1,), eval_loss=loss)
        for i, loss in enumerate(losses)
    ]


@given(LOSSES, st.sets(st.integers(1, 12)))
def test_lowest_is_the_first_minimum(losses: list[float | None], among: set[int]) -> None:
    evaluated = {i + 1: x for i, x in enumerate(losses) if x is not None and not math.isnan(x)}
    for steps, chosen in ((set(evaluated), lowest(history(losses))), (among, lowest(history(losses), among))):
        candidates = {step: loss for step, loss in evaluated.items() if step in steps}
        least = min(candidates.values(), default=None)
        assert chosen == next((step for step, loss in candidates.items() if loss == least), None)


@given(LOSSES, st.integers(0, 3).map(float))
def test_evaluations_without_improvement(losses: list[float | None], least: float) -> None:
    evaluated = [math.inf if math.isnan(x) else x for x in losses if x is not None]
    best, last = math.inf, -1
    for i, loss in enumerate(evaluated):
        if loss < best - least:
            best, last = loss, i
    assert without_improvement(history(losses), least) == len(evaluated) - 1 - last


def test_losses_on_other_data_do_not_count() -> None:
    earlier = [replace(metrics, eval_data="a") for metrics in history([1.0, 0.5])]
    later = [replace(metrics, step=metrics.step + 2, eval_data="b") for metrics in history([4.0, None, 3.0, 3.5])]
    assert lowest([*earlier, *later]) == 5
    assert without_improvement([*earlier, *later], 0.0) == 1

"""Search for a run's best evaluation."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

from hydragraph.train.step_metrics import Metrics


def lowest(history: Iterable[Metrics], among: Container[int] | None = None) -> int | None:
    """Return the first step with the lowest evaluation loss, or None if no step was evaluated."""
    losses = [(loss, step) for step, loss in _comparable(history) if not math.isnan(loss)]
    return min((loss for loss in losses if among is None or loss[1] in among), default=(0.0, None))[1]


def without_improvement(history: Iterable[Metrics], least: float) -> int:
    """Count the evaluations since the best loss last improved by more than `least`."""
    best, count = math.inf, 0
    for _, loss in _comparable(history):
        if loss < best - least:
            best, count = loss, 0
        else:
            count += 1
    return count


def _comparable(history: Iterable[Metrics]) -> list[tuple[int, float]]:
    # Losses on other evaluation data cannot be compared.
    evaluated = [(m.eval_data, m.step, m.eval_loss) for m in history if m.eval_loss is not None]
    return [(step, loss) for data, step, loss in evaluated if data == evaluated[-1][0]]

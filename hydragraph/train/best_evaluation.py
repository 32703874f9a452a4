"""Search for a run's best evaluation."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

from hydragraph.train.step_metrics import Metrics


def lowest(history: Iterable[Metrics], among: Container[int] | None = None) -> int | None:
    """Return the first step with the lowest evaluation loss, or None if no step was evaluated."""
    losses = [(m.eval_loss, m.step) for m in history if m.eval_loss is not None and not math.isnan(m.eval_loss)]
    return min((loss for loss in losses if among is None or loss[1] in among), default=(0.0, None))[1]


def without_improvement(history: Iterable[Metrics], least: float) -> int:
    """Count the evaluations since the lowest loss last fell by more than `least`."""
    best, count = math.inf, 0
    for metrics in history:
        if metrics.eval_loss is None:
            continue
        if metrics.eval_loss < best - least:
            best, count = metrics.eval_loss, 0
        else:
            count += 1
    return count

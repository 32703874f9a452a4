"""The loss curve as a picture: one colour per strategy, a smoothed line, and the held-out loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hydragraph.elastic.events import Event
from hydragraph.train.metrics import Metrics

_MARKS = {
    "straggler": "C3",
    "recovered": "C2",
    "switch": "C0",
    "fault": "black",
    "leave": "C5",
    "join": "C4",
}


def matplotlib_installed() -> bool:
    """Say whether pictures can be drawn."""
    return find_spec("matplotlib") is not None


def write_picture(metrics: Sequence[Metrics], path: Path, events: Sequence[Event] = ()) -> None:
    """Draw the losses over the steps to a PNG file, which is replaced only when the new one is complete.

    Args:
        metrics: of all steps so far, at least one.
        path: of the file.
        events: marked as lines where ranks became slow or well, were lost, left or came, and strategies were switched.
    """
    # Not pyplot: the object interface needs no display and leaves the user's backend alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_steps(axes, metrics)
    _draw_evaluations(axes, metrics)
    _draw_events(axes, events)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"{len({m.strategy for m in metrics})} strategies, {sum(m.tokens for m in metrics):,} tokens")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return weighted means over neighbours, of `weight`^distance, which neither lag behind a curve nor run ahead.

    So many neighbours after a value count as there are before it: where a curve begins steeply, so does its mean. Near
    the end there are fewer after it, and earlier ones decide.

    Args:
        values: to smooth.
        weight: of the next neighbour, in [0, 1).
    """
    given = np.asarray(values, dtype=np.float64)
    sums = given.copy()
    weights = np.ones(len(given))
    for distance in range(1, _reach(weight, len(given)) + 1):
        part = weight**distance
        sums[distance:] += part * given[:-distance]
        weights[distance:] += part
        inner = slice(distance, len(given) - distance)  # with as many before them
        sums[inner] += part * given[2 * distance :]
        weights[inner] += part
    return [float(value) for value in sums / weights]


def _reach(weight: float, count: int) -> int:
    """Return how far neighbours count: those beyond have less than a thousandth of the weight."""
    far = math.ceil(math.log(1e-3) / math.log(weight)) if weight > 0 else 0
    return min(far, count - 1)


def _draw_steps(axes: Any, metrics: Sequence[Metrics]) -> None:
    strategies = sorted({m.strategy for m in metrics})
    names = [strategy.partition("@")[0] for strategy in strategies]
    for i, strategy in enumerate(strategies):
        chosen = [m for m in metrics if m.strategy == strategy]
        axes.plot(
            [m.step for m in chosen],
            [m.loss for m in chosen],
            ".",
            color=f"C{i}",
            alpha=0.6,
            markersize=5,
            # A fingerprint says nothing to people, unless it is all that tells two strategies apart.
            label=names[i] if names.count(names[i]) == 1 else strategy,
        )
    axes.plot(
        [m.step for m in metrics], smoothed([m.loss for m in metrics]), color="0.25", linewidth=1.2, label="smoothed"
    )


def _draw_evaluations(axes: Any, metrics: Sequence[Metrics]) -> None:
    evaluated = [m for m in metrics if m.eval_loss is not None]
    if evaluated:
        losses = [m.eval_loss for m in evaluated]
        axes.plot([m.step for m in evaluated], losses, "kD--", markersize=4, linewidth=0.8, label="held out")


def _draw_events(axes: Any, events: Sequence[Event]) -> None:
    told: set[str] = set()
    for event in events:
        if event.event in _MARKS and event.done:
            label = None if event.event in told else event.event
            told.add(event.event)
            axes.axvline(event.step, color=_MARKS[event.event], linestyle=":", linewidth=1.2, label=label)

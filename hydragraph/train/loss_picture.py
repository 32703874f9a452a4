"""Picture of the loss curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hydragraph.data.atomic_write import save_figure
from hydragraph.train.goodput import account
from hydragraph.train.step_metrics import Metrics, strategy_names
from hydragraph.train.stragglers.run_events import TITLES, Name, RunEvent

_SIGNS: Mapping[Name, str] = {
    "fault": "x",
    "leave": "<",
    "join": ">",
    "straggler": "v",
    "recovered": "^",
    "switch": "D",
    "migrate": "s",
}
_NAMED = 12


def matplotlib_installed() -> bool:
    return find_spec("matplotlib") is not None


def write_picture(metrics: Sequence[Metrics], path: Path, events: Sequence[RunEvent] = ()) -> None:
    # pyplot would change the user's backend.
    from matplotlib.figure import Figure

    shown = [event for event in events if event.event in _SIGNS and event.done]
    kinds = [kind for kind in TITLES if any(event.event == kind for event in shown)]
    pauses = [event for event in events if event.event == "resumed" and event.seconds > 0]
    rows = len(kinds) + bool(pauses)
    figure = Figure(figsize=(9, 5 + 0.28 * rows), layout="constrained")
    if rows:
        axes, below = figure.subplots(2, sharex=True, height_ratios=(5, 0.28 * rows + 0.15))
        _draw_events(axes, below, shown, kinds, pauses)
        below.set_xlabel("step")
    else:
        axes = figure.add_subplot()
        axes.set_xlabel("step")
    _draw_steps(axes, metrics)
    _draw_evaluations(axes, metrics)
    axes.set_ylabel(f"loss ({metrics[-1].loss_unit})")
    axes.set_title(_title(metrics, events))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_figure(figure, path)


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return weighted means of neighboring values, with weight `weight`^d at distance d."""
    curve = np.asarray(values, dtype=np.float64)
    sums = curve.copy()
    weights = np.ones(len(curve))
    # Weights beyond `reach` are below 1/1000.
    reach = math.ceil(math.log(1e-3) / math.log(weight)) if weight > 0 else 0
    for distance in range(1, min(reach, len(curve) - 1) + 1):
        part = weight**distance
        sums[distance:] += part * curve[:-distance]
        weights[distance:] += part
        inner = slice(distance, len(curve) - distance)
        sums[inner] += part * curve[2 * distance :]
        weights[inner] += part
    return [float(value) for value in sums / weights]


def _draw_steps(axes: Any, metrics: Sequence[Metrics]) -> None:
    names = sorted(strategy_names(metrics).items())
    for i, (strategy, label) in enumerate(names):
        chosen = [m for m in metrics if m.strategy == strategy]
        steps, losses = [m.step for m in chosen], [m.loss for m in chosen]
        axes.plot(steps, losses, ".", color=f"C{i}", alpha=0.6, markersize=5, label=label)
    smooth = smoothed([m.loss for m in metrics])
    axes.plot([m.step for m in metrics], smooth, color="0.25", linewidth=1.2, label="smoothed")


def _draw_evaluations(axes: Any, metrics: Sequence[Metrics]) -> None:
    evaluated = [m for m in metrics if m.eval_loss is not None]
    if evaluated:
        steps, losses = [m.step for m in evaluated], [m.eval_loss for m in evaluated]
        axes.plot(steps, losses, "kD--", markersize=4, linewidth=0.8, label=evaluated[-1].evaluated)


def _draw_events(
    axes: Any, below: Any, shown: Sequence[RunEvent], kinds: Sequence[Name], pauses: Sequence[RunEvent]
) -> None:
    names = [TITLES[kind] for kind in kinds]
    for row, kind in enumerate(kinds):
        steps = [event.step for event in shown if event.event == kind]
        below.plot(steps, [row] * len(steps), _SIGNS[kind], color="0.15", markersize=6, markerfacecolor="none")
        for step in set(steps):
            axes.axvline(step, color="0.5", linestyle=":", linewidth=0.8)
    if pauses:
        names.append("pause")
        longest = max(event.seconds for event in pauses)
        sizes = [20 + 120 * event.seconds / longest for event in pauses]
        below.scatter([event.step for event in pauses], [len(kinds)] * len(pauses), sizes, color="0.15", alpha=0.35)
        for event in sorted(pauses, key=lambda event: -event.seconds)[:_NAMED]:
            place = (event.step, len(kinds))
            below.annotate(f" {event.seconds:.2g} s", place, (5, 0), textcoords="offset points", va="center", size=7)
    below.set_yticks(range(len(names)), names, fontsize="small")
    below.set_ylim(len(names) - 0.5, -0.5)
    below.grid(alpha=0.3)
    below.tick_params(axis="y", length=0)


def _title(metrics: Sequence[Metrics], events: Sequence[RunEvent]) -> str:
    count = len({m.strategy for m in metrics})
    title = f"{count} strateg{'y' if count == 1 else 'ies'}, {sum(m.processed for m in metrics):,} tokens"
    wall_time = account(metrics, events) if events else None
    if wall_time is None or wall_time.goodput is None:
        return title
    return f"{title}; goodput {wall_time.goodput:.0%} of the undisturbed {wall_time.rate:,.0f} tokens/s"

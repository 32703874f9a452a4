"""Picture of a plan for heterogeneous devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from hydragraph.cost.costs import Costs
from hydragraph.data.atomic_write import save_figure
from hydragraph.planner.plan import Plan
from hydragraph.spec.home_text import consecutive
from hydragraph.spec.pipeline import Stage

TALLEST = 72  # rows
ROW = 0.27  # inches
NAMED = 10
# Backgrounds for dark text.
COLOURS = ("#9ec5e8", "#f5bf85", "#a8d5a2", "#d9b3e0", "#f2a9a9", "#c9c28f", "#8fd3cf", "#e3a9c8", "#b9bec9", "#d2b49c")
_IDLE = "#8a8a8a"
_LOST = "#c0392b"
_WIDTH = 6.4  # inches
_LETTER = 0.062  # inches


@dataclass(frozen=True)
class _StageBar:
    top: int
    bottom: int
    first: int
    last: int
    pipeline: int
    text: str


def write_device_picture(plan: Plan, costs: Costs, path: Path) -> None:
    save_figure(device_figure(plan, costs), path)


def device_figure(plan: Plan, costs: Costs) -> Any:
    from matplotlib.figure import Figure

    rows = _rows(costs)
    height = 1.7 + ROW * min(len(rows), TALLEST)
    figure = Figure(figsize=(_WIDTH + 5, height), layout="constrained")

    layers, memory = figure.subplots(1, 2, sharey=True, width_ratios=(_WIDTH, 2.4))
    _draw_layers(layers, plan, costs, rows)
    _draw_memory(memory, plan, rows)
    _draw_labels(layers, costs, rows)
    figure.suptitle(_title(plan), fontsize=10, x=0.01, ha="left")
    shown = _patches(plan, costs)
    figure.legend(handles=shown, loc="outside lower left", ncols=min(4, len(shown)), fontsize="x-small", frameon=False)
    return figure


def _rows(costs: Costs) -> list[int | None]:
    # rows: each node's ranks in order, after a None for its heading
    rows: list[int | None] = []
    for _, ranks in groupby(range(costs.ranks), costs.cluster.node_of):
        rows += [None, *ranks]
    return rows


def _title(plan: Plan) -> str:
    tokens = sum(plan.assignment.lengths)
    return f"{tokens:,} tokens per iteration in {plan.seconds:.4g} s, at most {plan.gap:.1%} above the lower bound"


def _draw_layers(axes: Any, plan: Plan, costs: Costs, rows: list[int | None]) -> None:
    from matplotlib.patches import Rectangle

    layers = plan.strategy.layers
    for bar in _bars(plan, rows):
        colour = COLOURS[bar.pipeline % len(COLOURS)]
        corner = (bar.first, bar.top - 0.42)
        size = (bar.last - bar.first, bar.bottom - bar.top + 0.84)
        axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor="#444444", linewidth=0.6))
        if len(rows) <= TALLEST or bar.bottom - bar.top + 1 >= 0.8 * len(rows) / TALLEST:
            _write(axes, bar, layers)
    for row, rank in enumerate(rows):
        if rank is not None and plan.strategy.place(rank) is None:
            colour = _LOST if rank in costs.health.lost else _IDLE
            axes.barh(row, layers, 0.84, color="none", edgecolor=colour, hatch="////", linewidth=0.3)
    axes.set_xlim(0, layers)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xticks(range(0, layers + 1, max(1, layers // 8)))
    axes.set_xlabel("layers", fontsize="small")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(labelsize="x-small")


def _bars(plan: Plan, rows: list[int | None]) -> Iterator[_StageBar]:
    for i, pipeline in enumerate(plan.strategy.pipelines):
        for j, (first, stage) in enumerate(zip(pipeline.first_layers, pipeline.stages, strict=True)):
            at = sorted(rows.index(rank) for rank in stage.devices)
            for together in consecutive(at):
                last = first + stage.layers
                yield _StageBar(together[0], together[-1], first, last, i, _stage_text(i, j, stage))


def _stage_text(pipeline: int, number: int, stage: Stage) -> str:
    marks = "".join(f", {mark}" for mark in stage.kind.marks)
    return f"p{pipeline} s{number}: {stage.layers} layer{'s' * (stage.layers > 1)}, tp{stage.tp}{marks}"


def _write(axes: Any, bar: _StageBar, layers: int) -> None:
    # The text goes into the bar if it fits, else to the side with more room.
    middle = (bar.top + bar.bottom) / 2
    needed = (len(bar.text) + 2) * _LETTER / _WIDTH * layers
    if needed <= bar.last - bar.first:
        axes.text((bar.first + bar.last) / 2, middle, bar.text, ha="center", va="center", fontsize=7)
    elif bar.first + bar.last <= layers:
        axes.text(bar.last, middle, f" {bar.text}", ha="left", va="center", fontsize=7)
    else:
        axes.text(bar.first, middle, f"{bar.text} ", ha="right", va="center", fontsize=7)


def _draw_memory(axes: Any, plan: Plan, rows: list[int | None]) -> None:
    places = [(row, rank) for row, rank in enumerate(rows) if rank is not None]
    scale, unit = _unit(max(plan.limits))
    most = max(plan.limits) / scale
    colours = []
    for _, rank in places:
        place = plan.strategy.place(rank)
        colours.append("#dddddd" if place is None else COLOURS[place.pipeline % len(COLOURS)])
    at = [row for row, _ in places]
    axes.barh(at, [plan.memory[rank] / scale for _, rank in places], 0.7, color=colours)
    limits = [plan.limits[rank] / scale for _, rank in places]
    axes.vlines(limits, [row - 0.42 for row in at], [row + 0.42 for row in at], color="black", linewidth=1.2)
    if len(rows) <= TALLEST:
        for row, rank in places:
            part = plan.memory[rank] / plan.limits[rank]
            text = f"{plan.memory[rank] / scale:.3g} of {plan.limits[rank] / scale:.3g} ({part:.0%})"
            axes.text(1.04 * most, row, text, va="center", fontsize=6.5)
    axes.set_xlim(0, 1.75 * most if len(rows) <= TALLEST else 1.05 * most)
    axes.set_xticks([0, most / 2, most], [f"{part * most:.3g}" for part in (0, 0.5, 1)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(f"peak memory and its limit ({unit})", fontsize="small")
    axes.tick_params(labelsize="x-small", left=False)


def _unit(size: float) -> tuple[float, str]:
    return next(((scale, name) for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if size >= scale), (1.0, "B"))


def _draw_labels(axes: Any, costs: Costs, rows: list[int | None]) -> None:
    every = -(-len(rows) // TALLEST)
    ticks = []
    names = []
    for row, rank in enumerate(rows):
        if rank is None:
            number = costs.cluster.node_of(rows[row + 1] or 0)
            devices = costs.cluster.node(number).devices
            kind = costs.cluster.type_of(rows[row + 1] or 0)
            if every == 1 or devices >= every:
                text = f"node {number}: {devices} x {kind or 'device'}"
                axes.text(0, row + 0.1, text, va="center", fontsize=7.5, fontweight="bold", color="#333333")
        elif row % every == 0:
            rate = costs.health.rate(rank)
            slow = "" if rate == 1 else "lost, " if rank in costs.health.lost else f"x{rate:.3g}, "
            ticks.append(row)
            names.append(f"{slow}rank {rank}")
    axes.set_yticks(ticks, names, fontsize="x-small")


def _patches(plan: Plan, costs: Costs) -> list[Any]:
    from matplotlib.patches import Patch

    counts = plan.assignment.counts
    patches = [
        Patch(color=COLOURS[i % len(COLOURS)], label=f"p{i}: pipeline {i}, {count} micro-batches")
        for i, count in enumerate(counts[:NAMED])
    ]
    if len(counts) > NAMED:
        patches.append(Patch(color="none", label=f"and {len(counts) - NAMED} more pipelines"))
    idle = [rank for rank in range(costs.ranks) if plan.strategy.place(rank) is None]
    lost = [rank for rank in idle if rank in costs.health.lost]
    for ranks, colour, name in ((lost, _LOST, "lost"), ([r for r in idle if r not in lost], _IDLE, "idle")):
        if ranks:
            patches.append(Patch(facecolor="none", edgecolor=colour, hatch="////", label=name))
    return patches

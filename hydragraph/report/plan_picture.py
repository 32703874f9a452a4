"""Picture of a planned iteration's micro-batches and waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hydragraph.data.atomic_write import save_figure
from hydragraph.report.candidate_comparison import Example, scheme_counts

TALLEST = 40  # rows
# From short to long sequences.
_COLOURS = ("#cfe6c5", "#7cc6b0", "#3f9bb5", "#3b6ea5", "#4c3f86")
# Text on darker colors is white
_DARK = 0.45


def write_plan_picture(example: Example, path: Path) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

    rows = len(example.pipelines)
    figure = Figure(figsize=(10, 1.6 + 0.35 * min(rows, TALLEST)), layout="constrained")

    axes = figure.add_subplot()
    longest = [max(example.lengths[i] for i in m) for batches in example.assignment.micro_batches for m in batches]
    least = min(longest)
    most = max(longest)
    shades = ScalarMappable(LogNorm(least, max(most, least + 1)), LinearSegmentedColormap.from_list("", _COLOURS))
    for row in range(rows):
        _draw_pipeline(axes, example, row, shades)
    axes.set_yticks(range(rows), [f"<tp{tp},pp{pp}>" for tp, pp in example.strategy], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.01 * example.assignment.seconds)
    axes.xaxis.set_major_formatter(EngFormatter(unit="s"))
    axes.set_xlabel("time; numbers are sequences per micro-batch")
    tokens = sum(example.lengths)
    axes.set_title(
        f"{scheme_counts(example.strategy)}: {len(example.lengths)} sequences, {tokens:,} tokens", fontsize=10
    )
    bar = figure.colorbar(shades, ax=axes, label="longest sequence (tokens)")
    bar.ax.yaxis.set_major_locator(FixedLocator(_ticks(least, most, min(rows, TALLEST))))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    save_figure(figure, path)


def _ticks(least: int, most: int, rows: int) -> list[float]:
    count = min(2 + rows // 2, 7)
    if most == least:
        return [least]
    inner = np.geomspace(least, most, count)[1:-1]
    return [least, *(float(f"{length:.2g}") for length in inner), most]


def _draw_pipeline(axes: Any, example: Example, row: int, shades: Any) -> None:
    pipeline = example.pipelines[row]
    at = 0.0
    for micro_batch in example.assignment.micro_batches[row]:
        sizes = [example.lengths[i] for i in micro_batch]
        seconds = pipeline.micro_batch_seconds(sizes)
        longest = max(sizes)
        axes.barh(row, seconds, 0.8, at, color=shades.to_rgba(longest), edgecolor="white", linewidth=0.8)
        if seconds > 0.025 * example.assignment.seconds and len(example.pipelines) <= TALLEST:
            colour = "white" if shades.norm(longest) > _DARK else "0.2"
            axes.text(at + seconds / 2, row, str(len(sizes)), ha="center", va="center", color=colour, fontsize=7)
        at += seconds
    end = example.assignment.by_pipeline[row]
    if end - at > 1e-9:
        axes.barh(row, end - at, 0.8, at, color="none", edgecolor="0.7", hatch="////", linewidth=0)

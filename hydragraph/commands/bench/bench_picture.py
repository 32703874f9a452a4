"""Bar chart of a benchmark report."""

from __future__ import annotations

from pathlib import Path

from hydragraph.commands.bench.bench_table import BenchReport
from hydragraph.data.atomic_write import save_figure


def write_picture(report: BenchReport, path: Path) -> None:
    # pyplot may need a display; a Figure does not.
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(bar.group for bar in report.bars))
    sides = list(dict.fromkeys(bar.side for bar in report.bars))
    figure = Figure(figsize=(9, 1.6 + 0.22 * len(report.bars) + 0.2 * len(groups)), layout="constrained")
    axes = figure.add_subplot()
    at = 0.0
    ticks = []
    for group in groups:
        members = [bar for bar in report.bars if bar.group == group]
        for bar in members:
            axes.barh(at, bar.value, 0.85, color=f"C{sides.index(bar.side) % 10}")
            axes.text(bar.value, at, f" {bar.value:.3g}", va="center", fontsize=7)
            at += 1
        ticks.append(at - (len(members) + 1) / 2)
        at += 0.8
    axes.set_xlim(0, 1.1 * max(bar.value for bar in report.bars) or 1)
    axes.set_yticks(ticks, groups, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(report.unit)
    axes.set_title(report.title, fontsize=10)
    for i, side in enumerate(sides):
        axes.barh(0, 0, color=f"C{i % 10}", label=side)
    axes.legend(fontsize="small")
    save_figure(figure, path)

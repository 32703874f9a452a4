"""Draw the pictures of docs/concepts.md: python docs/pictures/concepts.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import hydragraph as hg

HERE = Path(__file__).parent
STRATEGY = hg.Strategy.parse("<[0,1]x5,[2]x3> + <[3]x8>", layers=8)
COLOURS = ("#9ec5e8", "#6fa8d6", "#f5bf85", "#a8d5a2")  # of ranks 0 to 3
FORWARD, BACKWARD, SUM, MOVE = "#4c8bd0", "#74b06f", "#9a7bc0", "#d08a3e"
EDGE = "#444444"


def figure(height: float, width: float = 9.0) -> tuple[Figure, Any]:
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    axes.axis("off")
    return drawn, axes


def bar(axes: Any, row: float, begin: float, width: float, colour: str, text: str = "", height: float = 0.7) -> None:
    axes.barh(row, width, height, begin, color=colour, edgecolor=EDGE, linewidth=0.7)
    axes.text(begin + width / 2, row, text, ha="center", va="center", fontsize=9)


def label(axes: Any, row: float, text: str, at: float = -0.1) -> None:
    axes.text(at, row, text, ha="right", va="center", fontsize=9)


def save(drawn: Figure, name: str) -> None:
    drawn.savefig(HERE / f"{name}.png", dpi=120, format="png")


def strategy() -> None:
    """Draw the devices and layers of a strategy."""
    drawn, axes = figure(2.4)
    for p, pipeline in enumerate(STRATEGY.pipelines):
        first = 0
        for s, stage in enumerate(pipeline.stages):
            for part, rank in enumerate(stage.devices):
                share = "" if len(stage.devices) == 1 else f", part {part} of {len(stage.devices)}"
                text = f"pipeline {p}, stage {s}: layers {first}-{first + stage.layers - 1}{share}"
                bar(axes, rank, first, stage.layers, COLOURS[0] if p == 0 else COLOURS[2], text)
            first += stage.layers
    for rank in range(4):
        label(axes, rank, f"rank {rank}")
    axes.set_xlim(-0.8, 8.05)
    axes.set_ylim(3.5, -0.9)
    axes.text(0, -0.65, f"{STRATEGY.name}: every row is a device, from the first layer to the last", fontsize=9)
    save(drawn, "concept_strategy")


def home_and_here() -> None:
    """Draw the owners of layer 0 between steps, and the ranks that use it during a step."""
    drawn, axes = figure(3.3)
    label(axes, 0, "home: fp32 weights, moments")
    for rank in range(4):
        bar(axes, 0, 2 * rank, 2, COLOURS[rank], f"rank {rank} owns this quarter")
    label(axes, 2.2, "here, pipeline 0")
    for rank in (0, 1):
        bar(axes, 2.2, 4 * rank, 4, COLOURS[rank], f"rank {rank} computes with its half")
    label(axes, 3.2, "here, pipeline 1")
    bar(axes, 3.2, 0, 8, COLOURS[3], "rank 3 computes with the whole layer")
    for owner in range(4):
        at = 2 * owner + 0.7
        axes.annotate("", (at, 1.8), (at, 0.4), arrowprops={"arrowstyle": "->", "color": MOVE, "lw": 1.6})
        axes.annotate(
            "", (at + 0.6, 0.4), (at + 0.6, 1.8), arrowprops={"arrowstyle": "->", "color": "#c0504d", "lw": 1.6}
        )
    axes.text(0.55, 1.1, "pull", ha="right", va="center", fontsize=9, color=MOVE)
    axes.text(
        1.45, 1.1, "push: gradients, summed by owners", va="center", fontsize=9, color="#c0504d", backgroundcolor="w"
    )
    axes.set_xlim(-2.5, 8.05)
    axes.set_ylim(3.7, -0.9)
    axes.text(0, -0.65, "layer 0, its elements from left to right", fontsize=9)
    save(drawn, "concept_home")


def link() -> None:
    """Draw two layouts, split at every boundary of either layout."""
    drawn, axes = figure(2.8)
    home, here = (0.0, 2.0, 4.0, 6.0, 8.0), (0.0, 5.0, 8.0)
    for row, cuts, name in ((0, home, "home, four owners"), (1.2, here, "here, two unequal shards")):
        label(axes, row, name)
        for i, (a, b) in enumerate(pairwise(cuts)):
            bar(axes, row, a, b - a, COLOURS[i], f"rank {i}")
    label(axes, 2.6, "mutual slices")
    for a, b in pairwise(sorted({*home, *here})):
        source = max(i for i, cut in enumerate(home) if cut <= a)
        target = max(i for i, cut in enumerate(here) if cut <= a)
        bar(axes, 2.6, a, b - a, "#ffffff", "stays" if source == target else f"{source} to {target}")
    for cut in (*home[1:-1], here[1]):
        axes.plot([cut, cut], [-0.4, 3.0], color="#999999", lw=0.8, ls=":", zorder=0)
    axes.set_xlim(-2.3, 8.05)
    axes.set_ylim(3.1, -0.5)
    save(drawn, "concept_link")


def accumulation() -> None:
    """Draw two pipelines with three and two micro-batches, whose gradients are summed for one update."""
    drawn, axes = figure(2.7)
    for row, count, width in ((0, 3, 0.8), (1.1, 2, 1.2)):
        label(axes, row, f"pipeline {int(row > 0)}")
        for i in range(count):
            bar(axes, row, 2 * i * width, width, FORWARD, f"F{i}")
            bar(axes, row, (2 * i + 1) * width, width, BACKWARD, f"B{i}")
        axes.text(2 * count * width / 2, row + 0.52, "every backward adds to G (fp32)", ha="center", fontsize=8)
        axes.annotate("", (5.6, 0.55), (4.85, row), arrowprops={"arrowstyle": "->", "color": "#c0504d", "lw": 1.5})
    bar(axes, 0.55, 5.65, 1.5, SUM, "sum / targets")
    bar(axes, 0.55, 7.15, 0.85, MOVE, "update")
    axes.text(
        6.8, 1.15, "one loss: sum over all targets,\ndivided by how many there are", ha="center", va="top", fontsize=8
    )
    axes.set_xlim(-1.0, 8.05)
    axes.set_ylim(1.9, -0.5)
    save(drawn, "concept_accumulation")


if __name__ == "__main__":
    for draw in (strategy, home_and_here, link, accumulation):
        draw()
        print(f"{draw.__name__} drawn")

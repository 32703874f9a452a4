"""Picture of simulated iterations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydragraph.data.atomic_write import save_figure
from hydragraph.report.facts import STREAMS
from hydragraph.report.number_text import seconds_text
from hydragraph.report.simulation_price import PricedStrategy
from hydragraph.report.timelines import merged_blocks, simulated_bars

MOST = 6  # strategies
TALLEST = 16  # ranks

# Usual colors in papers.
_COMPUTE = {"forward": "#4c8bd0", "backward": "#74b06f", "update": "#9a7bc0"}
_TRAFFIC = {"pull": "#d08a3e", "p2p": "#5f5f5f", "push": "#c0504d", "offload": "#3f97a4"}


def write_timelines(priced: Sequence[PricedStrategy], path: Path) -> None:
    """Draw strategies' timelines to a PNG file."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter

    shown = priced[:MOST]
    heights = [0.5 + 0.3 * min(len(priced_strategy.timeline.ranks), TALLEST) for priced_strategy in shown]  # inches
    figure = Figure(figsize=(12, 1.4 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)
    longest = max(priced_strategy.seconds for priced_strategy in shown)
    for axes, priced_strategy in zip(panels[:, 0], shown, strict=True):
        _draw(axes, priced_strategy, longest)
    panels[-1, 0].set_xlabel("time")
    panels[-1, 0].xaxis.set_major_formatter(EngFormatter(unit="s"))
    patches = [Patch(color=colour, label=name) for name, colour in (_COMPUTE | _TRAFFIC).items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize="small")
    save_figure(figure, path)


def _draw(axes: Any, priced: PricedStrategy, longest: float) -> None:
    timeline = priced.timeline
    ranks = len(timeline.ranks)
    for rank in range(ranks):
        a = timeline.actor_of[rank]
        streams = dict(zip(STREAMS, simulated_bars(timeline.actors[a], timeline.times[a]), strict=True))
        computing = [bar for bar in streams["compute"] if bar.kind in _COMPUTE]
        for bar in merged_blocks(computing):
            seconds = bar.end - bar.begin
            edge = 0.4 if seconds > 0.004 * longest else 0.0
            axes.barh(rank, seconds, 0.62, bar.begin, color=_COMPUTE[bar.kind], edgecolor="white", linewidth=edge)
            if bar.micro_batch >= 0 and seconds > 0.012 * longest and ranks <= TALLEST:
                middle = (bar.begin + bar.end) / 2
                axes.text(middle, rank, str(bar.micro_batch), ha="center", va="center", color="w", fontsize=6)
        for i, (stream, colour) in enumerate(_TRAFFIC.items()):
            moving = [(bar.begin, bar.end - bar.begin) for bar in streams[stream]]
            axes.broken_barh(moving, (rank + 0.32 + 0.05 * i, 0.05), color=colour, linewidth=0)
    marked = range(0, ranks, -(-ranks // TALLEST))
    axes.set_yticks(marked, [f"rank {rank}" for rank in marked], fontsize="x-small")
    axes.set_ylim(ranks - 0.4, -0.5)
    axes.set_xlim(0, 1.01 * longest)
    busy = priced.busy()
    title = f"{priced.strategy.name}: {seconds_text(priced.seconds)}, {priced.tokens_per_s:,.0f} tokens/s"
    axes.set_title(f"{title}, ranks compute {sum(busy) / len(busy):.0%} of the time", fontsize=9, loc="left")

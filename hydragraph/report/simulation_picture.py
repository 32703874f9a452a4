"""Simulated iterations as a picture: for every strategy a row of computation for each rank, and its traffic below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hydragraph.cost.timeline import SimulatedSpan
from hydragraph.ir.instruction import Op, Stream
from hydragraph.report.number_text import seconds_text
from hydragraph.report.simulation_price import PricedStrategy

MOST = 6  # maximum number of strategies, the best ones
TALLEST = 16  # maximum number of ranks of one strategy at full height

# Forwards and backwards in the usual colours of papers on pipelines, and traffic in thin lines.
_COMPUTE = {Op.FORWARD: "#4c8bd0", Op.BACKWARD: "#74b06f", Op.UPDATE: "#9a7bc0"}
_TRAFFIC = {Stream.PULL: "#d08a3e", Stream.P2P: "#5f5f5f", Stream.PUSH: "#c0504d"}


def write_timelines(priced: Sequence[PricedStrategy], path: Path) -> None:
    """Draw ranks x time to a PNG file, replacing it only when the new one is complete.

    All strategies share the time axis, so that a shorter row of bars is a faster iteration. Numbers are micro-batches.

    Args:
        priced: the best first; at least one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter

    shown = priced[:MOST]
    heights = [0.5 + 0.3 * min(len(priced_strategy.timeline.ranks), TALLEST) for priced_strategy in shown]  # inches
    figure = Figure(figsize=(12, 1.4 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)
    longest = max(priced_strategy.seconds for priced_strategy in shown)
    for axes, priced_strategy in zip(panels[:, 0], shown, strict=True):
        _draw(axes, priced_strategy, longest)
    panels[-1, 0].set_xlabel("time")
    panels[-1, 0].xaxis.set_major_formatter(EngFormatter(unit="s"))
    named = {**{op.value: colour for op, colour in _COMPUTE.items()}, **{s.value: c for s, c in _TRAFFIC.items()}}
    patches = [Patch(color=colour, label=name) for name, colour in named.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize="small")
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    partial.replace(path)


def _draw(axes: Any, priced: PricedStrategy, longest: float) -> None:
    ranks = len(priced.timeline.ranks)
    for rank, spans in enumerate(priced.timeline.ranks):
        for op, micro_batch, begin, end in _bars(spans):
            edge = 0.4 if end - begin > 0.004 * longest else 0.0
            axes.barh(rank, end - begin, 0.62, begin, color=_COMPUTE[op], edgecolor="white", linewidth=edge)
            if micro_batch is not None and end - begin > 0.012 * longest and ranks <= TALLEST:
                axes.text((begin + end) / 2, rank, str(micro_batch), ha="center", va="center", color="w", fontsize=6)
        for i, (stream, colour) in enumerate(_TRAFFIC.items()):
            moving = [(s.start_s, s.seconds) for s in spans if s.instruction.stream is stream and s.seconds > 0]
            axes.broken_barh(moving, (rank + 0.32 + 0.05 * i, 0.05), color=colour, linewidth=0)
    marked = range(0, ranks, -(-ranks // TALLEST))
    axes.set_yticks(marked, [f"rank {rank}" for rank in marked], fontsize="x-small")
    axes.set_ylim(ranks - 0.4, -0.5)
    axes.set_xlim(0, 1.01 * longest)
    busy = priced.busy()
    title = f"{priced.strategy.name}: {seconds_text(priced.seconds)}, {priced.tokens_per_s:,.0f} tokens/s"
    axes.set_title(f"{title}, ranks compute {sum(busy) / len(busy):.0%} of the time", fontsize=9, loc="left")


def _bars(spans: Sequence[SimulatedSpan]) -> Iterator[tuple[Op, int | None, float, float]]:
    """Yield a rank's computation as (op, micro-batch, begin, end), with a stage's blocks of one micro-batch merged."""
    computed = [span for span in spans if span.instruction.op in _COMPUTE and span.seconds > 0]
    for (op, micro_batch), group in groupby(computed, lambda s: (s.instruction.op, s.instruction.micro_batch)):
        begin = end = None
        for span in group:
            if end is not None and begin is not None and span.start_s > end + 1e-3 * (end - begin):  # a wait
                yield op, micro_batch, begin, end
                begin = None
            begin = span.start_s if begin is None else begin
            end = span.end_s
        if begin is not None and end is not None:
            yield op, micro_batch, begin, end

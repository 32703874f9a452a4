"""Shapes to draw, and the walk of a schedule by plain rules."""

from __future__ import annotations

from hypothesis import strategies as st

from hydragraph.ir.schedules.schedule import Shape


@st.composite
def returning_rows(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw the rows of a pipeline that may return to them: 0, 1, 0, 2, 1."""
    rows = [0]
    for _ in range(draw(st.integers(1, 7))):
        rows.append(draw(st.sampled_from([row for row in range(max(rows) + 2) if row != rows[-1]])))
    return tuple(rows)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw a pipeline with interleaved stages, or pipelines that share one: of different depths and counts."""
    if draw(st.booleans()):
        return Shape((draw(st.integers(1, 9)),), (draw(returning_rows()),))
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    depths = [draw(st.integers(1 if len(counts) == 1 else 2, 4)) for _ in counts]
    # Stages in the order of their layers: stages that are not shared come next to those of other pipelines.
    side = draw(st.sampled_from(["first", "last"]))
    own = [depth - 1 if len(counts) > 1 else depth for depth in depths]
    if len(counts) == 1:
        return Shape.alone(depths[0], counts[0])
    shared = 0 if side == "first" else sum(own)
    first = 1 if side == "first" else 0
    chains = []
    for mine in own:
        stages = range(first, first + mine)
        chains.append((shared, *stages) if side == "first" else (*stages, shared))
        first += mine
    return Shape(tuple(counts), tuple(chains))

"""Shapes to draw, and a check of schedules by plain rules."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import strategies as st

from hydragraph.ir.program_outline import Mode
from hydragraph.ir.schedules.schedule import RETURNING, Place, Schedule, ScheduleShape, Work

_WORKS: dict[Mode, list[set[Work]]] = {
    "train": [{Work.FORWARD, Work.BACKWARD}, {Work.FORWARD, Work.INPUT_GRADIENT, Work.WEIGHT_GRADIENT}],
    "evaluate": [{Work.FORWARD}],
}


def check(schedule: Schedule, shape: ScheduleShape, mode: Mode = "train") -> None:
    """Assert that stages run all micro-batches in ascending and matching order, and that no stage waits forever."""
    order: defaultdict[tuple[int, Place], defaultdict[Work, list[int]]] = defaultdict(lambda: defaultdict(list))
    messages: defaultdict[tuple[Place, bool], list[tuple[int, int]]] = defaultdict(list)
    for row, actions in enumerate(schedule.actions):
        for action in actions:
            place = (row, action.visit)
            order[action.pipeline, place][action.work].append(action.micro_batch)
            if action.work is not Work.WEIGHT_GRADIENT:
                messages[place, action.work in RETURNING].append((action.pipeline, action.micro_batch))
    assert order.keys() == {(p, place) for p, places in enumerate(shape.places) for place in places}
    for (pipeline, _), by_work in order.items():
        assert set(by_work) in _WORKS[mode]
        assert all(found == list(shape.micro_batches[pipeline]) for found in by_work.values())
    for link in {link for places in shape.places for link in pairwise(places)}:
        pipelines = {p for p, places in enumerate(shape.places) if link in pairwise(places)}
        for returning in (False, True):
            sent, needed = ([m for m in messages[place, returning] if m[0] in pipelines] for place in link)
            assert sent == needed
    assert list(map(len, schedule.begins(shape.places))) == list(map(len, schedule.actions)), "a stage waits forever"


@st.composite
def returning_rows(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw the rows of a pipeline that may return to them: 0, 1, 0, 2, 1."""
    rows = [0]
    for _ in range(draw(st.integers(1, 7))):
        rows.append(draw(st.sampled_from([row for row in range(max(rows) + 2) if row != rows[-1]])))
    return tuple(rows)


@st.composite
def shapes(draw: st.DrawFn) -> ScheduleShape:
    """Draw a pipeline with interleaved stages, or pipelines that share one: of different depths and counts."""
    if draw(st.booleans()):
        return ScheduleShape((draw(st.integers(1, 9)),), (draw(returning_rows()),))
    counts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    depths = [draw(st.integers(1 if len(counts) == 1 else 2, 4)) for _ in counts]
    # Stages in the order of their layers: stages that are not shared come next to those of other pipelines.
    side = draw(st.sampled_from(["first", "last"]))
    own = [depth - 1 if len(counts) > 1 else depth for depth in depths]
    if len(counts) == 1:
        return ScheduleShape.alone(depths[0], counts[0])
    shared = 0 if side == "first" else sum(own)
    first = 1 if side == "first" else 0
    chains = []
    for mine in own:
        stages = range(first, first + mine)
        chains.append((shared, *stages) if side == "first" else (*stages, shared))
        first += mine
    return ScheduleShape(tuple(counts), tuple(chains))

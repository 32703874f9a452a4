"""Timelines on the page, as data for the script and as a static picture.

A bar is [ticks after the previous bar, length in ticks, kind, name, micro-batch]; a tick is 1e-9 of the iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydragraph.cost.critical_path import PathStep
from hydragraph.report import number_format
from hydragraph.report.facts import KINDS, STREAMS, IterationView, TimeBar, TimelineLane
from hydragraph.report.markup import Content, Markup, tag

TICKS = 1e9
WIDTH, LABEL, LANE = 1000, 110, 26
NARROWEST = 0.6
MOST_LANES = 48


def course_data(course: IterationView) -> dict[str, Any]:
    names: dict[str, int] = {}
    scale = TICKS / course.seconds if course.seconds else 0.0
    # tracks: id of a lane's bars -> index in `packed`; shared bars are written once
    tracks: dict[int, int] = {}
    packed: list[list[list[int]]] = []
    lanes = []
    for lane in course.lanes:
        if id(lane.bars) not in tracks:
            tracks[id(lane.bars)] = len(packed)
            packed.append([_packed(bars, names, scale) for bars in lane.bars])
        lanes.append([number_format.ranks_text(lane.ranks), len(lane.ranks), lane.what, tracks[id(lane.bars)]])
    lane_of = {rank: i for i, lane in enumerate(course.lanes) for rank in lane.ranks}
    critical = [
        [round(step.begin_s * scale), round(step.seconds * scale), lane_of[step.ranks[0]], step.stream.value,
         step.kind, step.what]
        for step in course.critical.steps
        if step.ranks[0] in lane_of
    ]  # fmt: skip
    offloads = any(lane.bars[-1] for lane in course.lanes)
    return {
        "title": course.title,
        "seconds": course.seconds,
        "tracks": packed,
        "lanes": lanes,
        "names": list(names),
        "kinds": KINDS,
        "streams": STREAMS if offloads else STREAMS[:-1],
        "critical": critical,
    }


def _packed(bars: Sequence[TimeBar], names: dict[str, int], scale: float) -> list[int]:
    packed: list[int] = []
    before = 0
    for bar in bars:
        # Round ends, not lengths: rounding errors must not add up.
        begin = round(bar.begin * scale)
        length = round(bar.end * scale) - begin
        packed += [begin - before, length, KINDS.index(bar.kind), names.setdefault(bar.name, len(names))]
        packed.append(bar.micro_batch)
        before = begin + length
    return packed


def course_picture(course: IterationView) -> Markup:
    lanes = course.lanes[:MOST_LANES]
    height = LANE * len(lanes) + 24
    drawn: list[Content] = [_lane(lane, LANE * i, course.seconds) for i, lane in enumerate(lanes)]
    row_of = {rank: i for i, lane in enumerate(lanes) for rank in lane.ranks}
    drawn += [
        _critical(step, LANE * row_of[step.ranks[0]], course.seconds)
        for step in course.critical.steps
        if step.ranks[0] in row_of
    ]
    ticks = [
        tag("text", number_format.seconds(course.seconds * k / 4), x=LABEL + (WIDTH - LABEL) * k / 4, y=height - 6,
            text_anchor="start" if k == 0 else "end" if k == 4 else "middle")
        for k in range(5)
    ]  # fmt: skip
    label = f"{course.title}: activity of ranks over {number_format.seconds(course.seconds)}"
    return tag("svg", *drawn, *ticks, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=label, class_="course")


def _band(stream: int, top: float) -> tuple[float, float]:
    return (top + 3, 14.0) if stream == 0 else (top + 14.5 + 2.5 * stream, 2.0)


def _critical(step: PathStep, top: float, seconds: float) -> Markup:
    y, height = _band(STREAMS.index(step.stream.value), top)
    scale = (WIDTH - LABEL) / seconds
    return tag(
        "rect",
        x=f"{LABEL + step.begin_s * scale:.1f}",
        y=f"{y - 0.6:g}",
        width=f"{step.seconds * scale:.1f}",
        height=f"{height + 1.2:g}",
        class_="critical",
    )


def _lane(lane: TimelineLane, top: float, seconds: float) -> Markup:
    name = number_format.named_ranks(lane.ranks, 2)
    shapes: list[Content] = [tag("text", name, x=0, y=top + 14)]
    scale = (WIDTH - LABEL) / seconds if seconds else 0.0
    for stream, bars in enumerate(lane.bars):
        y, height = _band(stream, top)
        # One SVG path per kind keeps pages small.
        paths: dict[str, list[str]] = {}
        at: dict[str, float] = {}
        for bar in bars:
            x = LABEL + bar.begin * scale
            width = max((bar.end - bar.begin) * scale, NARROWEST)
            # at: right end of each kind's last bar; a bar that ends less than NARROWEST after it is
            # left out
            if x + width < at.get(bar.kind, -1.0) + NARROWEST:
                continue
            at[bar.kind] = x + width
            paths.setdefault(bar.kind, []).append(f"M{x:.1f} {y:g}h{width:.1f}v{height:g}h-{width:.1f}z")
        shapes += [tag("path", d="".join(parts), class_=f"k-{kind}") for kind, parts in paths.items()]
    return tag("g", tag("title", f"{name} {lane.what}"), *shapes)

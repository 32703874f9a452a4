"""Section on lost, slow and joining ranks, and their marks in charts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hydragraph.report import number_format
from hydragraph.report.charts import ChartMark, Series, line_chart
from hydragraph.report.facts import RankChanges
from hydragraph.report.markup import Markup, join, row, section, table, tag
from hydragraph.train.stragglers.run_events import RunEvent

_STYLES = {
    "fault": "m-lost",
    "leave": "m-lost",
    "join": "m-back",
    "resumed": "m-back",
    "straggler": "m-slow",
    "recovered": "m-back",
    "replan": "m-plan",
    "switch": "m-plan",
    "migrate": "m-plan",
}
_KEYS = {
    "m-lost": "a rank is lost, or leaves",
    "m-back": "a rank joins, or is fast again",
    "m-slow": "a rank is slow",
    "m-plan": "strategies are switched, or state moves",
}
_IN_CHARTS = ("fault", "leave", "join", "straggler", "recovered", "switch", "migrate")
_PART_STYLES = ("full", "paused", "lost", "slower")
MOST_ROWS = 40


def marks_of(happened: RankChanges) -> tuple[ChartMark, ...]:
    """Return a mark per step, in the color of its first event."""
    by_step: dict[int, list[RunEvent]] = {}
    for event in happened.events:
        if event.event in _IN_CHARTS and event.done:
            by_step.setdefault(event.step, []).append(event)
    return tuple(
        ChartMark(step, "\n".join([f"after step {step:,}", *map(_words, events)]), _STYLES[events[0].event])
        for step, events in by_step.items()
    )


def mark_keys(marks: Sequence[ChartMark]) -> Markup | None:
    used = {mark.style for mark in marks}
    keys = [tag("span", tag("i", class_=f"key head {style}"), name) for style, name in _KEYS.items() if style in used]
    return tag("div", keys, class_="legend keys") if keys else None


def ranks_section(happened: RankChanges) -> Markup:
    chart = None
    if happened.counts:
        # Two points per count draw a horizontal line.
        steps = [(float(x), float(n)) for (first, n), (end, _) in pairwise(happened.counts) for x in (first, end)]
        ranks = Series("ranks", tuple(steps), "s-0")
        chart = line_chart("ranks over steps", [ranks], "ranks", lambda y: f"{y:g}", zero=True)
    intro = "Lost, slow and new ranks; what was decided about them, why, and at what cost."
    parts = (_time(happened), chart)
    return section("ranks", "Ranks", intro, tag("div", parts, class_="charts"), _table(happened))


def _time(happened: RankChanges) -> Markup | None:
    whole = sum(seconds for _, seconds in happened.parts)
    if not whole:
        return None
    shown = [(name, seconds, style) for (name, seconds), style in zip(happened.parts, _PART_STYLES, strict=True)]
    bars = [
        tag("i", class_=f"t-{style}", style=f"width:{100 * seconds / whole:.2f}%", title=f"{name}: {seconds:.3g} s")
        for name, seconds, style in shown
    ]
    rows = [
        row(join(tag("i", class_=f"key box t-{style}"), f" {name}"), number_format.seconds(seconds),
            number_format.share(seconds / whole), left=(0,))
        for name, seconds, style in shown
    ]  # fmt: skip
    caption = tag("figcaption", tag("b", "wall time"), tag("span", "from the end of the first step", class_="legend"))
    table = tag("table", tag("tbody", rows))
    return tag("figure", caption, tag("div", bars, class_="spent", role="img", aria_label="wall time"), table)


def _table(happened: RankChanges) -> Markup:
    heads = ("step", "after", "what", "ranks", "took", "steps undone", "moved", "why")
    left = ("what", "ranks", "why")
    rows = [_row(event, event.at - happened.begin_s) for event in happened.events]
    shown = table(heads, rows[:MOST_ROWS], left, style="wide")
    if len(rows) <= MOST_ROWS:
        return shown
    more = tag("summary", f"{len(rows) - MOST_ROWS} more")
    return tag("div", shown, tag("details", more, table(heads, rows[MOST_ROWS:], left, style="wide")))


def _row(event: RunEvent, after_s: float) -> Markup:
    cells = (
        f"{event.step:,}",
        number_format.seconds(after_s) if after_s > 0 else "–",
        join(tag("i", class_=f"key box {_STYLES[event.event]}"), f" {event.title}"),
        number_format.ranks_text(event.ranks, 4),
        number_format.seconds(event.seconds) if event.seconds else "–",
        f"{event.lost_steps:,}" if event.lost_steps else "–",
        number_format.size(event.moved_bytes) if event.moved_bytes else "–",
    )
    shown = [tag("td", cell, class_="left" if i in (2, 3) else None) for i, cell in enumerate(cells)]
    return tag("tr", shown, tag("td", event.why, class_="left why"), class_=None if event.done else "undone")


def _words(event: RunEvent) -> str:
    return f"{event.title}: {number_format.named_ranks(event.ranks, 4)}"

"""SVG charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hydragraph.report.markup import Content, Markup, tag

Point = tuple[float, float]
Show = Callable[[float], str]

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 10, 24
MOST_MARKS = 400


@dataclass(frozen=True)
class Series:
    """Curve in a chart, colored by CSS class `style`."""

    name: str
    points: tuple[Point, ...]
    style: str
    marks: bool = False
    line: bool = True
    dashed: bool = False


@dataclass(frozen=True)
class ChartMark:
    x: float
    title: str
    style: str


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers from low to high, in steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    # 3 to 47: raw = 8.8, power = 1, step = 10, ticks at 10, 20, 30, 40
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def line_chart(
    label: str, series: Sequence[Series], y_name: str, show: Show, zero: bool = False, marks: Sequence[ChartMark] = ()
) -> Markup:
    """Return a chart over steps, with a legend.

    Args:
        label: text for screen readers.
        marks: vertical lines within the x axis.
    """
    points = [point for curve in series for point in curve.points if math.isfinite(point[1])]
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    low_x, high_x = _span(min(xs), max(xs))
    low_y, high_y = _span(0.0 if zero else min(ys), max(ys))
    pad = 0.05 * (high_y - low_y)
    high_y += pad
    low_y -= 0.0 if zero else pad

    def at(x: float, y: float) -> Point:
        return (
            LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT),
            HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM),
        )

    drawn: list[Content] = []
    for y in ticks(low_y, high_y):
        _, place = at(low_x, y)
        drawn.append(tag("path", d=f"M{LEFT} {place:.1f}H{WIDTH - RIGHT}", class_="grid"))
        drawn.append(tag("text", show(y), x=LEFT - 8, y=f"{place + 4:.1f}", text_anchor="end"))
    for x in ticks(low_x, high_x, 7):
        if x != int(x):
            continue
        place, _ = at(x, low_y)
        drawn.append(tag("text", f"{x:,.0f}", x=f"{place:.1f}", y=HEIGHT - BOTTOM + 17, text_anchor="middle"))
    drawn.append(tag("text", "step", x=LEFT - 8, y=HEIGHT - BOTTOM + 17, text_anchor="end", class_="axis"))
    for mark in marks:
        if low_x <= mark.x <= high_x:
            place, _ = at(mark.x, low_y)
            line = tag("path", d=f"M{place:.1f} {TOP}V{HEIGHT - BOTTOM}")
            head = tag("path", d=f"M{place - 4:.1f} {TOP - 8}h8l-4 7z", class_="head")
            drawn.append(tag("g", tag("title", mark.title), line, head, class_=f"mark {mark.style}"))
    drawn += [_series(curve, at, show) for curve in series]
    picture = tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label, class_="chart")
    return tag("figure", tag("figcaption", tag("b", y_name), legend(series)), tag("div", picture, class_="scroll"))


def legend(series: Sequence[Series]) -> Markup:
    items = [
        tag("span", tag("i", class_=f"key {s.style} {'dot' if not s.line else 'dash' if s.dashed else 'line'}"), s.name)
        for s in series
    ]
    return tag("span", items, class_="legend")


def _series(series: Series, at: Callable[[float, float], Point], show: Show) -> Markup:
    inside: list[Content] = []
    finite = [point for point in series.points if math.isfinite(point[1])]
    if series.line and finite:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (at(*point) for point in finite))
        inside.append(tag("path", d=f"M{path}", class_=f"line{' dashed' * series.dashed}"))
    if series.marks:
        step = max(1, -(-len(finite) // MOST_MARKS))
        for x, y in finite[::step]:
            title = tag("title", f"{series.name}\nstep {x:,.0f}: {show(y)}")
            cx, cy = at(x, y)
            inside.append(tag("circle", title, cx=f"{cx:.1f}", cy=f"{cy:.1f}", r=3.2))
    return tag("g", inside, class_=series.style)


def _span(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    # Give equal values a span: `at` divides by it.
    return low - (abs(low) * 0.05 or 0.5), high + (abs(high) * 0.05 or 0.5)


def memory_chart(points: Sequence[Point], seconds: float, limit: float, peak: float, label: str, show: Show) -> Markup:
    """Return a chart of bytes over an iteration, with a limit near the peak."""
    width, height = 240, 84
    near = limit <= 2.5 * peak
    top = 1.08 * (max(limit, peak) if near else peak) or 1.0
    scale = width / seconds if seconds else 0.0

    def y(size: float) -> float:
        return height - size / top * height

    steps = [f"M0 {height}"]
    for time, size in points:
        steps.append(f"H{time * scale:.1f}V{y(size):.1f}")
    drawn: list[Content] = [tag("path", d=f"{''.join(steps)}H{width}V{height}z", class_="area")]
    # The peak may occur within an instruction, above the curve.
    drawn.append(tag("path", tag("title", f"most: {show(peak)}"), d=f"M0 {y(peak):.1f}H{width}", class_="peak"))
    if near:
        drawn.append(tag("path", tag("title", f"limit: {show(limit)}"), d=f"M0 {y(limit):.1f}H{width}", class_="limit"))
    return tag(
        "svg", *drawn, viewBox=f"0 0 {width} {height}", preserveAspectRatio="none", role="img", aria_label=label,
        class_="memory",
    )  # fmt: skip

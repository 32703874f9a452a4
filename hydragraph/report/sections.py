"""Sections of a report's HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from hydragraph.cost.critical_path import CriticalPath
from hydragraph.report import number_format
from hydragraph.report.charts import Point, Series, line_chart, memory_chart
from hydragraph.report.facts import (
    KINDS,
    MOVED,
    WAITED,
    ComparedStrategy,
    Diagram,
    DiagramStage,
    IterationView,
    Matrix,
    RankMemory,
    ReportContents,
    StrategyPanel,
)
from hydragraph.report.markup import Content, Markup, join, section, table, tag
from hydragraph.report.markup import row as table_row
from hydragraph.report.measured_beside_predicted import ComparedSeconds, RunComparison
from hydragraph.report.number_text import counts_text
from hydragraph.report.ranks_section import mark_keys, marks_of, ranks_section
from hydragraph.report.time_series import MOST_LANES as COURSE_LANES
from hydragraph.report.time_series import course_picture
from hydragraph.train.loss_picture import smoothed
from hydragraph.train.step_metrics import Metrics

_KIND_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "commit": "commit",
    "pull": "pull weights",
    "push": "push gradients",
    "p2p": "between stages",
    "offload": "to and from the host",
    "tp": "sums within stages",
    "wait": "waiting",
}
# Maximum visible rows.
MOST_ROWS = 30
MOST_STEPS = 14
# With separate rows
MOST_RANKS = 16
COLOURS = 8


def header(report: ReportContents) -> Markup:
    tiles = [
        tag("div", tag("dt", fact.label), tag("dd", tag("b", fact.value), tag("small", fact.note)))
        for fact in report.facts
    ]
    return tag(
        "header",
        tag("p", report.kind, class_="eyebrow"),
        tag("h1", report.title),
        [tag("p", sentence, class_="source") for sentence in report.source],
        tag("dl", tiles, class_="facts"),
    )


@dataclass(frozen=True)
class Section:
    """Section of the page; `name` is its entry in the table of contents."""

    anchor: str
    name: str
    markup: Markup


def contents(shown: Sequence[Section]) -> Markup:
    links = [tag("a", shown_section.name, href=f"#{shown_section.anchor}") for shown_section in shown]
    return tag("span", links, class_="links")


def sections(report: ReportContents) -> Iterator[Section]:
    if report.steps:
        yield Section("training", "Training", _training(report))
    if report.happened is not None:
        yield Section("ranks", "Ranks", ranks_section(report.happened))
    if report.contenders:
        yield Section("strategies", "Strategies", _strategies(report))
    if report.panels:
        yield Section("details", "Timeline", _panels(report))
    if report.against is not None:
        yield Section("against", "Predicted and measured", _against(report.against))
    if report.words:
        text = tag("pre", "\n".join(report.words))
        yield Section("words", "In words", section("words", "In words", "The plan's own explanation.", text))


def _strategies(report: ReportContents) -> Markup:
    rows = report.contenders
    shares = [name for name, _ in rows[0].shares]
    heads = ["", "strategy", "micro-batches", "iteration", "tokens/s", *shares, "why it lost"]
    kept = [i for i, head in enumerate(heads) if i != 2 or any(row.micro_batches for row in rows)]
    kept = [i for i in kept if heads[i] != "tokens/s" or any(row.tokens_per_s for row in rows)]
    # Bars show speed: full for the fastest strategy, half for half its speed.
    fastest = min((row.seconds for row in rows if row.seconds), default=0.0)
    body = [_strategy_row(i, row, fastest, kept) for i, row in enumerate(rows[:MOST_ROWS])]
    shown = table([heads[i] for i in kept], body, left=("", "strategy", "why it lost"), style="wide")
    more = f"{len(rows) - MOST_ROWS} more strategies are omitted." if len(rows) > MOST_ROWS else ""
    intro = "The best strategy is first. Shares are fractions of the iteration, averaged over ranks."
    if not shares:
        intro = "The best strategy is first; the last column says why each other candidate lost."
    return section("strategies", "Strategies", f"{intro} {more}".strip(), shown)


def _strategy_row(i: int, row: ComparedStrategy, fastest: float, kept: Sequence[int]) -> Markup:
    mark = tag("span", "best", class_="badge") if not row.why else str(i + 1)
    bar = tag("i", class_="bar", style=f"width:{100 * fastest / row.seconds:.0f}%") if row.seconds else None
    why = join(row.why or "–", tag("small", row.origin) if row.origin else None)
    cells: list[Markup] = [
        tag("td", mark, class_="left"),
        tag("td", tag("code", row.name), class_="left name"),
        tag("td", counts_text(row.micro_batches, " × ", ", ") or "–"),
        tag("td", number_format.seconds(row.seconds) if row.seconds else "does not fit", bar),
        tag("td", number_format.rate(row.tokens_per_s)),
        *[tag("td", number_format.share(part)) for _, part in row.shares],
        tag("td", why, class_="left why"),
    ]
    return tag("tr", [cells[k] for k in kept], class_="best" if not row.why else None)


def _panels(report: ReportContents) -> Markup:
    tabs = None
    if len(report.panels) > 1:
        buttons = [
            tag("button", tag("code", panel.name), type="button", role="tab", id=f"tab-{i}", aria_controls=f"panel-{i}",
                aria_selected="true" if i == 0 else "false", tabindex=0 if i == 0 else -1)
            for i, panel in enumerate(report.panels)
        ]  # fmt: skip
        tabs = tag("div", buttons, role="tablist", aria_label="Strategies", class_="tabs")
    panels = [_panel(i, panel, len(report.panels) > 1) for i, panel in enumerate(report.panels)]
    return tag("section", tag("h2", "Timeline, memory and traffic"), tabs, panels, id="details")


def _panel(number: int, panel: StrategyPanel, tabbed: bool) -> Markup:
    parts: list[Content] = [tag("h3", tag("code", panel.name), class_="panel-name")]
    if panel.diagram is not None:
        intro = f"The layers that each device computes. {panel.diagram.note}"
        parts.append(_block("Devices and layers", intro, _diagram(panel.diagram)))
    if panel.courses:
        views = [_course(number, i, course, len(panel.courses) > 1) for i, course in enumerate(panel.courses)]
        parts.append(tag("div", views, class_="block"))
    if panel.held:
        parts.append(_memory(panel.held, panel.held_seconds, panel.held_note))
    if panel.traffic:
        parts.append(_traffic(panel.traffic))
    role = {"role": "tabpanel", "aria_labelledby": f"tab-{number}"} if tabbed else {}
    return tag("div", parts, id=f"panel-{number}", class_="panel", **role)


def _block(title: str, intro: str, *content: Content) -> Markup:
    return tag("div", tag("h4", title), tag("p", intro, class_="intro") if intro else None, *content, class_="block")


def _diagram(diagram: Diagram) -> Markup:
    width, row_height = 1000, 23
    what_at = 150
    layers_at = 305 if any(row.what for row in diagram.rows) else 190
    scale = (width - layers_at) / diagram.layers
    drawn: list[Content] = []
    y = 4.0
    node = None
    for row in diagram.rows:
        if row.node != node:
            y += 0 if node is None else 8
            drawn.append(tag("text", f"node {row.node}", x=0, y=y + 15, class_="strong"))
            node = row.node
        drawn.append(tag("text", number_format.named_ranks(row.ranks, 1), x=62, y=y + 15))
        drawn.append(tag("text", row.what, x=what_at, y=y + 15, class_="soft" if row.ok else "bad"))
        if row.parts:
            drawn += [_part(part, layers_at, y, scale) for part in row.parts]
        else:
            drawn.append(tag("rect", x=layers_at, y=y + 2, width=width - layers_at, height=18, rx=3, class_="idle"))
            drawn.append(tag("text", "computes nothing", x=layers_at + 8, y=y + 15, class_="soft"))
        y += row_height
    step = max(1, -(-diagram.layers // 16))
    marks = [
        tag("text", str(layer), x=f"{layers_at + layer * scale:.1f}", y=y + 14, class_="axis",
            text_anchor="middle" if layer < diagram.layers else "end")
        for layer in range(0, diagram.layers + 1, step)
    ]  # fmt: skip
    marks.append(tag("text", "layers", x=layers_at - 14, y=y + 14, text_anchor="end", class_="axis"))
    svg = tag(
        "svg", *drawn, *marks, viewBox=f"0 0 {width} {y + 20:.0f}", role="img", class_="diagram",
        aria_label=f"layers that each device computes, of {diagram.layers}",
    )  # fmt: skip
    return tag("div", svg, class_="scroll")


def _part(part: DiagramStage, left: float, y: float, scale: float) -> Markup:
    layers = f"layer {part.first}" if part.last == part.first + 1 else f"layers {part.first}–{part.last - 1}"
    x = left + part.first * scale
    width = (part.last - part.first) * scale - 1.5
    text = f"{layers} · {part.text}"
    # The longest text that fits, down to layer numbers.
    most = int((width - 14) / 6.2)  # characters
    number = layers.partition(" ")[2]
    shown = next((t for t in (text, f"{layers} · pipeline {part.pipeline}", layers, number) if len(t) <= most), "")
    rect = tag(
        "rect", tag("title", text.replace(" · ", "\n")), x=f"{x:.1f}", y=y + 2, width=f"{width:.1f}", height=18, rx=3
    )
    words = tag("text", shown, x=f"{x + 7:.1f}", y=y + 15) if shown else None
    return tag("g", rect, words, class_=f"stage p-{part.pipeline % COLOURS}")


def _course(panel: int, number: int, course: IterationView, titled: bool) -> Markup:
    used = {bar.kind for lane in course.lanes for bars in lane.bars for bar in bars}
    keys = [tag("span", tag("i", class_=f"key box k-{kind}"), _KIND_NAMES[kind]) for kind in KINDS if kind in used]
    if course.critical.steps:
        keys.append(tag("span", tag("i", class_="key box critical"), "critical path"))
    title = f"Timeline, {course.title}" if titled else "Timeline"
    left = len(course.lanes) - COURSE_LANES
    note = f"{left} more kinds of ranks are shown only if JavaScript is enabled." if left > 0 else ""
    return tag(
        "div",
        tag("h4", f"{title}: {number_format.seconds(course.seconds)}"),
        tag("p", f"Wide bars are computation; thin bars below them are transfers. {course.note}", class_="intro"),
        tag("div", keys, class_="legend"),
        tag("div", course_picture(course), tag("p", note, class_="note") if note else None, class_="scroll picture"),
        _critical(course.critical),
        class_="timeline", data_panel=panel, data_course=number,
    )  # fmt: skip


def _critical(path: CriticalPath) -> Markup | None:
    if not path.steps:
        return None
    whole = sum(path.by_kind.values())
    shares = [f"{number_format.share(seconds / whole)} {kind}" for kind, seconds in path.by_kind.items()]
    rows = [
        table_row(number_format.seconds(step.begin_s), number_format.seconds(step.seconds), step.what, left=(2,))
        for step in path.longest(MOST_STEPS)
    ]
    left = len(path.steps) - len(rows)
    waited_for = "step of the critical path"
    return tag(
        "details",
        tag("summary", tag("b", "Critical path: "), ", ".join(shares)),
        table(["from", "for", waited_for], rows, left=[waited_for]),
        tag("p", f"and {left} shorter steps", class_="note") if left else None,
    )


def _memory(held: Sequence[RankMemory], seconds: float, note: str) -> Markup:
    cards = []
    for memory in sorted(held, key=lambda one: one.ranks):
        used = number_format.share(memory.peak / memory.limit)
        name = number_format.named_ranks(memory.ranks, 3)
        text = f"most {number_format.size(memory.peak)}, {used} of {number_format.size(memory.limit)}"
        picture = (
            memory_chart(memory.points, seconds, memory.limit, memory.peak, f"{name}: {text}", number_format.size)
            if memory.points
            else None
        )
        meter = tag("div", tag("i", style=f"width:{min(100.0, 100 * memory.peak / memory.limit):.2f}%"), class_="meter")
        full = " tight" * (memory.peak > 0.9 * memory.limit)
        cards.append(tag("div", tag("b", name), tag("span", text), picture, meter, class_=f"card{full}"))
    intro = f"Allocated bytes over the iteration; the bar below shows the peak relative to the limit. {note}".strip()
    if not any(memory.points for memory in held):
        intro = "Peak memory of each rank, relative to its limit."
    return _block("Memory", intro, tag("div", cards, class_="cards"), _memory_table(held))


def _memory_table(held: Sequence[RankMemory]) -> Markup | None:
    if not any(memory.parts for memory in held):
        return None
    names = [name for name, _ in held[0].parts]
    rows = [
        table_row(
            number_format.ranks_text(memory.ranks, 4),
            *(number_format.size(size) for _, size in memory.parts),
            tag("b", number_format.size(memory.peak)),
            number_format.size(memory.limit),
            left=(0,),
        )
        for memory in sorted(held, key=lambda one: one.ranks)
    ]
    shown = table(["ranks", *names, "peak", "limit"], rows, left=["ranks"])
    return tag("details", tag("summary", "Parts of the peaks"), shown)


def _traffic(matrices: Sequence[Matrix]) -> Markup:
    totals = matrices[0].totals
    parts = [f"{_KIND_NAMES[kind]} {number_format.size(total)}" for kind, total in zip(MOVED, totals, strict=True)]
    intro = (
        f"Bytes per iteration: {', '.join(parts)}. Rows send, columns receive. Sums within tensor-parallel stages are "
        "counted as ring all-reduces; they are omitted if computation was measured, because its time includes them."
    )
    views = [tag("div", tag("h5", f"Between {matrix.title}"), _heat(matrix), _flows(matrix)) for matrix in matrices]
    options = [
        tag("button", name, type="button", data_kind=kind, aria_pressed="true" if kind == "all" else "false")
        for kind, name in (("all", "all"), *((kind, _KIND_NAMES[kind]) for kind in MOVED))
    ]
    choose = tag("div", options, class_="choose", role="group", aria_label="kind of traffic", hidden=True)
    return _block("Traffic", intro, choose, tag("div", views, class_="matrices"))


def _heat(matrix: Matrix) -> Markup:
    count = len(matrix.names)
    side = 30 if count <= 8 else 20 if count <= 16 else 14
    left, top = 66, 20
    most = max((sum(kind[i][j] for kind in matrix.cells) for i in range(count) for j in range(count)), default=0.0)
    # A label is 15 pixels high: with rows of 14 pixels, name every second row.
    every = max(1, -(-count * 15 // (side * count)))
    drawn: list[Content] = []
    for i, name in enumerate(matrix.names):
        at = i * side + _gaps(matrix, i)
        if i % every == 0:
            drawn.append(tag("text", name, x=left - 8, y=top + at + side / 2 + 4, text_anchor="end"))
            short = name.split()[-1].partition("–")[0]
            drawn.append(tag("text", short, x=left + at + side / 2, y=top - 7, text_anchor="middle"))
        for j in range(count):
            drawn.append(_cell(matrix, i, j, left + j * side + _gaps(matrix, j), top + at, side, most))
    width = left + count * side + _gaps(matrix, count - 1) + 4
    height = top + count * side + _gaps(matrix, count - 1) + 4
    svg = tag(
        "svg", *drawn, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img", class_="heat",
        aria_label=f"bytes between {matrix.title}; the table below lists the largest transfers",
    )  # fmt: skip
    return tag("div", svg, class_="scroll")


def _gaps(matrix: Matrix, i: int) -> int:
    nodes = len(dict.fromkeys(matrix.groups[: i + 1])) - 1
    return 5 * nodes if len(set(matrix.groups)) < len(matrix.names) else 0


def _cell(matrix: Matrix, i: int, j: int, x: float, y: float, side: float, most: float) -> Markup:
    kinds = {kind: rows[i][j] for kind, rows in zip(MOVED, matrix.cells, strict=True)}
    total = sum(kinds.values())
    if not total:
        return tag("rect", x=x, y=y, width=side - 1.5, height=side - 1.5, class_="none")
    lines = [f"{_KIND_NAMES[kind]}: {number_format.size(size)}" for kind, size in kinds.items() if size]
    title = tag("title", "\n".join([f"{matrix.names[i]} to {matrix.names[j]}: {number_format.size(total)}", *lines]))
    sizes = {f"data_{kind}": f"{size:.6g}" for kind, size in kinds.items() if size}
    return tag(
        "rect", title, x=x, y=y, width=side - 1.5, height=side - 1.5, fill_opacity=f"{0.08 + 0.92 * total / most:.3f}",
        **sizes,
    )  # fmt: skip


def _flows(matrix: Matrix) -> Markup:
    count = len(matrix.names)
    flows = []
    for i in range(count):
        for j in range(count):
            kinds = [rows[i][j] for rows in matrix.cells]
            if sum(kinds):
                flows.append((sum(kinds), matrix.names[i], matrix.names[j], kinds))
    flows.sort(key=lambda flow: -flow[0])
    rows = [
        table_row(one, other, *map(number_format.size, kinds), tag("b", number_format.size(total)), left=(0, 1))
        for total, one, other, kinds in flows[:12]
    ]
    heads = ["from", "to", *(_KIND_NAMES[kind] for kind in MOVED), "all"]
    return tag("details", tag("summary", "Table of the largest transfers"), table(heads, rows, left=["from", "to"]))


def _training(report: ReportContents) -> Markup:
    steps = report.steps

    def points(value: Callable[[Metrics], float | None], strategy: str | None = None) -> tuple[Point, ...]:
        rows = ((s.step, value(s)) for s in steps if strategy in (None, s.strategy))
        return tuple((step, number) for step, number in rows if number is not None)

    names = list(dict.fromkeys(step.strategy for step in steps))
    marks = () if report.happened is None else marks_of(report.happened)

    losses = [
        Series(name, points(lambda s: s.loss, name), f"s-{i % COLOURS}", marks=True, line=False)
        for i, name in enumerate(names)
    ]
    # One curve shows the trend; points show each step's strategy.
    smooth = zip((s.step for s in steps), smoothed([s.loss for s in steps]), strict=True)
    losses.append(Series("smoothed", tuple(smooth), "s-ink"))
    evaluated = [step for step in steps if step.eval_loss is not None]
    if evaluated:
        found = points(lambda s: s.eval_loss)
        losses.append(Series(evaluated[-1].evaluated, found, "s-held", marks=True, dashed=True))
    loss = line_chart("loss over steps", losses, f"loss, {steps[-1].loss_unit}", lambda y: f"{y:.3f}", marks=marks)

    # Several lines would cross
    alone = len(names) == 1
    rates = [
        Series(name, points(lambda s: s.tokens_per_s, name), f"s-{i % COLOURS}", marks=True, line=alone)
        for i, name in enumerate(names)
    ]
    speed = line_chart("tokens per second over steps", rates, "tokens/s", number_format.rate, zero=True, marks=marks)

    spent = [Series("whole step", points(lambda s: s.seconds), "s-ink")]
    for kind in WAITED:
        waits = points(attrgetter(f"exposed_{kind}_s"))
        spent.append(Series(f"waits: {_KIND_NAMES[kind]}", waits, f"s-{kind}"))
    expected = points(lambda s: s.expected_s or None)
    if expected:
        spent.append(Series("computing, as planned", expected, "s-held", dashed=True))
    where = line_chart("step time over steps", spent, "step time", number_format.seconds, zero=True, marks=marks)

    memory = Series("rank 0", points(lambda s: float(s.peak_memory_bytes)), "s-0")
    peak_memory = line_chart("peak memory", [memory], "peak memory so far", number_format.size, zero=True)
    charts = tag("div", mark_keys(marks), loss, speed, where, peak_memory, class_="charts")
    return section("training", "Training", "Every step of the run; each color is a strategy.", charts)


def _against(found: RunComparison) -> Markup:
    most = max(max(row.measured, row.predicted) for row in found.kinds)
    rows = [_against_row(row, most) for row in _compared(found) if row.measured or row.predicted]
    heads = ["kind", "ranks", "measured", "predicted", "measured / predicted", ""]
    keys = [tag("span", tag("i", class_=f"key box {side}"), side) for side in ("measured", "predicted")]
    chart = None
    if len(found.steps) > 1:
        series = [
            Series("measured", tuple((s.step, s.measured_s) for s in found.steps), "s-measured", marks=True),
            Series("predicted", tuple((s.step, s.predicted_s) for s in found.steps), "s-predicted", True, dashed=True),
        ]
        chart = line_chart(
            "time over steps", series, "time of the step's instructions", number_format.seconds, zero=True
        )
    intro = f"{found.source}. Most of the difference: {found.sentence}."
    shown = table(heads, rows, left=["kind", "ranks"], style="against")
    return section("against", "Predicted and measured", intro, tag("div", keys, class_="legend"), shown, chart)


def _against_row(row: ComparedSeconds, most: float) -> Markup:
    whole = row.rank is None
    sides = (("measured", row.measured), ("predicted", row.predicted))
    bars = [tag("i", class_=side, style=f"width:{100 * seconds / most:.1f}%") for side, seconds in sides]
    return table_row(
        tag("b", row.kind.value) if whole else "",
        "all ranks" if whole else f"rank {row.rank}",
        *(number_format.seconds(seconds) for _, seconds in sides),
        number_format.times(row.measured, row.predicted),
        tag("span", bars, class_="pair") if whole else None,
        left=(0, 1),
        class_="sum" if whole else "one",
    )


def _compared(found: RunComparison) -> Iterator[ComparedSeconds]:
    for together in found.kinds:
        yield together
        if 1 < found.ranks <= MOST_RANKS:
            yield from (row for row in found.rows if row.kind is together.kind)

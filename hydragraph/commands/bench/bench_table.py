"""Results of a benchmark as text, CSV, JSON and Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from hydragraph.commands.text_table import new_table

Cell = str | float


@dataclass(frozen=True)
class Target:
    """Target of a benchmark; `met` is None if the value was not measured."""

    name: str
    wanted: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]

    @classmethod
    def at_least(cls, name: str, wanted: float, found: float | None, form: str = "{:.3g}", text: str = "") -> Target:
        """Return a target that is met if `found` is at least `wanted`, which is shown as `text`."""
        met = None if found is None else found >= wanted
        return cls(name, text or f">= {form.format(wanted)}", "-" if found is None else form.format(found), met)

    @classmethod
    def at_most(cls, name: str, wanted: float, found: float | None, form: str = "{:.3g}") -> Target:
        met = None if found is None else found <= wanted
        return cls(name, f"<= {form.format(wanted)}", "-" if found is None else form.format(found), met)


@dataclass(frozen=True)
class PictureBar:
    group: str
    side: str
    value: float


@dataclass(frozen=True)
class BenchReport:
    """Result of one benchmark.

    Attributes:
        rows: measured values; NaN if missing.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    bars: tuple[PictureBar, ...] = ()
    unit: str = ""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> BenchReport:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data["targets"] = [Target(**target) for target in data["targets"]]
            data["bars"] = [PictureBar(**bar) for bar in data["bars"]]
            data["rows"] = [tuple(row) for row in data["rows"]]
            fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a benchmark report ({error}): write one with hydragraph bench ... --json"
            ) from error


def shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    if math.isnan(cell):
        return "-"
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"


def to_table(report: BenchReport) -> Table:
    texts = [c for i, c in enumerate(report.columns) if all(isinstance(row[i], str) for row in report.rows)]
    table = new_table(report.title, report.columns, left=texts)
    for row in report.rows:
        table.add_row(*(escape(shown(cell)) for cell in row))
    return table


def target_table(targets: Sequence[Target]) -> Table:
    table = Table("target", "wanted", "found", "", title="targets (on one H200)", title_justify="left")
    for target in targets:
        table.add_row(escape(target.name), target.wanted, target.found, target.verdict)
    return table


def to_csv(report: BenchReport) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(report.columns)
    writer.writerows(report.rows)
    return file.getvalue()


def to_markdown(reports: Sequence[BenchReport], heading: str, facts: Sequence[str]) -> str:
    targets = [target for report in reports for target in report.targets]
    lines = [f"# {heading}", "", *(f"- {fact}" for fact in facts), ""]
    if targets:
        rows = [(t.name, t.wanted, t.found, t.verdict) for t in targets]
        lines += ["## Targets, on one H200", "", *_grid(("target", "wanted", "found", "verdict"), rows), ""]
    for report in reports:
        lines += [f"## {report.title}", "", *_grid(report.columns, report.rows), ""]
        lines += [line for block in report.blocks for line in ("```", block, "```", "")]
        lines += [*(f"- {note}" for note in report.notes), ""]
    return "\n".join(lines).rstrip() + "\n"


def _grid(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    body = ["| " + " | ".join(shown(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), *body]

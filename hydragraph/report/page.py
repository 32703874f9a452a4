"""Conversion of a report to one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path
from string import Template

from hydragraph.data.atomic_write import write_whole
from hydragraph.report.facts import ReportContents
from hydragraph.report.markup import join, script_data, tag
from hydragraph.report.sections import contents, header, sections
from hydragraph.report.time_series import course_data
from hydragraph.version import __version__


def write_report(report: ReportContents, path: Path) -> None:
    """Write a report to a file, atomically."""
    write_whole(path, html(report))


def html(report: ReportContents) -> str:
    script = _file("report.js")
    shown = list(sections(report))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_file("page.html")).substitute(
        title=join(f"{report.title} – hydragraph report"),
        script_hash=f"sha256-{digest}",
        style=_file("report.css"),
        contents=contents(shown),
        header=header(report),
        sections=join(*(section.markup for section in shown)),
        footer=tag("p", f"hydragraph {__version__}"),
        data=script_data([[course_data(course) for course in panel.courses] for panel in report.panels]),
        script=script,
    )


def _file(name: str) -> str:
    return files("hydragraph.report").joinpath(name).read_text(encoding="utf-8")

"""The page: one file that loads no others, foreign names as plain text, and small enough for a thousand ranks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hydragraph.report.facts import KINDS
from hydragraph.report.page import html, write_report
from hydragraph.report.simulation_report import simulation_report
from hydragraph.report.time_series import TICKS
from tests.cost.priced import cluster, costs
from tests.report.made import EVIL, report, simulated


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "poster")
        ]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


@pytest.fixture(scope="module")
def page() -> str:
    return html(report())


def test_nothing_is_loaded(page: str) -> None:
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttpRequest|import\(", page)
    read = Tags(page)
    assert all(address.startswith("#") for address in read.addresses)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(read.names)
    assert not read.handlers


def test_links_and_labels_have_what_they_name(page: str) -> None:
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    named = re.findall(r'(?:href="#|aria-controls="|aria-labelledby=")([^"]+)"', page)
    assert set(named) <= set(ids)


def test_every_element_is_closed(page: str) -> None:
    void = {"meta", "br", "input"}
    opened = [name for name in Tags(page).names if name not in void]
    for name in set(opened):
        assert opened.count(name) == page.count(f"</{name}>"), name


def test_names_of_strangers_stay_text() -> None:
    evil = report(EVIL)
    panels = (replace(evil.panels[0], name=EVIL, held_note=EVIL), *evil.panels[1:])
    lane = evil.panels[0].courses[0].lanes[0]
    course = replace(evil.panels[0].courses[0], title=EVIL, note=EVIL, lanes=(replace(lane, what=EVIL),))
    panels = (replace(panels[0], courses=(course,)), *panels[1:])
    rows = tuple(replace(row, name=EVIL, why=EVIL, origin=EVIL) for row in evil.contenders)
    text = html(replace(evil, panels=panels, contenders=rows, source=(EVIL,), words=(EVIL,)))
    read = Tags(text)
    assert read.names.count("script") == 2
    assert "img" not in read.names
    assert "<script>window.evil" not in text


def test_the_data_of_a_timeline_are_its_bars(page: str) -> None:
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))
    courses = [panel.courses[0] for panel in report().panels]
    for (packed,), course in zip(data, courses, strict=True):
        for (_, _, _, track), lane in zip(packed["lanes"], course.lanes, strict=True):
            for numbers, bars in zip(packed["tracks"][track], lane.bars, strict=True):
                now = 0
                for i, bar in enumerate(bars):
                    gap, length, kind, name, micro_batch = numbers[5 * i : 5 * i + 5]
                    assert (now + gap) / TICKS * course.seconds == pytest.approx(bar.begin, abs=2e-9 * course.seconds)
                    now += gap + length
                    assert now / TICKS * course.seconds == pytest.approx(bar.end, abs=2e-9 * course.seconds)
                    assert (KINDS[kind], packed["names"][name], micro_batch) == (bar.kind, bar.name, bar.micro_batch)


@pytest.mark.thorough
def test_a_thousand_ranks_fit_into_five_megabytes(tmp_path: Path) -> None:
    on = costs(8, cluster(1024, 8))
    found = [
        simulated(on, "128*<tp2,pp4>", [8] * 128),
        simulated(on, "<tp4,pp4> + 126*<tp2,pp4>", [16] + [8] * 126),
    ]
    write_report(simulation_report("a thousand ranks", on, found), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 5e6
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]

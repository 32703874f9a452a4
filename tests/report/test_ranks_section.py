"""The section on ranks, and marks in charts: everything is there, once, and escaped."""

from __future__ import annotations

from dataclasses import replace

from hydragraph.report.page import html
from hydragraph.report.rank_changes import happened
from hydragraph.report.ranks_section import MOST_ROWS, mark_keys, marks_of, ranks_section
from hydragraph.report.run_report import run_report
from tests.report.test_rank_changes import storm


def test_one_mark_for_all_that_happened_after_a_step() -> None:
    found = happened(*storm())
    assert found is not None
    marks = marks_of(found)
    assert [(mark.x, mark.style) for mark in marks] == [(3, "m-lost"), (5, "m-back")], "dry runs have no mark"
    assert marks[0].title == "after step 3\nrank lost: rank 1"
    keys = mark_keys(marks)
    assert keys is not None
    assert keys.count("<span>") == 2
    assert mark_keys(()) is None


def test_the_page_of_a_run_shows_them() -> None:
    steps, events = storm()
    page = html(run_report("run", steps, None, events))
    assert 'href="#ranks"' in page
    assert 'id="ranks"' in page
    assert page.count("killed &lt;b&gt;") == 1
    assert page.count('class="mark m-lost"') == 3, "in the charts of losses, speed and seconds"
    quiet = html(run_report("run", steps, None, events[:1]))
    assert 'href="#ranks"' not in quiet
    assert 'class="mark' not in quiet


def test_many_events_are_all_there_the_first_open() -> None:
    found = happened(*storm())
    assert found is not None
    many = replace(found, events=found.events * 20)
    text = ranks_section(many)
    assert text.count("<tbody>") == 3, "the time's, the first rows, the others"
    assert f"{len(many.events) - MOST_ROWS} more" in text
    assert text.count("rank lost") == 20

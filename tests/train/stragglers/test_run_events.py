"""Lines of events.jsonl: what is always there, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydragraph.train.stragglers.run_events import RunEvent, append_event, read_events

SLOW = RunEvent(7, "straggler", (2,), 0.0, "rank 2 takes 2.57 times as long as its peers", {2: 2.57})
SWITCHED = RunEvent(9, "switch", (2,), 0.25, "it pays", {2: 2.57}, before_s=2.0, after_s=1.5, done=False)


def test_events_are_lines_that_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for event in (SLOW, SWITCHED):
        append_event(path, event)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [list(record)[:6] for record in records] == [["time", "step", "event", "ranks", "seconds", "why"]] * 2
    assert read_events(path) == [SLOW, SWITCHED]


def test_a_line_that_was_cut_off_does_not_count_and_another_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(SLOW.line + "\n" + SWITCHED.line[:20])
    assert read_events(path) == [SLOW]
    append_event(path, SWITCHED)
    assert read_events(path) == [SLOW, SWITCHED]
    path.write_text('{"step": 1}\n' + SLOW.line + "\n")
    with pytest.raises(ValueError, match=r"events\.jsonl:1 is not an event"):
        read_events(path)


def test_no_file_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "events.jsonl") == []

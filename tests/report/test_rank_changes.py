"""A report's account of the ranks of a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from hydragraph.report.rank_changes import cost_facts, happened
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent

STEP = Metrics(1, 2.5, 0.3, 1e-3, 100, 100.0, 1.0, "<tp1,pp1>", 3, (2,))


def at(seconds: float) -> str:
    return datetime.fromtimestamp(1e9 + seconds, UTC).isoformat(timespec="milliseconds")


def storm() -> tuple[list[Metrics], list[RunEvent]]:
    """Rank 1 of 3 is lost in step 4, which costs 2 s and two steps, and comes back, which costs 1 s."""
    ends = (0, 1, 2, 6, 7, 9, 10)
    steps = [replace(STEP, step=i, time=at(end)) for i, end in enumerate(ends, start=1)]
    events = [
        RunEvent(3, "saved", (0, 1, 2), 0.1, "there", time=at(2)),
        RunEvent(3, "fault", (1,), 0.0, "killed <b>", time=at(5)),
        RunEvent(3, "resumed", (0, 1), 2.0, "2 go on", lost_steps=2, moved_bytes=5000, time=at(5)),
        RunEvent(5, "join", (2,), 0.0, "2 -> 3", time=at(8)),
        RunEvent(5, "resumed", (0, 1, 2), 1.0, "3 go on", moved_bytes=1000, time=at(8)),
        RunEvent(6, "switch", (2,), 0.5, "dry", done=False, time=at(9)),
    ]
    return steps, events


def test_what_happened_in_order_with_what_it_cost() -> None:
    found = happened(*storm())
    assert found is not None
    assert [(e.step, e.event, e.title) for e in found.events] == [
        (3, "fault", "rank lost"),
        (3, "resumed", "resumed"),
        (5, "join", "rank joined"),
        (5, "resumed", "resumed"),
        (6, "switch", "strategy switched: not done"),
    ]
    assert [e.at - found.begin_s for e in found.events] == pytest.approx([5, 5, 8, 8, 9])
    assert found.counts == ((1, 3), (3, 2), (5, 3), (7, 3))
    parts = dict(found.parts)
    assert parts["pauses"] == pytest.approx(3)
    assert sum(parts.values()) == pytest.approx(10)


def test_the_numbers_at_the_top() -> None:
    facts = {fact.label: (fact.value, fact.note) for fact in cost_facts(*storm())}
    assert facts["goodput"] == ("60%", "of 100 tokens/s at full speed")
    assert facts["pauses"] == ("3.00 s", "2, the longest 2.00 s; 2 steps undone, 6.00 kB moved")


def test_saved_checkpoints_alone_are_nothing_that_happened() -> None:
    steps, events = storm()
    assert happened(steps, events[:1]) is None
    assert happened(steps, []) is None


def test_a_run_of_an_earlier_version_has_a_table_and_no_account() -> None:
    steps, events = storm()
    old = [replace(step, time="") for step in steps]
    found = happened(old, events)
    assert found is not None
    assert len(found.events) == 5
    assert found.parts == ()
    assert cost_facts(old, events) == ()

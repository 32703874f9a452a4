"""The file that Perfetto opens: a process per rank, a thread per stream, microseconds from the first event on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydragraph.cost.trace_file import Event, TracedStep, read_trace, write_events
from hydragraph.ir.instruction import Stream
from hydragraph.spec.assignment import Assignment


def test_events_lie_on_their_ranks_and_streams_from_zero_on(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_events(
        [[Event(1, "compute", "forward layer.0 [0]", 100.0, 100.5)], [Event(2, "pull", "W.head", 99.5, 100.0)]], file
    )
    events = json.loads(file.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {stream.value for stream in Stream}
    shown = [
        (e["pid"], names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"
    ]
    assert shown == [
        (0, "compute", "forward layer.0 [0]", 5e5, 5e5, {"step": 1}),
        (1, "pull", "W.head", 0.0, 5e5, {"step": 2}),
    ]


def test_ranks_that_did_nothing_are_there(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_events([[], []], file)
    events = json.loads(file.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_a_trace_of_a_run_says_what_was_run(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    steps = (TracedStep(3, "<tp1,pp1>@abc", Assignment((((0, 2), (1,)), ()), (5, 6, 7)), 0.25),)
    write_events([[Event(3, "compute", "compute  update", 2.0, 2.5)], []], file, steps)
    trace = read_trace(file)
    assert trace.steps == steps
    assert trace.ranks == ((Event(3, "compute", "compute  update", 0.0, 0.5),), ())
    assert trace.of(3) == trace.ranks
    assert trace.of(4) == ((), ())


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [], "otherData": {"steps": []}}'])
def test_what_is_no_trace_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"hydragraph train --trace"):
        read_trace(tmp_path / "trace.json")

"""The file that Perfetto opens: a process per rank, a thread per stream, microseconds from the first event on."""

from __future__ import annotations

import json
from pathlib import Path

from hydragraph.cost.trace_file import Event, write_events
from hydragraph.ir.instruction import Stream


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

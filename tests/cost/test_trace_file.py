"""The file that Perfetto opens: a process per rank, a thread per stream, microseconds from the first event on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydragraph.cost.trace_file import TracedStep, TraceEvent, read_trace, write_events
from hydragraph.ir.instruction import Stream
from hydragraph.spec.assignment import Assignment


def test_events_lie_on_their_ranks_and_streams_from_zero_on(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_events(
        [
            [TraceEvent(1, "compute", "forward layer.0 [0]", 100.0, 100.5)],
            [TraceEvent(2, "pull", "W.head", 99.5, 100.0)],
        ],
        file,
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


@pytest.mark.parametrize(
    ("line", "name", "category", "arguments"),
    [
        (
            "compute  d1.0, G.layer.1 += backward layer.1 [0] (s.layer.1.0, d2.0)  after d2.0",
            "backward layer.1 [0]",
            "backward",
            {"block": "layer.1", "micro_batch": 0},
        ),
        ("pull     W.layer.0 = link home -> here", "pull layer.0", "pull", {"block": "layer.0"}),
        ("push     link G.head -> home  after G.head", "push head", "push", {"block": "head"}),
        ("p2p      send h2.0 -> rank 3  after h2.0", "send h2.0 to rank 3", "send", {"peer": 3}),
        ("p2p      h2.0 = receive <- rank 1", "receive h2.0 from rank 1", "receive", {"peer": 1}),
        ("compute  update", "update", "update", {}),
    ],
)
def test_a_slice_has_a_short_name_and_its_arguments_the_rest(
    tmp_path: Path, line: str, name: str, category: str, arguments: dict[str, object]
) -> None:
    file = tmp_path / "trace.json"
    steps = (TracedStep(1, "<tp1,pp1>@abc", Assignment((((0,),),), (5,)), 0.25),)
    given = TraceEvent(1, line.split()[0], line, 0.0, 0.5)
    write_events([[given]], file, steps)
    (found,) = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert (found["name"], found["cat"]) == (name, category)
    assert found["args"] == {"step": 1, **arguments, "instruction": line}
    assert read_trace(file).of(1) == ((given,),)  # as compare reads it


def test_waits_are_told_from_work_and_what_drops_values_has_no_slice(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    events = [TraceEvent(1, "compute", name, 0.0, 0.5) for name in ("wait W.head", "compute  free s.layer.0.0")]
    write_events([events], file)
    found = [e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["cat"]) for e in found] == [("wait W.head", "wait")]


def test_ranks_that_did_nothing_are_there(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write_events([[], []], file)
    events = json.loads(file.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_a_trace_of_a_run_says_what_was_run(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    steps = (TracedStep(3, "<tp1,pp1>@abc", Assignment((((0, 2), (1,)), ()), (5, 6, 7)), 0.25),)
    write_events([[TraceEvent(3, "compute", "compute  update", 2.0, 2.5)], []], file, steps)
    trace = read_trace(file)
    assert trace.steps == steps
    assert trace.ranks == ((TraceEvent(3, "compute", "compute  update", 0.0, 0.5),), ())
    assert trace.of(3) == trace.ranks
    assert trace.of(4) == ((), ())


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [], "otherData": {"steps": []}}'])
def test_what_is_no_trace_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match=r"hydragraph train --trace"):
        read_trace(tmp_path / "trace.json")

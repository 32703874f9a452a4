"""Times of instructions: waits add up by kind of traffic, and a trace is what Perfetto reads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hydragraph.cost.trace_file import TraceEvent, write_events
from hydragraph.ir.instruction import Stream
from hydragraph.runtime.instruction_trace import ExposedSeconds, Timing
from hydragraph.runtime.streams import Clock


def test_waits_add_up_by_stream_and_are_spans_of_computation_and_of_the_message() -> None:
    spans: list[TraceEvent] = []
    timing = Timing(3, spans)
    timing.started("W.layer.0")
    with timing.running("pull layer.0"):
        pass  # its start, which holds computation up
    for value, stream in (("W.layer.0", Stream.PULL), ("h1.0", Stream.P2P), ("d1.0", Stream.P2P)):
        with timing.waiting(stream, value):
            time.sleep(0.001)
    with timing.running("forward"):
        pass
    assert not spans  # not before the device is through
    timing.end()
    assert [(s.stream, s.name) for s in spans] == [
        ("compute", "pull layer.0"),
        ("compute", "wait W.layer.0"),
        ("pull", "W.layer.0"),
        ("compute", "wait h1.0"),
        ("compute", "wait d1.0"),
        ("compute", "forward"),
    ]
    assert all(s.step == 3 and s.end >= s.begin for s in spans)
    message, wait = spans[2], spans[1]
    assert message.begin <= wait.begin
    assert message.end == wait.end
    assert timing.exposed.pull == pytest.approx(wait.end - wait.begin, abs=1e-5)
    assert timing.exposed.p2p >= 0.002
    assert timing.exposed.push == 0


def test_without_spans_only_waits_are_kept() -> None:
    timing = Timing()
    with timing.running("forward"), timing.waiting(Stream.PUSH, "G.layer.0"):
        time.sleep(0.001)
    assert timing.spans is None
    assert timing.exposed.push >= 0.001
    assert timing.exposed == ExposedSeconds(push=timing.exposed.push)


class Counting(Clock):
    """A clock whose readings are numbers of their own."""

    def __init__(self) -> None:
        self.readings = 0

    def now(self) -> int:
        self.readings += 1
        return self.readings

    def seconds(self, reading: int) -> float:
        return reading / 10


def test_readings_are_those_of_the_devices_clock() -> None:
    spans: list[TraceEvent] = []
    timing = Timing(1, spans, Counting())
    with timing.waiting(Stream.PULL, "W.head"):
        pass
    assert timing.exposed == ExposedSeconds(pull=pytest.approx(0.1))  # pyrefly: ignore[bad-argument-type]
    timing.end()
    (span,) = spans
    assert span.end - span.begin == pytest.approx(0.1, abs=1e-6)


def test_a_trace_has_a_process_per_rank_and_microseconds_from_the_first_span(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    forward = TraceEvent(1, "compute", "forward", 10.5, 10.75)
    write_events([[forward], [TraceEvent(1, "pull", "W.head", 10.0, 10.5)], []], path)
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [(e["pid"], threads[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert found == [(0, "compute", "forward", 0.5e6, 0.25e6), (1, "pull", "W.head", 0.0, 0.5e6)]

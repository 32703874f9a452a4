"""Traces of real and of simulated iterations, in the Trace Event Format, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hydragraph.ir.instruction import Stream


class Event(NamedTuple):
    """Something that took time on one rank: when it began and ended, in seconds."""

    step: int
    stream: str
    name: str
    begin: float
    end: float


def write_events(per_rank: Iterable[Iterable[Event]], path: Path) -> None:
    """Write all ranks' events, a process per rank and a thread per stream; the first one begins at 0.

    Args:
        per_rank: events by rank.
        path: a .json file.
    """
    streams = [stream.value for stream in Stream]
    records: list[dict[str, Any]] = []
    every = [list(events) for events in per_rank]
    # Clocks of real runs begin anywhere; what a reader wants is the time since the first event.
    first = min((event.begin for events in every for event in events), default=0.0)
    for rank, events in enumerate(every):
        records.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for thread, stream in enumerate(streams):
            records.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": stream}})
        for event in events:
            records.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": streams.index(event.stream),
                    "name": event.name,
                    "ts": (event.begin - first) * 1e6,  # microseconds
                    "dur": (event.end - event.begin) * 1e6,
                    "args": {"step": event.step},
                }
            )
    path.write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}), encoding="utf-8")

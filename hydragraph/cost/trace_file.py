"""Traces of real and simulated iterations, in the Trace Event Format.

A slice has a short name ("send h2.0 to rank 3"), the operation as category, and the instruction as argument; FREE has
none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.instruction_text import parse_instruction
from hydragraph.spec.assignment import Assignment


class TraceEvent(NamedTuple):
    """Span of time on one rank, in seconds."""

    step: int
    stream: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class TracedStep:
    """Traced iteration that can be simulated.

    Attributes:
        seconds: step time on rank 0, without waits for a plan.
    """

    step: int
    strategy: str
    assignment: Assignment
    seconds: float


@dataclass(frozen=True)
class Trace:
    """Trace of a real run; `ranks` has each rank's events of all steps."""

    steps: tuple[TracedStep, ...]
    ranks: tuple[tuple[TraceEvent, ...], ...]

    def of(self, step: int) -> tuple[tuple[TraceEvent, ...], ...]:
        return tuple(tuple(event for event in events if event.step == step) for events in self.ranks)


def write_events(per_rank: Iterable[Iterable[TraceEvent]], path: Path, steps: Sequence[TracedStep] = ()) -> None:
    """Write the events of all ranks, with a process per rank and a thread per stream; times start at 0.

    Args:
        steps: traced steps of a real run, which trace viewers ignore.
    """
    streams = [stream.value for stream in Stream]
    records: list[dict[str, Any]] = []
    every = [list(events) for events in per_rank]
    first = min((event.begin for events in every for event in events), default=0.0)
    for rank, events in enumerate(every):
        records.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for thread, stream in enumerate(streams):
            records.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": stream}})
        for event in events:
            instruction = _instruction(event.name)
            if instruction is not None and instruction.op is Op.FREE:
                continue
            arguments = {} if instruction is None else _arguments(instruction) | {"instruction": event.name}
            records.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": streams.index(event.stream),
                    "name": event.name if instruction is None else _short(instruction),
                    "cat": _category(event, instruction),
                    "ts": (event.begin - first) * 1e6,  # microseconds
                    "dur": (event.end - event.begin) * 1e6,
                    "args": {"step": event.step, **arguments},
                }
            )
    content = {"traceEvents": records, "displayTimeUnit": "ms", "otherData": {"steps": [_record(s) for s in steps]}}
    path.write_text(json.dumps(content), encoding="utf-8")


def _instruction(name: str) -> Instruction | None:
    try:
        return parse_instruction(name, 0)
    except ValueError:
        return None


def _short(instruction: Instruction) -> str:
    op, target = instruction.op, instruction.target
    match op:
        case Op.FORWARD | Op.BACKWARD | Op.OFFLOAD | Op.FETCH:
            return f"{op.value} {target} [{instruction.micro_batch}]"
        case Op.PULL | Op.PUSH:
            return f"{op.value} {target}"
        case Op.SEND:
            return f"send {instruction.reads[0]} to rank {instruction.peer}"
        case Op.RECEIVE:
            return f"receive {instruction.writes[0]} from rank {instruction.peer}"
        case _:
            return str(op.value)


def _category(event: TraceEvent, instruction: Instruction | None) -> str:
    if instruction is not None:
        return instruction.op.value
    return "wait" if event.name.startswith("wait ") else event.stream


def _arguments(instruction: Instruction) -> dict[str, Any]:
    named = {"block": instruction.target, "micro_batch": instruction.micro_batch, "peer": instruction.peer}
    return {name: value for name, value in named.items() if value not in ("", None)}


def read_trace(path: Path) -> Trace:
    """Read a trace written by `write_events`; raise a ValueError if it is not of a real run."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        steps = tuple(_step(record) for record in content["otherData"]["steps"])
        ranks = _events(content["traceEvents"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: not a trace of a run ({error!r}): write one with hydragraph train --trace"
        ) from error
    if not steps:
        raise ValueError(f"{path} contains no traced steps: write the trace of a run with hydragraph train --trace")
    return Trace(steps, ranks)


def _events(records: Iterable[Any]) -> tuple[tuple[TraceEvent, ...], ...]:
    streams = [stream.value for stream in Stream]
    by_rank: dict[int, list[TraceEvent]] = {}
    for record in records:
        events = by_rank.setdefault(record["pid"], [])
        if record["ph"] == "X":
            begin = record["ts"] / 1e6
            step = record["args"]["step"]
            name = record["args"].get("instruction", record["name"])
            events.append(TraceEvent(step, streams[record["tid"]], name, begin, begin + record["dur"] / 1e6))
    return tuple(tuple(events) for _, events in sorted(by_rank.items()))


def _record(step: TracedStep) -> dict[str, Any]:
    assigned = {"micro_batches": step.assignment.micro_batches, "lengths": step.assignment.lengths}
    return {"step": step.step, "strategy": step.strategy, "seconds": step.seconds, **assigned}


def _step(record: Any) -> TracedStep:
    micro_batches = tuple(tuple(tuple(m) for m in pipeline) for pipeline in record["micro_batches"])
    assignment = Assignment(micro_batches, tuple(record["lengths"]))
    return TracedStep(int(record["step"]), str(record["strategy"]), assignment, float(record["seconds"]))

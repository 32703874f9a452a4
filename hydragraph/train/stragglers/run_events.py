"""Events of a run, such as lost ranks and decisions, as lines of `events.jsonl`.

{"time": "2026-11-22T20:31:07+00:00", "step": 41, "event": "straggler", "ranks": [2], "seconds": 0.0,
 "why": "rank 2 takes 2.57 times as long as its peers", "rates": {"2": 2.57}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from hydragraph.data.atomic_write import write_whole

Name = Literal["fault", "straggler", "recovered", "replan", "switch", "migrate", "join", "leave", "saved", "resumed"]

# Titles of events, in the loss picture's order.
TITLES: Mapping[Name, str] = {
    "fault": "rank lost",
    "leave": "rank left",
    "join": "rank joined",
    "resumed": "resumed",
    "straggler": "slow rank",
    "recovered": "fast again",
    "replan": "replanned",
    "switch": "strategy switched",
    "migrate": "state moved",
    "saved": "saved",
}

# Part of `RunEvent.why` if state was lost.
STATE_LOST = "state was lost"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class RunEvent:
    """Event of a run.

    Attributes:
        step: last step before the event.
        seconds: measured or expected duration; of a `resumed` event, from the failure until training continues.
        before_s, after_s: expected seconds per step without and with the decision.
        lost_steps: number of steps undone because state was lost.
        read_bytes: bytes of checkpoint pieces read from memory, disk and store.
    """

    step: int
    event: Name
    ranks: tuple[int, ...]
    seconds: float
    why: str
    rates: Mapping[int, float] = field(default_factory=dict)
    before_s: float | None = None
    after_s: float | None = None
    done: bool = True
    lost_steps: int = 0
    moved_bytes: int = 0
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    time: str = field(default_factory=now)

    @property
    def line(self) -> str:
        record = asdict(self)
        record["ranks"] = list(self.ranks)
        record["seconds"] = round(self.seconds, 4)
        record["rates"] = {str(rank): round(rate, 3) for rank, rate in self.rates.items()}
        first = {name: record.pop(name) for name in ("time", "step", "event", "ranks", "seconds", "why")}
        return json.dumps(first | record)

    @property
    def at(self) -> float:
        return seconds_of(self.time)

    @property
    def title(self) -> str:
        return TITLES[self.event] if self.done else f"{TITLES[self.event]}: not done"

    def __str__(self) -> str:
        return f"step {self.step}: {self.event}: {self.why}"


def seconds_of(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def append_event(path: Path, event: RunEvent) -> None:
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    with path.open("a", encoding="utf-8") as file:
        file.write(event.line + "\n")


def complete_lines(path: Path) -> Iterator[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            yield line, f"{path}:{number}"


def read_events(path: Path) -> list[RunEvent]:
    return [_parse(line, place) for line, place in complete_lines(path)]


def drop_events(path: Path, after: int) -> None:
    """Delete events after a step, except `saved` events and starts of sessions."""
    events = [(line, _parse(line, place)) for line, place in complete_lines(path)]
    kept = [e.step <= after or e.event == "saved" or (e.event == "resumed" and not e.seconds) for _, e in events]
    if not all(kept):
        write_whole(path, "".join(line for (line, _), stays in zip(events, kept, strict=True) if stays))


def _parse(line: str, place: str) -> RunEvent:
    try:
        record = json.loads(line)
        record["ranks"] = tuple(record["ranks"])
        record["rates"] = {int(rank): float(rate) for rank, rate in record.get("rates", {}).items()}
        return RunEvent(**{f.name: record[f.name] for f in fields(RunEvent) if f.name in record})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{place} is not an event ({error}): delete the line") from None

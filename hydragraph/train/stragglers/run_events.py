"""What happened to the ranks of a run, and what was decided: one JSON object per line of `events.jsonl`.

{"time": "2026-11-22T20:31:07+00:00", "step": 41, "event": "straggler", "ranks": [2], "seconds": 0.0,
 "why": "rank 2 takes 2.57 times as long as its peers", "rates": {"2": 2.57}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

Name = Literal["fault", "straggler", "recovered", "replan", "switch", "migrate", "join", "leave", "saved", "resumed"]

# What each is called where people read it, in the order in which pictures show them.
TITLES: Mapping[Name, str] = {
    "fault": "rank lost",
    "leave": "rank left",
    "join": "rank joined",
    "resumed": "went on",
    "straggler": "slow rank",
    "recovered": "fast again",
    "replan": "planned anew",
    "switch": "strategy switched",
    "migrate": "state moved",
    "saved": "saved",
}


def now() -> str:
    """Return the time as events and metrics tell it, in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        step: the last step before it.
        event: what.
        ranks: to whom, or about whom something was decided.
        seconds: that it took: of `resumed`, from a rank's failure until training went on; of `saved`, that training
            waited; of a switch, what it was expected to cost.
        why: the reason, as a sentence.
        rates: of ranks that are slow, as far as they matter.
        before_s, after_s: of a decision: seconds of a step that are expected without and with it.
        done: whether what was decided was also done.
        lost_steps: steps that had been trained and were undone, as the state was lost.
        moved_bytes: of state, that ranks received from other ranks.
        time: when, in UTC.
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
    time: str = field(default_factory=now)

    @property
    def line(self) -> str:
        """The event as JSON, what is always there first."""
        record = asdict(self)
        record["ranks"] = list(self.ranks)
        record["seconds"] = round(self.seconds, 4)
        record["rates"] = {str(rank): round(rate, 3) for rank, rate in self.rates.items()}
        first = ("time", "step", "event", "ranks", "seconds", "why")
        return json.dumps({name: record[name] for name in first} | {k: v for k, v in record.items() if k not in first})

    @property
    def at(self) -> float:
        """When, in seconds since 1970."""
        return seconds_of(self.time)

    @property
    def title(self) -> str:
        """What happened, in two words."""
        return TITLES[self.event] if self.done else f"{TITLES[self.event]}: not done"

    def __str__(self) -> str:
        """For people."""
        return f"step {self.step}: {self.event}: {self.why}"


def seconds_of(time: str) -> float:
    """Return a time that `now` gave, in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


def append_event(path: Path, event: Event) -> None:
    """Add an event's line to a file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(event.line + "\n")


def read_events(path: Path) -> list[Event]:
    """Read a file of events; a last line that was cut off while it was written does not count.

    Raises:
        ValueError: another line cannot be read.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    return [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def _parse(line: str, place: str) -> Event:
    try:
        record = json.loads(line)
        record["ranks"] = tuple(record["ranks"])
        record["rates"] = {int(rank): float(rate) for rank, rate in record.get("rates", {}).items()}
        return Event(**{each.name: record[each.name] for each in fields(Event) if each.name in record})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{place}: no event ({error}): delete the line") from None

"""Contents of a report as frozen data, in seconds and text without escapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hydragraph.cost.critical_path import PathStep
from hydragraph.report.measured_beside_predicted import RunComparison
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent

# Kinds of bars, with colours in report.css.
KINDS = ("forward", "backward", "update", "commit", "pull", "push", "p2p", "offload", "wait")
STREAMS = ("compute", "pull", "push", "p2p", "offload")
# Traffic that a run waits for, and all.
WAITED = ("pull", "push", "p2p")
MOVED = (*WAITED, "tp")


class TimeBar(NamedTuple):
    """Interval of activity, in seconds."""

    begin: float
    end: float
    kind: str
    name: str
    micro_batch: int = -1


@dataclass(frozen=True)
class Lane:
    """Ranks that do the same at the same times.

    Attributes:
        what: role, such as "pipeline 0, stage 1".
        bars: by stream (`STREAMS`), in order of time.
    """

    ranks: tuple[int, ...]
    what: str
    bars: tuple[tuple[TimeBar, ...], ...]


@dataclass(frozen=True)
class IterationView:
    """One iteration over time.

    Attributes:
        title: "simulated", "measured, step 7".
        critical: critical path; empty for measured iterations.
        note: what was merged or left out.
    """

    title: str
    seconds: float
    lanes: tuple[Lane, ...]
    critical: tuple[PathStep, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class RankMemory:
    """Memory of ranks with equal memory over an iteration, in bytes.

    Attributes:
        parts: (name, bytes) of the peak.
        points: (seconds, bytes) from that time on; empty if only the peak is known.
    """

    ranks: tuple[int, ...]
    peak: float
    limit: float
    parts: tuple[tuple[str, float], ...] = ()
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Matrix:
    """Bytes of an iteration from senders (rows) to receivers (columns), by kind.

    Attributes:
        title: "ranks", "nodes".
        groups: node of each name; names of one node are adjacent.
        cells: rows of columns for each kind (`MOVED`).
    """

    title: str
    names: tuple[str, ...]
    groups: tuple[int, ...]
    cells: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def totals(self) -> tuple[float, ...]:
        return tuple(sum(map(sum, rows)) for rows in self.cells)


@dataclass(frozen=True)
class DiagramStage:
    """Layers [first, last) on a device."""

    pipeline: int
    stage: int
    first: int
    last: int
    text: str


@dataclass(frozen=True)
class DeviceRow:
    """Equal neighbouring devices.

    Attributes:
        what: type and current speed: "h100", "l4, 2.57 × as slow", "lost".
        ok: whether the speed is normal.
    """

    ranks: tuple[int, ...]
    node: int
    what: str
    ok: bool
    parts: tuple[DiagramStage, ...]


@dataclass(frozen=True)
class Diagram:
    """Devices x layers of a strategy; `note`: what was left out."""

    layers: int
    rows: tuple[DeviceRow, ...]
    note: str = ""


@dataclass(frozen=True)
class Contender:
    """A strategy in the comparison.

    Attributes:
        seconds: time of an iteration; None if the strategy does not fit.
        micro_batches: number in each pipeline; empty: unknown.
        shares: (name, fraction of the iteration).
        why: why it lost; "" for the winner.
        origin: search that found it.
    """

    name: str
    seconds: float | None
    tokens_per_s: float | None = None
    micro_batches: tuple[int, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()
    why: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Panel:
    """Details of one strategy; `held_seconds` and `held_note` describe `held`."""

    name: str
    courses: tuple[IterationView, ...] = ()
    diagram: Diagram | None = None
    held: tuple[RankMemory, ...] = ()
    held_seconds: float = 0.0
    held_note: str = ""
    traffic: tuple[Matrix, ...] = ()


@dataclass(frozen=True)
class Happened:
    """Events of a run's ranks, and their costs.

    Attributes:
        begin_s: time of the first step, in seconds since 1970.
        events: in order of time, except checkpoints.
        counts: (step, number of ranks from then on).
        parts: (name, seconds) of wall time; empty if unknown.
    """

    begin_s: float
    events: tuple[RunEvent, ...]
    counts: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Fact:
    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class ReportContents:
    """Contents of a report.

    Attributes:
        kind: "simulation", "plan" or "run".
        source: sentences on the source of the numbers.
        contenders: the best first.
        words: the plan in words, by line.
    """

    kind: str
    title: str
    source: tuple[str, ...]
    facts: tuple[Fact, ...] = ()
    contenders: tuple[Contender, ...] = ()
    panels: tuple[Panel, ...] = ()
    steps: tuple[Metrics, ...] = ()
    happened: Happened | None = None
    against: RunComparison | None = None
    words: tuple[str, ...] = ()

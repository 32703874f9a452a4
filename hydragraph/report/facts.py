"""Contents of reports; times are in seconds, and text is not escaped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hydragraph.cost.critical_path import CriticalPath
from hydragraph.report.measured_beside_predicted import RunComparison
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent

# Kinds of bars, with colors in report.css.
KINDS = ("forward", "backward", "update", "commit", "pull", "push", "p2p", "offload", "wait")
STREAMS = ("compute", "pull", "push", "p2p", "offload")
# Traffic whose waits a run measures, and all traffic.
WAITED = ("pull", "push", "p2p")
MOVED = (*WAITED, "tp")


class TimeBar(NamedTuple):
    """Interval of activity on a timeline, in seconds."""

    begin: float
    end: float
    kind: str
    name: str
    micro_batch: int = -1


@dataclass(frozen=True)
class TimelineLane:
    """Timeline of ranks with equal bars; `bars` are in order of time, by stream (`STREAMS`)."""

    ranks: tuple[int, ...]
    what: str
    bars: tuple[tuple[TimeBar, ...], ...]


@dataclass(frozen=True)
class IterationView:
    """Iteration as timelines.

    Attributes:
        title: such as "simulated" or "measured, step 7".
        critical: critical path; empty for measured iterations.
    """

    title: str
    seconds: float
    lanes: tuple[TimelineLane, ...]
    critical: CriticalPath = CriticalPath()  # noqa: RUF009
    note: str = ""


@dataclass(frozen=True)
class RankMemory:
    """Memory in bytes of each rank over an iteration.

    Attributes:
        parts: parts of the peak, as (name, bytes).
        points: (time in seconds, bytes from this time on); empty if only the peak is known.
    """

    ranks: tuple[int, ...]
    peak: float
    limit: float
    parts: tuple[tuple[str, float], ...] = ()
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Matrix:
    """Bytes that senders (rows) send to receivers (columns) in an iteration, by kind.

    Attributes:
        title: "ranks" or "nodes".
        groups: node of each row; rows of a node are adjacent.
        cells: bytes by traffic kind (`MOVED`), row and column.
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
    """Stage with the layers [first, last) on a device."""

    pipeline: int
    stage: int
    first: int
    last: int
    text: str


@dataclass(frozen=True)
class DeviceRow:
    """Row of equal, adjacent devices.

    Attributes:
        what: type and current speed, such as "h100", "l4, 2.57 × as slow", or "lost".
    """

    ranks: tuple[int, ...]
    node: int
    what: str
    ok: bool
    parts: tuple[DiagramStage, ...]


@dataclass(frozen=True)
class Diagram:
    """Devices and layers of a strategy; `note` says what is omitted."""

    layers: int
    rows: tuple[DeviceRow, ...]
    note: str = ""


@dataclass(frozen=True)
class ComparedStrategy:
    """Row of the comparison of strategies.

    Attributes:
        seconds: time of an iteration; None if the strategy does not fit.
        micro_batches: number per pipeline; empty if unknown.
        shares: parts of the iteration, as (name, fraction).
        why: why the strategy is slower than the best one; "" for the best one.
    """

    name: str
    seconds: float | None
    tokens_per_s: float | None = None
    micro_batches: tuple[int, ...] = ()
    shares: tuple[tuple[str, float], ...] = ()
    why: str = ""
    origin: str = ""


@dataclass(frozen=True)
class StrategyPanel:
    name: str
    courses: tuple[IterationView, ...] = ()
    diagram: Diagram | None = None
    held: tuple[RankMemory, ...] = ()
    held_seconds: float = 0.0
    held_note: str = ""
    traffic: tuple[Matrix, ...] = ()


@dataclass(frozen=True)
class RankChanges:
    """Departures, slowdowns and returns of ranks, and their costs.

    Attributes:
        begin_s: time of the first step, in seconds since 1970.
        events: events in order of time, without checkpoints.
        counts: changes of the number of ranks, as (step, number from then on).
        parts: parts of the wall time, as (name, seconds); empty if unknown.
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
        contenders: compared strategies, the best first.
        words: lines of the plan's explanation.
    """

    kind: str
    title: str
    source: tuple[str, ...]
    facts: tuple[Fact, ...] = ()
    contenders: tuple[ComparedStrategy, ...] = ()
    panels: tuple[StrategyPanel, ...] = ()
    steps: tuple[Metrics, ...] = ()
    happened: RankChanges | None = None
    against: RunComparison | None = None
    words: tuple[str, ...] = ()

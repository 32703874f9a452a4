"""Contents of a report as dataclasses. Times are in seconds, and text is not escaped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hydragraph.cost.critical_path import CriticalPath
from hydragraph.report.measured_beside_predicted import RunComparison
from hydragraph.train.step_metrics import Metrics
from hydragraph.train.stragglers.run_events import RunEvent

# Kinds of bars, with colours in report.css.
KINDS = ("forward", "backward", "update", "commit", "pull", "push", "p2p", "offload", "wait")
STREAMS = ("compute", "pull", "push", "p2p", "offload")
# Kinds of traffic whose waits a run measures, and all kinds.
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
    """Timeline of one rank, or of several ranks with equal bars.

    Attributes:
        what: role of the ranks, such as "pipeline 0, stage 1".
        bars: bars by stream (`STREAMS`), in order of time.
    """

    ranks: tuple[int, ...]
    what: str
    bars: tuple[tuple[TimeBar, ...], ...]


@dataclass(frozen=True)
class IterationView:
    """One iteration as timelines.

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
    """Memory in bytes that each rank in `ranks` uses over an iteration.

    Attributes:
        parts: parts of the peak, as (name, bytes).
        points: pairs of a time in seconds and the bytes from this time on; empty if only the peak is known.
    """

    ranks: tuple[int, ...]
    peak: float
    limit: float
    parts: tuple[tuple[str, float], ...] = ()
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Matrix:
    """Bytes sent in an iteration by senders (rows) to receivers (columns), by kind.

    Attributes:
        title: "ranks" or "nodes".
        groups: node of each row; rows of the same node are adjacent.
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
    """Row of a diagram: one device, or several equal, adjacent devices.

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
    """Devices and layers of a strategy. `note` says what is omitted."""

    layers: int
    rows: tuple[DeviceRow, ...]
    note: str = ""


@dataclass(frozen=True)
class ComparedStrategy:
    """A row of the comparison of strategies.

    Attributes:
        seconds: time of an iteration; None if the strategy does not fit.
        micro_batches: number per pipeline; empty if unknown.
        shares: parts of the iteration, as (name, fraction).
        why: why the strategy is slower than the best strategy; "" for the best strategy.
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
    """Departures, slowdowns and returns of a run's ranks, and their costs.

    Attributes:
        begin_s: time of the first step, in seconds since 1970.
        events: events in order of time, without checkpoints.
        counts: changes of the number of ranks, as pairs of a step and the number from this step on.
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

"""Contents of a report as frozen data: numbers in seconds and bytes, text without escapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Kinds of bars, in the order of the legend; each has a colour in report.css. Waits occur only in traced runs.
KINDS = ("forward", "backward", "update", "commit", "pull", "push", "p2p", "wait")
STREAMS = ("compute", "pull", "push", "p2p")
# Kinds of traffic that a run waits for, and all kinds between ranks, including sums within tensor-parallel stages.
WAITED = ("pull", "push", "p2p")
MOVED = (*WAITED, "tp")


class Bar(NamedTuple):
    """An interval of activity: times in seconds from the start, and the micro-batch or -1."""

    begin: float
    end: float
    kind: str
    name: str
    micro_batch: int = -1


@dataclass(frozen=True)
class Lane:
    """Ranks that do the same at the same times.

    Attributes:
        ranks: the ranks.
        what: their role, such as "pipeline 0, stage 1".
        bars: bars by stream (`STREAMS`), in order of time.
    """

    ranks: tuple[int, ...]
    what: str
    bars: tuple[tuple[Bar, ...], ...]


@dataclass(frozen=True)
class CriticalStep:
    """An interval of the critical path, and the activity on it."""

    begin: float
    end: float
    kind: str
    what: str
    ranks: tuple[int, ...]
    stream: str


@dataclass(frozen=True)
class Course:
    """One iteration over time.

    Attributes:
        title: "simulated", "measured, step 7".
        seconds: end of its last instruction.
        lanes: in the order of their first ranks; all ranks, or those that `note` names.
        critical: critical path in order of time; empty for measured iterations.
        note: what was merged or left out; "" if complete.
    """

    title: str
    seconds: float
    lanes: tuple[Lane, ...]
    critical: tuple[CriticalStep, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Held:
    """Memory of ranks over an iteration, in bytes.

    Attributes:
        ranks: ranks with the same memory.
        peak: the maximum.
        limit: limit of each rank.
        parts: composition of the peak: (name, bytes).
        points: (seconds, bytes): bytes from that time on; empty if only the peak is known.
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
        names: names of rows and columns.
        groups: group number of each name; names of one group are adjacent, such as ranks of a node.
        cells: by kind (`MOVED`), rows of columns.
    """

    title: str
    names: tuple[str, ...]
    groups: tuple[int, ...]
    cells: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def totals(self) -> tuple[float, ...]:
        """Total bytes of each kind."""
        return tuple(sum(map(sum, rows)) for rows in self.cells)


@dataclass(frozen=True)
class Part:
    """A stage in the diagram of devices and layers: layers [first, last) on one device."""

    pipeline: int
    stage: int
    first: int
    last: int
    text: str


@dataclass(frozen=True)
class DeviceRow:
    """Equal neighbouring devices as a row of the diagram.

    Attributes:
        ranks: the ranks.
        node: node number.
        what: type and current speed: "h100", "l4, 2.57 × as slow", "lost".
        ok: whether it has its normal speed.
        parts: stages that it computes; empty if idle.
    """

    ranks: tuple[int, ...]
    node: int
    what: str
    ok: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Diagram:
    """Devices x layers of one strategy; `note` says what was left out."""

    layers: int
    rows: tuple[DeviceRow, ...]
    note: str = ""


@dataclass(frozen=True)
class Contender:
    """A strategy in the comparison.

    Attributes:
        name: its text.
        seconds: seconds of an iteration; None if it does not fit.
        tokens_per_s: None if unknown.
        micro_batches: micro-batches of each pipeline; empty if unknown.
        shares: (name, fraction of the iteration, 0 to 1), such as the mean computing time of ranks.
        why: why it lost; "" for the winner.
        origin: the search that it came from; "" if it was given by name.
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
    """Details of one strategy.

    Attributes:
        name: its text.
        courses: its iterations, simulated or measured.
        diagram, held, traffic: None or empty if unknown.
        held_seconds: duration that `held` covers.
        held_note: what was left out of `held`.
    """

    name: str
    courses: tuple[Course, ...] = ()
    diagram: Diagram | None = None
    held: tuple[Held, ...] = ()
    held_seconds: float = 0.0
    held_note: str = ""
    traffic: tuple[Matrix, ...] = ()


@dataclass(frozen=True)
class Compared:
    """Seconds of one kind on one rank, or on all."""

    kind: str
    rank: int | None
    measured: float
    predicted: float


@dataclass(frozen=True)
class ComparedStep:
    """One step's seconds."""

    step: int
    strategy: str
    measured: float
    predicted: float


@dataclass(frozen=True)
class Against:
    """Comparison of predicted and measured times.

    Attributes:
        source: source of the prediction, in a sentence.
        sentence: where the prediction is most wrong.
        rows: rows by kind, for all ranks and each.
        steps: the compared steps.
    """

    source: str
    sentence: str
    rows: tuple[Compared, ...]
    steps: tuple[ComparedStep, ...]


@dataclass(frozen=True)
class TrainedStep:
    """One step of a run: see `train.step_metrics.Metrics`."""

    step: int
    strategy: str
    loss: float
    smoothed: float
    eval_loss: float | None
    tokens_per_s: float
    seconds: float
    expected: float
    waited: tuple[float, float, float]
    memory: int


@dataclass(frozen=True)
class Happening:
    """An event or decision about ranks: see `train.stragglers.run_events.RunEvent`.

    Attributes:
        after_s: seconds since the first step with a timestamp.
        step: the last step before it.
        kind: its name in events.jsonl.
        title: what happened, in two words.
        ranks: the affected ranks.
        seconds: its duration; 0 if unknown or none.
        lost_steps, moved_bytes: its further costs.
        done: whether the decision was carried out.
        why: the reason, in a sentence.
    """

    after_s: float
    step: int
    kind: str
    title: str
    ranks: tuple[int, ...]
    seconds: float
    lost_steps: int
    moved_bytes: int
    done: bool
    why: str


@dataclass(frozen=True)
class Happened:
    """Events of a run's ranks, and their costs.

    Attributes:
        events: in order of time.
        counts: (step, number of ranks from then on).
        parts: (name, seconds): composition of the wall time; empty if unknown.
    """

    events: tuple[Happening, ...]
    counts: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Fact:
    """A key number for the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Contents of a report.

    Attributes:
        kind: "simulation", "plan" or "run".
        title: title of the page.
        source: sentences on the source of the numbers.
        facts: key numbers.
        contenders: strategies, the best first.
        panels: the strategies with details.
        steps: steps of a run.
        happened: events of its ranks; None if there are none.
        against: predicted and measured times.
        words: explanatory text, line by line.
    """

    kind: str
    title: str
    source: tuple[str, ...]
    facts: tuple[Fact, ...] = ()
    contenders: tuple[Contender, ...] = ()
    panels: tuple[Panel, ...] = ()
    steps: tuple[TrainedStep, ...] = ()
    happened: Happened | None = None
    against: Against | None = None
    words: tuple[str, ...] = ()

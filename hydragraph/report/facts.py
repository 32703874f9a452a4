"""What a report says, as frozen data: numbers in seconds and bytes, words unescaped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# What a bar is, in the order of the legend; each has a colour in report.css. Waits are those of a traced run.
KINDS = ("forward", "backward", "update", "commit", "pull", "push", "p2p", "wait")
STREAMS = ("compute", "pull", "push", "p2p")
# What a run waits for, and the kinds of traffic between ranks: also sums within tensor-parallel stages.
WAITED = ("pull", "push", "p2p")
MOVED = (*WAITED, "tp")


class Bar(NamedTuple):
    """Something that took time: when, in seconds from the start, and the micro-batch or -1."""

    begin: float
    end: float
    kind: str
    name: str
    micro_batch: int = -1


@dataclass(frozen=True)
class Lane:
    """Ranks that do the same at the same times.

    Attributes:
        ranks: which.
        what: a word on what they do, such as "pipeline 0, stage 1".
        bars: by stream (`STREAMS`), in order of time.
    """

    ranks: tuple[int, ...]
    what: str
    bars: tuple[tuple[Bar, ...], ...]


@dataclass(frozen=True)
class CriticalStep:
    """What the end waited for during some time."""

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
        seconds: until its last instruction ends.
        lanes: in the order of their first ranks; all ranks, or those that `note` says.
        critical: in order of time; none for what was measured.
        note: what was merged or left out; "" for nothing.
    """

    title: str
    seconds: float
    lanes: tuple[Lane, ...]
    critical: tuple[CriticalStep, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Held:
    """What ranks hold over an iteration, in bytes.

    Attributes:
        ranks: that hold the same.
        peak: the most of it.
        limit: what each may hold.
        parts: of the peak: (name, bytes).
        points: (seconds, bytes): so many from then on; none where only the peak is known.
    """

    ranks: tuple[int, ...]
    peak: float
    limit: float
    parts: tuple[tuple[str, float], ...] = ()
    points: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Matrix:
    """Bytes of an iteration from whom (rows) to whom (columns), by kind.

    Attributes:
        title: "ranks", "nodes".
        names: of rows and columns.
        groups: of each name a number; names of one group stand together, such as ranks of a node.
        cells: by kind (`MOVED`), rows of columns.
    """

    title: str
    names: tuple[str, ...]
    groups: tuple[int, ...]
    cells: tuple[tuple[tuple[float, ...], ...], ...]

    @property
    def totals(self) -> tuple[float, ...]:
        """All bytes of each kind."""
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
    """Equal neighbours among the devices, as a row of the diagram.

    Attributes:
        ranks: from which to which.
        node: its number.
        what: its type and how fast it is today: "h100", "l4, 2.57 x slower", "lost".
        ok: whether it is as fast as it should be.
        parts: what it computes; none: nothing.
    """

    ranks: tuple[int, ...]
    node: int
    what: str
    ok: bool
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Diagram:
    """Devices x layers of one strategy; the note says what was left out."""

    layers: int
    rows: tuple[DeviceRow, ...]
    note: str = ""


@dataclass(frozen=True)
class Contender:
    """A strategy that was looked at.

    Attributes:
        name: its text.
        seconds: of an iteration; None where it does not fit.
        tokens_per_s: None where it is not known.
        micro_batches: of each pipeline; none where it is not known.
        shares: (what, part of the iteration, 0 to 1), such as how long ranks compute on average.
        why: it lost, in words; "" for the one that won.
        origin: the way of searching that it came from; "" where somebody named it.
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
    """All about one strategy.

    Attributes:
        name: its text.
        courses: its iterations, simulated or measured.
        diagram, held, traffic: None or none where they are not known.
        held_seconds: over which ranks hold what they do.
        held_note: what was left out of it.
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
    """Predicted beside measured.

    Attributes:
        source: where the prediction comes from, in a sentence.
        sentence: where it is wrong most.
        rows: by kind, all ranks and each.
        steps: those that were compared.
    """

    source: str
    sentence: str
    rows: tuple[Compared, ...]
    steps: tuple[ComparedStep, ...]


@dataclass(frozen=True)
class TrainedStep:
    """One step of a run: see `train.metrics.Metrics`."""

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
    """Something that happened to ranks, or was decided: see `elastic.events.Event`.

    Attributes:
        after_s: since the first step that tells its time.
        step: the last one before it.
        kind: as events.jsonl calls it.
        title: what happened, in two words.
        ranks: to whom.
        seconds: that it took; 0: not known, or none.
        lost_steps, moved_bytes: what it cost beside that.
        done: whether what was decided was done.
        why: in a sentence.
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
    """What happened to the ranks of a run, and what it cost.

    Attributes:
        events: in order of time.
        counts: (step, ranks from then on).
        parts: (what, seconds): what the wall time consists of; none where it is not known.
    """

    events: tuple[Happening, ...]
    counts: tuple[tuple[int, int], ...] = ()
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Fact:
    """A number that matters, for the top of the page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """All that a report says.

    Attributes:
        kind: "simulation", "plan" or "run".
        title: of the page.
        source: sentences on where the numbers come from.
        facts: the first things to know.
        contenders: strategies, the best first.
        panels: the strategies of which more is known.
        steps: of a run.
        happened: to its ranks; None: nothing.
        against: predicted beside measured.
        words: a text that explains, line by line.
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

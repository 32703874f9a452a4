"""A wider grid than the paper's: every model on 16, 32 and 64 devices, 100K tokens per iteration.

Best homogeneous strategies of this project's own planner are what (d) is compared with here, not the systems that the
paper compares with (benchmarks/published/paper_grid.py). Many of its cells have more devices than the paper gave such
a model, so that (a) leaves some idle.

Compared are, per iteration of 100K tokens, each tuned on iterations of its own:

(a) the best homogeneous strategy that takes the context length, with fixed-length packing: first-fit decreasing into
    packed sequences of the context length, one per micro-batch, dealt to the pipelines in turn. Attention is priced by
    sequence and packed sequences are not padded, both to the advantage of (a);
(b) the best homogeneous strategy with our assignment of sequences to pipelines and micro-batches;
(c) the best candidate that takes the context length, one for all iterations;
(d) the best candidate of every iteration, including candidates that fit only shorter sequences.

Candidates are the proposed strategies and all homogeneous ones, and what `planner.refine` makes of them on the tuning
iterations: together, and in groups of those that the same schemes take.

Times are the 1F1B recurrence; an iteration whose pipelines are not all alike pays the profile's synchronisation on top,
a constant; other pulls and pushes are left out on both sides. "Any strategy at most" uses a lower bound of 1F1B.
"Spread" is (slowest - fastest) / slowest over all pipelines, idle ones included.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.published.device_bound import bound_devices
from benchmarks.published.workload import Lengths, draw, fixed_length, in_turn, mini_batch
from hydragraph import planner
from hydragraph.cost.measured_profile import Profile, Scheme

TOKENS = 100_000
TUNING = 10  # iterations on which static strategies are chosen; others than those measured
SAMPLE = 20_000  # sequences that strategies are proposed from
KEPT = 24  # candidates that refining puts first
KEPT_UNEQUAL = 6  # and of unequal pipelines that take the context
PUBLISHED = (1.32, 2.66)
PUBLISHED_SPREAD = "0.36-0.65 -> 0.02-0.10"
MODELS, DEVICES, CONTEXTS = ("7b", "13b", "32b"), (16, 32, 64), (16_384, 32_768)
DATA = ("web_text", "python_code")

Candidate = tuple[Scheme, ...]


@dataclass(frozen=True)
class Cell:
    """One row of the table: model, devices, length distribution and context length."""

    model: str
    devices: int
    data: str
    context: int

    @property
    def fits(self) -> bool:
        """Say whether it is simulated: 16 devices do not hold the 32B model with 32K tokens."""
        return not (self.model == "32b" and self.devices == 16 and self.context == 32_768)

    @property
    def title(self) -> str:
        """Its name."""
        return f"{self.model.upper()}, {self.devices} devices, {self.data}, {self.context // 1024}K"


@dataclass
class Line:
    """What one way of working took: its strategy, the seconds and the spread of every iteration."""

    strategy: str
    seconds: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)

    def add(self, seconds: float, ends: Sequence[float]) -> None:
        """Add an iteration, in which the pipelines ended at `ends`."""
        self.seconds.append(seconds)
        self.spreads.append(spread(ends))

    @property
    def mean(self) -> float:
        """Mean seconds per iteration."""
        return statistics.fmean(self.seconds)

    @property
    def spread(self) -> float:
        """Mean spread."""
        return statistics.fmean(self.spreads)


@dataclass(frozen=True)
class Result:
    """A cell's numbers.

    Attributes:
        lines: (a) to (d).
        unequal: part of (d)'s iterations that ran unequal pipelines.
        charged: mean seconds of (d) were every iteration to pay the synchronisation.
        only_unequal: the best static strategy of unequal pipelines, and its mean seconds on the tuning iterations.
        searching: seconds that proposing and refining the candidates took.
        ceiling: mean seconds below which no strategy at all can be: the least bound of the homogeneous ones, or, if it
            is less, that of any pipelines on these devices with what unequal ones pay.
        divided: mean seconds of that bound of any pipelines, without what unequal ones pay.
        longest: mean seconds of the longest sequence alone, on the scheme that computes it fastest.
        pipelines: of the homogeneous strategies that take the context, the most pipelines.
        sync: seconds that an iteration of unequal pipelines pays.
    """

    cell: Cell
    lines: tuple[Line, Line, Line, Line]
    unequal: float
    charged: float
    only_unequal: tuple[str, float]
    searching: float
    ceiling: float
    divided: float
    longest: float
    pipelines: int
    sync: float

    @property
    def gain(self) -> float:
        """How many times (d) is faster than (a)."""
        return self.lines[0].mean / self.lines[3].mean


# Strategies.


def shown(strategy: Iterable[Scheme]) -> str:
    """Return a short text of a strategy."""
    return " + ".join(f"{n}*tp{tp}pp{pp}" for (tp, pp), n in Counter(strategy).items())


def reach(strategy: Candidate, profile: Profile) -> int:
    """Return the longest sequence that a strategy takes."""
    devices = sum(tp * pp for tp, pp in strategy)
    return max(profile.max_len(scheme, devices) for scheme in set(strategy))


def charge(strategy: Candidate, profile: Profile) -> float:
    """Return what unequal pipelines pay."""
    return profile.hetero_sync_s if len(set(strategy)) > 1 else 0.0


def spread(ends: Sequence[float]) -> float:
    """Return (slowest - fastest) / slowest."""
    return 1 - min(ends) / max(ends)


# Tuning.


@dataclass(frozen=True)
class Chosen:
    """What the tuning iterations decide: (a), (b), (c), the candidates of (d), and (c) of unequal pipelines only.

    `searching` are the seconds that finding candidates took.
    """

    fixed: Candidate
    alike: Candidate
    static: Candidate
    candidates: list[Candidate]
    unequal: tuple[str, float]
    searching: float


def search(profile: Profile, cell: Cell, sample: Lengths, tuning: Sequence[Lengths]) -> list[Candidate]:
    """Return the candidates: all homogeneous strategies, and those that refining puts first."""
    proposed = planner.propose(profile, sample, cell.devices, cell.context)
    alike = planner.homogeneous(profile, cell.devices)
    starts = [*proposed, *alike]
    refined = [tuple(s) for s in planner.refine(starts, profile, tuning, cell.devices, context=cell.context)]
    unequal = [s for s in refined if len(set(s)) > 1 and reach(s, profile) >= cell.context]
    return list(dict.fromkeys([*refined[:KEPT], *unequal[:KEPT_UNEQUAL], *map(tuple, alike)]))


def least(
    candidates: Sequence[Candidate],
    seconds: Callable[[Candidate, Lengths], float],
    bounds: Sequence[float],
    tuning: Sequence[Lengths],
) -> tuple[Candidate, float]:
    """Return the candidate with the least mean seconds, trying the best bounds first and only while they can win."""
    best, kept = math.inf, candidates[0]
    for bound, candidate in sorted(zip(bounds, candidates, strict=True)):
        if bound >= best:
            break
        mean = statistics.fmean(seconds(candidate, lengths) for lengths in tuning)
        if mean < best:
            best, kept = mean, candidate
    return kept, best


def tune(profile: Profile, cell: Cell, sample: Lengths, tuning: Sequence[Lengths]) -> Chosen:
    """Choose all strategies. A candidate of (d) is kept where its bound could win a tuning iteration."""
    began = time.process_time()
    every = search(profile, cell, sample, tuning)
    searching = time.process_time() - began
    found = [planner.compare(every, profile, lengths) for lengths in tuning]
    bound = {c: statistics.fmean(f.verdicts[i].bound for f in found) for i, c in enumerate(every)}

    def fixed(strategy: Candidate, lengths: Lengths) -> float:
        return max(in_turn(profile.pipelines(strategy), fixed_length(lengths, cell.context)))

    def assigned(strategy: Candidate, lengths: Lengths) -> float:
        return planner.assign(strategy, profile, lengths).seconds + charge(strategy, profile)

    whole = [c for c in every if reach(c, profile) >= cell.context]
    same, mixed = ([c for c in whole if (len(set(c)) == 1) == equal] for equal in (True, False))
    a, _ = least(same, fixed, [0.0] * len(same), tuning)
    b, b_s = least(same, assigned, [bound[c] for c in same], tuning)
    c, c_s = least(mixed, assigned, [bound[c] for c in mixed], tuning) if mixed else (b, math.inf)
    static = c if c_s < b_s else b
    able = [s for i, s in enumerate(every) if any(f.verdicts[i].bound <= f.seconds for f in found)]
    alike = [s for s in every if len(set(s)) == 1]
    unequal = (shown(c) if mixed else "none", c_s)
    return Chosen(a, b, static, list(dict.fromkeys([*able, *alike, static])), unequal, searching)


# A cell.


def simulate(cell: Cell, profile: Profile, quantiles: Sequence[float], iterations: int) -> Result:
    """Simulate a cell."""
    random = np.random.default_rng([MODELS.index(cell.model), cell.devices, DATA.index(cell.data), cell.context])
    sample = draw(quantiles, cell.context, random, SAMPLE)
    tuning = [mini_batch(quantiles, cell.context, TOKENS, random) for _ in range(TUNING)]
    chosen = tune(profile, cell, sample, tuning)
    lines = (Line(shown(chosen.fixed)), Line(shown(chosen.alike)), Line(shown(chosen.static)), Line("-"))
    homogeneous_pipelines = profile.pipelines(chosen.fixed)
    alike = [i for i, s in enumerate(chosen.candidates) if len(set(s)) == 1]
    schemes = [s for s in profile.schemes if s[0] * s[1] <= cell.devices]
    kinds = [profile.pipeline(s, cell.devices) for s in schemes]
    of_alike = {chosen.candidates[i][0] for i in alike}
    unequal, charged, divided, alones, ceilings = [], [], [], [], []
    for _ in range(iterations):
        lengths = mini_batch(quantiles, cell.context, TOKENS, random)
        ends = in_turn(homogeneous_pipelines, fixed_length(lengths, cell.context))
        lines[0].add(max(ends), ends)
        for line, strategy in ((lines[1], chosen.alike), (lines[2], chosen.static)):
            assignment = planner.assign(strategy, profile, lengths)
            line.add(assignment.seconds + charge(strategy, profile), assignment.by_pipeline)
        choice = planner.compare(chosen.candidates, profile, lengths)
        paid = choice.verdicts[choice.index].charge
        lines[3].add(choice.assignment.seconds + paid, choice.assignment.by_pipeline)
        unequal.append(len(set(chosen.candidates[choice.index])) > 1)
        charged.append(choice.assignment.seconds + profile.hetero_sync_s)
        divided.append(bound_devices(kinds, lengths, cell.devices))
        alones.append(min(k.stages * k.micro_batch_seconds(max(lengths)) for k in kinds if k.max_len >= max(lengths)))
        same = [k for k, s in zip(kinds, schemes, strict=True) if k.max_len >= max(lengths) and s in of_alike]
        equal = [bound_devices([k], lengths, cell.devices) for k in same]
        ceilings.append(min([divided[-1] + profile.hetero_sync_s, *equal]))
    ceiling, divided_s, longest = map(statistics.fmean, (ceilings, divided, alones))
    whole = [chosen.candidates[i] for i in alike if reach(chosen.candidates[i], profile) >= cell.context]
    most = max(map(len, whole))
    return Result(
        cell,
        lines,
        statistics.fmean(unequal),
        statistics.fmean(charged),
        chosen.unequal,
        chosen.searching,
        ceiling,
        divided_s,
        longest,
        most,
        profile.hetero_sync_s,
    )


# Printing.


def explain(result: Result) -> str:
    """Say in a sentence what keeps a cell under the published gain."""
    a, d = result.lines[0], result.lines[3]
    ceiling = a.mean / result.ceiling
    parts = []
    if ceiling < PUBLISHED[0]:
        parts.append(f"no strategy at all can gain more than {ceiling:.2f}x")
    else:
        parts.append(f"any strategy's bound allows {ceiling:.2f}x")
    if result.longest > 0.7 * d.mean:
        parts.append(f"the longest sequence alone takes {result.longest / d.mean:.0%} of (d)")
    if result.divided > 0.7 * d.mean:
        parts.append(f"perfectly divided work takes {result.divided / d.mean:.0%} of (d), synchronisation not counted")
    if result.pipelines <= 2:
        many = "one pipeline takes" if result.pipelines == 1 else f"{result.pipelines} pipelines take"
        parts.append(f"too few devices: at most {many} the context, so there is little to balance")
    if a.spread < 0.2:
        parts.append(f"(a) is already balanced (spread {a.spread:.2f})")
    name, seconds = result.only_unequal
    sync = f"; the best unequal one, {name}, takes {seconds:.2f} s" if math.isfinite(seconds) else ""
    if not result.unequal:
        parts.append(
            f"unequal pipelines never pay for their synchronisation "
            f"({result.sync:g} s, {result.sync / d.mean:.0%} of (d)){sync}"
        )
    return "; ".join(parts)


def table(results: Sequence[Result]) -> Table:
    """Return the table of all cells."""
    heading = f"the wider grid: seconds per iteration of {TOKENS:,} tokens; published spread {PUBLISHED_SPREAD}"
    made = Table(title=heading, title_justify="left")
    for name in ("cell", "(a) strategy", "(a)", "(b)", "(c)", "(d)"):
        made.add_column(name, justify="left" if name in ("cell", "(a) strategy") else "right", no_wrap=True)
    for name in (
        "a/b",
        "a/c",
        "a/d",
        "a/d, all\ncharged",
        "any strat.\nat most",
        "spread\na",
        "spread\nd",
        "unequal\nin (d)",
    ):
        made.add_column(name, justify="right")
    for r in results:
        a, b, c, d = (line.mean for line in r.lines)
        gains = (f"{a / b:.2f}", f"{a / c:.2f}", f"{r.gain:.2f}", f"{a / r.charged:.2f}")
        made.add_row(
            r.cell.title,
            r.lines[0].strategy,
            *(f"{s:.2f}" for s in (a, b, c, d)),
            *gains,
            f"{a / r.ceiling:.2f}",
            f"{r.lines[0].spread:.2f}",
            f"{r.lines[3].spread:.2f}",
            f"{r.unequal:.0%}",
            style="" if r.gain >= PUBLISHED[0] else "yellow",
        )
    return made


def draw_picture(results: Sequence[Result], path: Path) -> None:
    """Draw (a) to (d) of all cells."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [m for m in MODELS if any(r.cell.model == m for r in results)]
    columns = list(dict.fromkeys((r.cell.data, r.cell.context) for r in results))
    figure = Figure(figsize=(3.6 * len(columns) + 1, 2.6 * len(rows) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for (i, model), (j, (data, context)) in product(enumerate(rows), enumerate(columns)):
        own = [r for r in results if (r.cell.model, r.cell.data, r.cell.context) == (model, data, context)]
        for k, name in enumerate(("(a) homogeneous, fixed-length", "(b) + assignment", "(c) + static", "(d) dynamic")):
            at = [x + 0.2 * k for x in range(len(own))]
            axes[i, j].bar(at, [r.lines[k].mean for r in own], 0.2, label=name, color=f"C{k}")
        for x, r in enumerate(own):
            axes[i, j].annotate(f"{r.gain:.2f}x", (x + 0.6, r.lines[3].mean), ha="center", va="bottom", fontsize=8)
        axes[i, j].set_xticks([x + 0.3 for x in range(len(own))], [str(r.cell.devices) for r in own])
        axes[i, j].set_title(f"{model.upper()}, {data}, {context // 1024}K", fontsize=9)
    figure.supxlabel("devices")
    figure.supylabel("seconds per iteration")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=9)
    figure.savefig(path, dpi=120, format="png")


def cells_of(models: Sequence[str]) -> list[Cell]:
    """Return the cells that are simulated."""
    every = [Cell(m, n, d, c) for m, d, c, n in product(models, DATA, CONTEXTS, DEVICES)]
    return [cell for cell in every if cell.fits]


def report(results: Sequence[Result], console: Console, picture: Path) -> None:
    """Print the table and the explanations, and draw the picture."""
    console.print(table(results))
    low = [r for r in results if r.gain < PUBLISHED[0]]
    console.print(f"(a)/(d) is at least {PUBLISHED[0]} in {len(results) - len(low)} of {len(results)} cells.")
    for r in low:
        console.print(f"{r.cell.title}: {r.gain:.2f}x: {explain(r)}.", highlight=False, soft_wrap=True)
    searching = [r.searching for r in results]
    console.print(
        f"proposing and refining took {statistics.fmean(searching):.2f} s CPU per cell, at most {max(searching):.2f} s."
    )
    mixed = [r for r in results if r.lines[2].strategy != r.lines[1].strategy]
    console.print(f"(c) is (b) in {len(results) - len(mixed)} cells, unequal pipelines in the others:")
    for r in mixed:
        console.print(f"{r.cell.title}: {r.lines[2].strategy}", highlight=False, soft_wrap=True)
    draw_picture(results, picture)
    console.print(f"picture: {picture}")

"""The paper's own grid and sweeps (Hydraulis, figures 10 to 12), by published constants.

(a) to (d) are the steps of the paper's ablation (figure 13), all by our planner, each strategy tuned on mini-batches
of its own, with what pull, push, commit and update add (simulated with this project's runtime and overlap):

(a) the best homogeneous strategy that takes the context; sequences dispatched by Eq. 3, then packed to the context
(b) the same, or another homogeneous one, with our assignment (Eq. 1 and 3 as one search)
(c) the best strategy of any pipelines that takes the context, one for all iterations
(d) the best candidate of every iteration

Beside them stand Megatron-LM, DeepSpeed and HotSPa with the strategies that the paper's authors tuned for them (Table
3), emulated as benchmarks/published/rivals.py says. "best rival / d" is what the paper divides (1.32 to 2.66 in its
figure 10; single cells are published as a picture only): the least and the most, as rivals' traffic is not known
better. "computing" leaves out what moving states adds, on both sides. "b/d" is what heterogeneous pipelines and
choosing every iteration are worth by themselves. "at most" is what the best rival's least time would gain over the
lower bound of any pipelines on these devices (`published/device_bound.py`), were moving states free.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from rich.table import Table

from benchmarks.published.device_bound import bound_devices
from benchmarks.published.llamas import MODELS, completed, known, simulated, strategy
from benchmarks.published.plans import Candidate, Priced
from benchmarks.published.rivals import (
    TABLE_3,
    DeepSpeed,
    HotSpa,
    Megatron,
    Rival,
    Spent,
    best_deepspeed,
    best_hotspa,
    best_megatron,
)
from benchmarks.published.workload import Lengths, draw, mini_batch
from hydragraph.cost.measured_profile import Profile

TUNING = 6  # mini-batches on which static strategies are chosen; others than those measured
SAMPLE = 20_000  # sequences that strategies are proposed from
PUBLISHED = (1.32, 2.66)
# The first two stand for the paper's CommonCrawl and GitHub; the third is not the paper's (`workload.rollouts`).
DATA = ("web_text", "python_code", "rollouts")
DEVICES = {"7b": (8, 16), "13b": (16, 32), "32b": (32, 64)}
FRAMEWORKS = {"F1": (16_384, 100_000), "F2": (32_768, 100_000), "F3": (32_768, 200_000)}  # context, tokens


@dataclass(frozen=True)
class Cell:
    """A model, its number of devices, a length distribution cut at the context, and tokens per iteration."""

    model: str
    devices: int
    data: str
    context: int
    tokens: int

    @property
    def title(self) -> str:
        """Its name."""
        return f"{self.model.upper()} {self.devices} {self.data} {self.context // 1024}K, {self.tokens // 1000}K tokens"

    @property
    def seed(self) -> list[int]:
        """Of its mini-batches."""
        return [MODELS.index(self.model), self.devices, DATA.index(self.data), self.context, self.tokens]


CELLS = tuple(
    Cell(model, devices, data, *FRAMEWORKS[name])
    for model in MODELS
    for devices, data, name in product(DEVICES[model], DATA[:2], FRAMEWORKS)
)
ROLLOUTS = tuple(
    Cell(model, DEVICES[model][1], "rollouts", context, 200_000) for model in MODELS for context in (16_384, 32_768)
)
# Section 8.3: LLaMA 7B on CommonCrawl; 16 devices, 32K and 200K tokens where they are not what changes.
SWEEPS = {
    "devices": tuple(Cell("7b", n, "web_text", 32_768, 200_000) for n in (8, 16, 32, 64)),
    "context": tuple(Cell("7b", 16, "web_text", n, 200_000) for n in (16_384, 32_768, 65_536, 131_072)),
    "tokens": tuple(Cell("7b", 16, "web_text", 32_768, n) for n in (100_000, 200_000, 400_000)),
}
# Section 8.4. Table 1's 5.49 s are what Appendix E calls "approximately 5.5 seconds", with 200K tokens.
CASE = Cell("32b", 64, "web_text", 32_768, 200_000)


@dataclass(frozen=True)
class Mean:
    """Mean seconds of iterations."""

    computing: float
    whole: float
    most: float

    @classmethod
    def of(cls, spent: Sequence[Spent]) -> Mean:
        """Return those of what iterations took."""
        every = ([getattr(one, name) for one in spent] for name in ("computing", "whole", "most"))
        return cls(*map(statistics.fmean, every))


@dataclass(frozen=True)
class Result:
    """A cell's numbers.

    Attributes:
        cell: which.
        lines: "a" to "d", and the rivals by their names.
        strategies: of (b), (c) and the rivals, in words.
        chosen: how often (d) ran which strategy.
        bound: mean seconds of computing that no plan can beat.
    """

    cell: Cell
    lines: Mapping[str, Mean]
    strategies: Mapping[str, str]
    chosen: Mapping[str, int]
    bound: float

    @property
    def rivals(self) -> list[Mean]:
        """Results of the systems that the paper compares with."""
        return [line for name, line in self.lines.items() if name not in "abcd"]

    def gain(self, what: str) -> float:
        """Return the best rival's seconds over ours: of "computing", the "whole" at its least, or at its "most"."""
        best = min(float(getattr(rival, what)) for rival in self.rivals)
        return best / float(getattr(self.lines["d"], what))

    def over(self, name: str) -> float:
        """Return another column's seconds over (d)'s."""
        return self.lines[name].whole / self.lines["d"].whole

    @property
    def at_most(self) -> float:
        """Bound on the speedup of any plan over the best rival with its cheapest traffic."""
        return min(rival.whole for rival in self.rivals) / self.bound


def shown(candidate: Candidate) -> str:
    """Return a short text of a strategy."""
    return " + ".join(f"{n}*tp{tp}pp{pp}" for (tp, pp), n in Counter(candidate).items())


@dataclass(frozen=True)
class Prepared:
    """A cell ready to be measured: our candidates, its mini-batches, and what they were tuned on."""

    cell: Cell
    profile: Profile
    priced: Priced
    tuning: tuple[Lengths, ...]
    batches: tuple[Lengths, ...]


def prepared(cell: Cell, published: Profile, quantiles: Sequence[float], iterations: int) -> Prepared:
    """Draw a cell's mini-batches and find its candidates."""
    profile = completed(published)
    random = np.random.default_rng(cell.seed)
    sample = draw(quantiles, cell.context, random, SAMPLE)
    tuning = tuple(mini_batch(quantiles, cell.context, cell.tokens, random) for _ in range(TUNING))
    priced = Priced.of(profile, cell.devices, cell.context, sample, tuning)
    batches = tuple(mini_batch(quantiles, cell.context, cell.tokens, random) for _ in range(iterations))
    return Prepared(cell, profile, priced, tuning, batches)


def rivals_of(cell: Cell, profile: Profile, tuning: Sequence[Lengths]) -> dict[str, Rival]:
    """Return the three systems: by Table 3 where it has the cell, otherwise tuned."""
    published = TABLE_3.get((cell.model, cell.devices, cell.context))
    at = (profile, cell.devices)
    if published is None:
        deepspeed = best_deepspeed(*at, cell.context, tuning)
        tuned: dict[str, Rival] = {"Megatron": best_megatron(*at, cell.context, tuning)}
        if deepspeed is not None:
            tuned["DeepSpeed"] = deepspeed
        return {**tuned, "HotSPa": best_hotspa(*at, cell.context, tuning)}
    return {
        "Megatron": Megatron(*at, published.megatron, cell.context, tuning[0]),
        "DeepSpeed": DeepSpeed(*at, published.sp, cell.context, published.recompute),
        "HotSPa": HotSpa(*at, published.hotspa, cell.context, tuning),
    }


def measured(cell: Cell, published: Profile, quantiles: Sequence[float], iterations: int) -> Result:
    """Run a cell."""
    ready = prepared(cell, published, quantiles, iterations)
    priced = ready.priced
    equal = priced.static(ready.tuning, equal=True)
    alike = [i for i, s in enumerate(priced.candidates) if len(set(s)) == 1]
    whole = [i for i in alike if priced.profile.max_len(priced.candidates[i][0], cell.devices) >= cell.context]

    def packed(i: int) -> float:
        return sum(priced.packed_to_context(i, batch).whole for batch in ready.tuning)

    plain = min(whole, key=packed)
    static = priced.static(ready.tuning, equal=False)
    rivals = rivals_of(cell, ready.profile, ready.tuning)
    kinds = [ready.profile.pipeline(s, cell.devices) for s in ready.profile.schemes]
    lines: dict[str, list[Spent]] = {name: [] for name in ("a", "b", "c", "d", *rivals)}
    chosen: Counter[str] = Counter()
    bounds = []
    for batch in ready.batches:
        index, _, spent = priced.chosen(batch)
        chosen[shown(priced.candidates[index])] += 1
        lines["a"].append(priced.packed_to_context(plain, batch))
        lines["b"].append(priced.stayed(equal, batch))
        lines["c"].append(priced.stayed(static, batch))
        lines["d"].append(spent)
        for name, rival in rivals.items():
            lines[name].append(rival.spent(batch))
        bounds.append(bound_devices(kinds, batch, cell.devices))
    names = {"b": shown(priced.candidates[equal]), "c": shown(priced.candidates[static])}
    names |= {name: rival.name for name, rival in rivals.items()}
    means = {name: Mean.of(spent) for name, spent in lines.items()}
    return Result(cell, means, names, dict(chosen.most_common()), statistics.fmean(bounds))


# Figure 12.


@dataclass(frozen=True)
class Estimated:
    """One iteration of the case study: what ran, what was expected of it, and what is simulated with all shared."""

    strategy: str
    computing: float
    expected: float
    simulated: float


def case_study(published: Profile, quantiles: Sequence[float], iterations: int) -> list[Estimated]:
    """Run the case study: every iteration's choice, and its simulation with messages and shared links."""
    ready = prepared(CASE, published, quantiles, iterations)
    costs = known(ready.profile, CASE.devices)
    found = []
    for batch in ready.batches:
        index, assignment, spent = ready.priced.chosen(batch)
        candidate = ready.priced.candidates[index]
        actual = simulated(costs, ready.profile, strategy(candidate, ready.profile), assignment).seconds
        found.append(Estimated(shown(candidate), spent.computing, spent.whole, actual))
    return found


# Printing.


def table(results: Sequence[Result]) -> Table:
    """Return the table of the grid."""
    heading = "mean seconds per iteration, pull and push included; the paper's best rival / Hydraulis: 1.32-2.66"
    made = Table(title=heading, title_justify="left")
    names = ("cell", "Megatron", "DeepSpeed", "HotSPa", "(a)", "(b)", "(c)", "(d)")
    ratios = ("best rival / d\nleast - most", "the same,\ncomputing", "at\nmost", "a/d", "b/d", "c/d", "(d) moves\nfor")
    for name in (*names, *ratios):
        made.add_column(name, justify="left" if name == "cell" else "right", no_wrap=True)
    for r in results:
        d = r.lines["d"]
        made.add_row(
            r.cell.title,
            *(_range(r.lines.get(name)) for name in ("Megatron", "DeepSpeed", "HotSPa")),
            *(f"{r.lines[name].whole:.2f}" for name in "abcd"),
            f"{r.gain('whole'):.2f} - {r.gain('most'):.2f}",
            f"{r.gain('computing'):.2f}",
            f"{r.at_most:.2f}",
            *(f"{r.over(name):.2f}" for name in "abc"),
            f"{d.whole - d.computing:.2f}",
            style="" if r.gain("whole") >= PUBLISHED[0] else "yellow",
        )
    return made


def _range(line: Mean | None) -> str:
    if line is None:
        return "-"
    return f"{line.whole:.2f}" if line.most - line.whole < 0.005 else f"{line.whole:.2f} - {line.most:.2f}"


def summary(results: Sequence[Result]) -> list[str]:
    """Say in sentences what the grid shows, naming both sides of every ratio."""
    count = len(results)
    least, most, computing = ([r.gain(what) for r in results] for what in ("whole", "most", "computing"))
    lines = []
    for what, gains in (
        ("rivals' traffic at its least", least),
        ("rivals' traffic at its most", most),
        ("computing alone", computing),
    ):
        lines.append(
            f"best of Megatron, DeepSpeed, HotSPa (Table 3) / choosing every iteration, {what}: "
            f"{min(gains):.2f} to {max(gains):.2f}, mean {statistics.fmean(gains):.2f}; "
            f"{sum(g >= PUBLISHED[0] for g in gains)} of {count} cells reach {PUBLISHED[0]}"
        )
    for name, words in (
        ("a", "(a) the best homogeneous strategy, packed to the context"),
        ("b", "(b) the best homogeneous strategy with our assignment"),
        ("c", "(c) the best static strategy of any pipelines with our assignment"),
    ):
        gains = [r.over(name) for r in results]
        lines.append(
            f"{words} / choosing every iteration: {min(gains):.2f} to {max(gains):.2f}, "
            f"mean {statistics.fmean(gains):.2f}"
        )
    low = [r for r in results if r.gain("whole") < PUBLISHED[0]]
    proven = [r for r in low if r.at_most < PUBLISHED[0]]
    lines.append(
        f"of {len(low)} cells below {PUBLISHED[0]} (traffic at its least), no plan at all can reach it in {len(proven)}"
    )
    for name in ("Megatron", "DeepSpeed", "HotSPa"):
        own = [r for r in results if name in r.lines]
        wins = sum(min(r.rivals, key=lambda m: m.whole) is r.lines[name] for r in own)
        for how in ("whole", "most"):
            gains = [getattr(r.lines[name], how) / r.lines["d"].whole for r in own]
            if gains:
                lines.append(
                    f"{name} at its {'least' if how == 'whole' else 'most'} / choosing every iteration: "
                    f"{min(gains):.2f} to {max(gains):.2f}; {sum(g >= PUBLISHED[0] for g in gains)} of {count} cells "
                    f"reach {PUBLISHED[0]}" + (f"; it is the best rival in {wins}" if how == "whole" else "")
                )
    lines += anchors(results)
    lines.append("best static strategies (b) -> (c), and how often (d) ran which:")
    for r in results:
        most_run = ", ".join(f"{n}x {s}" for s, n in list(r.chosen.items())[:3])
        others = f" and {len(r.chosen) - 3} more" if len(r.chosen) > 3 else ""
        lines.append(f"  {r.cell.title}: {r.strategies['b']} -> {r.strategies['c']}; {most_run}{others}")
    return lines


def anchors(results: Sequence[Result]) -> list[str]:
    """Return the paper's statements about single cells, next to our results for these cells."""
    lines = []
    for r in results:
        if r.cell == Cell("7b", 8, "python_code", 16_384, 100_000):
            hotspa = r.lines["HotSPa"]
            lines.append(
                f"HotSPa, {r.cell.title}: {hotspa.computing:.1f} s of computing, {hotspa.most:.1f} s at its most; "
                "published (GitHub): 6.7 s, including nearly 2 s of switching"
            )
        if r.cell == CASE:
            b, d = r.lines["b"], r.lines["d"]
            lines.append(
                f"computing of (b), then of (d), {r.cell.title}: {b.computing:.2f} s, {d.computing:.2f} s, "
                f"{b.computing / d.computing:.2f}x; published (Table 1): 6.78 s, 4.29 s, 1.58x"
            )
    return lines


def sweep_table(title: str, results: Sequence[Result]) -> Table:
    """Return the table of a sweep, as in section 8.3; relative to ours, as in figure 11."""
    made = Table(title=f"{title}: seconds per iteration, relative to (d)", title_justify="left")
    for heading in ("cell", "Megatron", "DeepSpeed", "HotSPa", "(b)", "(d)", "strategies of the rivals"):
        made.add_column(heading, justify="left" if heading in ("cell", "strategies of the rivals") else "right")
    for r in results:
        ours = r.lines["d"].whole
        cells = []
        for rival in ("Megatron", "DeepSpeed", "HotSPa", "b"):
            line = r.lines.get(rival)
            cells.append("-" if line is None else f"{_range(line)} ({line.whole / ours:.2f}x)")
        words = "; ".join(r.strategies[name] for name in ("Megatron", "DeepSpeed", "HotSPa") if name in r.strategies)
        made.add_row(r.cell.title, *cells, f"{ours:.2f}", words)
    return made


def case_table(rows: Sequence[Estimated]) -> Table:
    """Return how often the case study ran which strategy, and what was expected of it and simulated."""
    title = f"figure 12, {CASE.title}, {len(rows)} iterations: mean seconds"
    made = Table(title=title, title_justify="left")
    for heading in ("strategy", "iterations", "computing", "expected", "simulated", "simulated / expected"):
        made.add_column(heading, justify="left" if heading == "strategy" else "right")
    counts = Counter(row.strategy for row in rows)
    for name, count in [*counts.most_common(), ("all", len(rows))]:
        own = [row for row in rows if name in (row.strategy, "all")]
        ratios = sorted(row.simulated / row.expected for row in own)
        made.add_row(
            name,
            str(count),
            *(f"{statistics.fmean(getattr(row, what) for row in own):.2f}" for what in ("computing", "expected")),
            f"{statistics.fmean(row.simulated for row in own):.2f}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        )
    return made

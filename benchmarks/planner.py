"""How fast and how good planning is: each part against the paper's figures, the targets, exact answers and bounds.

    python benchmarks/planner.py                 # the whole table
    python benchmarks/planner.py --only packing  # a part of it
    python benchmarks/planner.py --data DIR      # where the published constants and length distributions are

The case is the paper's: a 32B Llama, 32K context, web text, 200K tokens per iteration on 64 devices and 3.2M on 1,024.
Targets apply to the CPU seconds of this process; the wall clock is also printed, but depends on what else the machine
does. The paper used ten processes, this program uses one. Compilation is printed separately.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

from benchmarks.published.dispatching import Bubble, dispatch, eq3_problem
from benchmarks.published.packing import pack_pipeline
from hydragraph import planner
from hydragraph.cost.measured_profile import Profile, Scheme
from hydragraph.planner.assignment import local_search
from hydragraph.planner.assignment.spread_search import longest_first, value
from hydragraph.planner.generators.hydraulis import PIPELINE_STEPS, Histogram, histogram, least

T = TypeVar("T")
Lengths = list[int]

PROFILE, DATA, CONTEXT = "llama-32b-a800-80g", "web_text", 32_768
ITERATIONS = 10
SCALES = {64: 200_000, 1024: 3_200_000}  # devices: tokens per iteration
MIX: list[Scheme] = [(16, 1), (8, 1), (4, 2), (4, 2), (2, 4), (2, 4), (1, 4), (1, 4)]  # for 64 devices
SAMPLE = 20_000  # sequences that strategies are proposed from
SAMPLED_PIPELINES = 80  # per scale: all of 64 devices, whose packing is compared with a long search
LONG_SEARCH = 4000  # kicks; exact where there are few sequences and cvxpy is installed
EXACT_UP_TO = 10  # sequences
PARTS = ("proposal", "dispatch", "packing", "choice")


@dataclass(frozen=True)
class Timed:
    """CPU and wall-clock seconds."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Row:
    """A line of the table; `paper` and `target` are seconds, None where there are none."""

    title: str
    paper: float | None
    target: float | None
    measured: Timed
    quality: str


@dataclass(frozen=True)
class Case:
    """The profile and the lengths that everything is measured with."""

    profile: Profile
    quantiles: Sequence[float]

    def lengths(self, count: int, random: np.random.Generator) -> Lengths:
        """Draw lengths by the inverse of their distribution, cut at the context length."""
        drawn = np.interp(random.random(count), np.linspace(0, 1, len(self.quantiles)), self.quantiles)
        return np.minimum(drawn, CONTEXT).astype(int).tolist()

    def iterations(self, tokens: int) -> list[Lengths]:
        """Draw ten mini-batches of at least `tokens` tokens."""
        random = np.random.default_rng(tokens)
        found = []
        for _ in range(ITERATIONS):
            drawn = self.lengths(tokens // 100, random)
            upto = int(np.searchsorted(np.cumsum(drawn), tokens)) + 1
            found.append(drawn[:upto])
        return found


def timed(action: Callable[[], T]) -> tuple[Timed, T]:
    """Run an action once and time it."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = action()
    return Timed(time.process_time() - cpu, time.perf_counter() - wall), result


# Proposal.


def exhaustive(data: Histogram, devices: int) -> float:
    """Return t[N][L] by the paper's recurrence: over n, l, schemes, d in steps of 0.1 pipeline, and l'."""
    budget, last = devices * PIPELINE_STEPS, data.work.shape[1] - 1
    t = np.full((budget + 1, last + 1), np.inf)
    t[:, 0] = 0.0
    for n in range(1, budget + 1):
        t[n] = t[n - 1]
        for k, size in enumerate(data.devices.tolist()):
            steps = np.arange(1, n // size + 1)
            for upto in range(1, min(last, int(data.levels[k])) + 1) if len(steps) else ():
                mine = (data.work[k, upto] - data.work[k, :upto]) * PIPELINE_STEPS / steps[:, None]
                t[n, upto] = min(t[n, upto], float(np.maximum(t[n - steps * size, :upto], mine).min()))
    return float(t[budget, last])


def proposal_rows(case: Case) -> list[Row]:
    """Time the proposal, and compare it with the exhaustive recurrence where that can be computed."""
    sample = case.lengths(SAMPLE, np.random.default_rng(0))
    small = histogram(case.profile, sample, 16, 6_400)
    ours, theirs = least(small, 16).seconds, exhaustive(small, 16)
    quality = (
        f"16 devices, {small.work.shape[1] - 1} levels: {ours / theirs - 1:+.1e} against the exhaustive recurrence"
    )
    rows = []
    for devices, paper, target in ((64, 2.03, 0.1), (1024, 107.21, 0.3)):
        took, found = timed(lambda devices=devices: planner.propose(case.profile, sample, devices, CONTEXT))
        rows.append(Row(f"proposal, {devices} devices", paper, target, took, f"{len(found)} strategies; {quality}"))
    return rows


# Dispatch.


def gaps(found: Sequence[float], bounds: Sequence[float]) -> str:
    """Return the mean and the largest excess."""
    excess = [f / b - 1 for f, b in zip(found, bounds, strict=True)]
    return f"{np.mean(excess):.2%} (at most {max(excess):.2%})"


def descended(schemes: Sequence[Scheme], case: Case, lengths: Lengths, bubble: Bubble) -> float:
    """Return longest first with local search."""
    given = eq3_problem(case.profile.pipelines(schemes), lengths, bubble)
    placed = longest_first(given)
    local_search.descend(placed, given.instance, np.zeros(len(given.pipelines)))
    return value(given, placed)


def dispatch_rows(case: Case) -> list[Row]:
    """Time dispatching by every method, and compare with the bound and with each other."""
    rows = []
    for devices, tokens in SCALES.items():
        schemes, batches = MIX * (devices // 64), case.iterations(tokens)
        paper, target = (5.46, 0.5) if devices == 64 else (38.56, 5.0)
        for bubble in ("constant", "longest"):
            took, found = timed(lambda: [dispatch(schemes, case.profile, b, bubble=bubble) for b in batches])  # noqa: B023
            ours, bounds = [f.seconds for f in found], [f.bound for f in found]
            allowed = {64: "0.5 %", 1024: "1 %"}[devices] if bubble == "constant" else "report"
            name = f"dispatch, {devices} devices, {bubble} bubble"
            rows.append(Row(name, paper, target, took, f"above bound: {gaps(ours, bounds)}, must: {allowed}"))
            for method in ("greedy", "longest first"):
                other_took, others = timed(
                    lambda: [dispatch(schemes, case.profile, b, bubble=bubble, method=method) for b in batches]  # noqa: B023
                )
                theirs = [o.seconds for o in others]
                rows.append(Row(f"  {method}", None, None, other_took, compared(ours, theirs, bounds)))
            local_took, local = timed(lambda: [descended(schemes, case, b, bubble) for b in batches])  # noqa: B023
            rows.append(Row("  longest first + local search", None, None, local_took, compared(ours, local, bounds)))
    return rows


def compared(ours: Sequence[float], theirs: Sequence[float], bounds: Sequence[float]) -> str:
    """Say how another method does."""
    worse = sum(o > t * (1 + 1e-9) for o, t in zip(ours, theirs, strict=True))
    return f"above bound: {gaps(theirs, bounds)}; better than ours in {worse} of {len(ours)}"


# Packing.


def packing_rows(case: Case) -> list[Row]:
    """Time packing of all pipelines, and compare sampled ones with the exact or a very long search."""
    rows = []
    for devices, tokens in SCALES.items():
        schemes, batches = MIX * (devices // 64), case.iterations(tokens)
        pipelines = case.profile.pipelines(schemes)
        shares = [
            (pipeline, [batch[i] for i in share])
            for batch in batches
            for pipeline, share in zip(pipelines, dispatch(schemes, case.profile, batch).pipelines, strict=True)
            if share
        ]
        took, found = timed(lambda: [pack_pipeline(pipeline, share) for pipeline, share in shares])  # noqa: B023
        chosen = np.random.default_rng(0).permutation(len(shares))[:SAMPLED_PIPELINES]
        excess = [found[i].seconds / reference(*shares[i]) - 1 for i in chosen]
        exact = sum(is_exact(shares[i][1]) for i in chosen)
        title = f"packing, {devices} devices"
        quality = (
            f"{len(excess)} sampled pipelines, {exact} exact, others by {LONG_SEARCH} kicks: "
            f"{np.mean(excess):.2%} above (at most {max(excess):.2%}), must: 0.3 %; above the proven bound: "
            f"{np.mean([f.gap for f in found]):.2%}"
        )
        rows.append(Row(title, {64: 10.15, 1024: 13.46}[devices], {64: 0.1, 1024: 1.0}[devices], took, quality))
    return rows


def is_exact(share: Lengths) -> bool:
    """Say whether the integer program can be solved for so few sequences."""
    return len(share) <= EXACT_UP_TO and find_spec("cvxpy") is not None


def reference(pipeline: Any, share: Lengths) -> float:
    """Return the best packing that much more time finds."""
    if is_exact(share):
        from hydragraph.planner.exact.integer_programs import exact_packing

        return exact_packing(pipeline, share)[1]
    return min(pack_pipeline(pipeline, share, kicks=kicks).seconds for kicks in (LONG_SEARCH, LONG_SEARCH // 4))


# The whole choice.


def choice_rows(case: Case) -> list[Row]:
    """Time choosing among eight candidates, and assigning all of them."""
    sample = case.lengths(SAMPLE, np.random.default_rng(0))
    candidates = planner.propose(case.profile, sample, 1024, CONTEXT, limit=8)
    batch = case.iterations(SCALES[1024])[0]
    rows = []
    for every in (False, True):
        took, found = timed(lambda: planner.compare(candidates, case.profile, batch, all_of_them=every))  # noqa: B023
        assigned = sum(np.isfinite(v.seconds) for v in found.verdicts)
        title = f"choice among {len(candidates)}, 1,024 devices, one iteration"
        quality = f"{assigned} assigned, the winner {found.assignment.gap:.2%} above its bound"
        rows.append(Row(title if not every else "  all assigned", None, None if every else 1.0, took, quality))
    return rows


# Printing.


def warm_up(case: Case) -> Timed:
    """Compile everything that is measured."""

    def action() -> None:
        lengths = case.lengths(40, np.random.default_rng(1))
        planner.propose(case.profile, lengths, 64, CONTEXT)
        for method in ("search", "greedy"):
            dispatch(MIX, case.profile, lengths, method=method)
        pack_pipeline(case.profile.pipelines(MIX)[0], lengths)
        planner.compare([MIX], case.profile, lengths)

    return timed(action)[0]


def table(rows: Sequence[Row]) -> Table:
    """Return the table."""
    made = Table(title=f"seconds; dispatch and packing are for {ITERATIONS} iterations", title_justify="left")
    for heading in ("", "paper", "must reach", "CPU", "wall", "", "quality"):
        made.add_column(heading, justify="right" if heading in ("paper", "must reach", "CPU", "wall") else "left")
    for row in rows:
        verdict = "" if row.target is None else "met" if row.measured.cpu <= row.target else "missed"
        numbers = ("-" if n is None else f"{n:g}" for n in (row.paper, row.target))
        made.add_row(row.title, *numbers, f"{row.measured.cpu:.3f}", f"{row.measured.wall:.3f}", verdict, row.quality)
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="where the constants and lengths are")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    chosen = parser.parse_args()
    constants, lengths = chosen.data / "hydraulis_profiles.json", chosen.data / "length_distributions.json"
    if not (constants.is_file() and lengths.is_file()):
        print(f"skipped: {constants} or {lengths} is not there; give their folder with --data")
        return
    entries = {entry["name"]: entry for entry in json.loads(constants.read_text())["profiles"]}
    case = Case(Profile.from_constants(entries[PROFILE]), json.loads(lengths.read_text())[DATA])
    compiled = warm_up(case)
    console = Console(width=200)
    console.print(
        f"first call, including compilation if the cache is empty: {compiled.cpu:.1f} s CPU, {compiled.wall:.1f} s wall"
    )
    parts: dict[str, Callable[[Case], list[Row]]] = {
        "proposal": proposal_rows,
        "dispatch": dispatch_rows,
        "packing": packing_rows,
        "choice": choice_rows,
    }
    console.print(table([row for name in PARTS if name in chosen.only for row in parts[name](case)]))


if __name__ == "__main__":
    main()

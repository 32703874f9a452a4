"""Predicted beside measured: steps of real runs on this machine, priced by a profile that is measured between them.

    python benchmarks/costs.py --only predicted                # 1 and 2 local ranks over gloo
    python benchmarks/costs.py --only predicted --device cuda  # one GPU, one rank

In each round the model is profiled anew, as `hydragraph profile` does it, and then every strategy runs one step: what
else the machine does for a while then hits both alike. A step's prediction is by the mean of the profiles before and
after it, of those that could be fitted. Run it with one thread per rank (OMP_NUM_THREADS=1) and no more ranks than
cores; the medians count.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
from rich.console import Console

import hydragraph as hg
from benchmarks.memory import Sizes, adamw
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.commands.bench.bench_table import BenchReport, Target, to_table
from hydragraph.cost.measured_profile import Profile
from hydragraph.cost.trace_file import TracedStep, TraceEvent
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.planner.quick_plan import assign
from hydragraph.report.measured_beside_predicted import ComparedStep, RunComparison, compared_step
from hydragraph.runtime.profile_measurement import MeasuredModel, MeasureSettings, measure

SMALL = Sizes(hidden=256, layers=4, lengths=(500, 400, 300, 200, 200, 100, 100, 60, 60, 40, 40))
LARGE = Sizes(hidden=2048, layers=4, vocabulary=32_000, lengths=(2000, 2000, 1500, 1000, 1000, 500, 500, 200))
STRATEGIES = {  # of four layers, by the number of ranks
    1: ("<tp1,pp1>", "<[0]x4r>"),
    2: ("2*<tp1,pp1>", "<tp2,pp1>", "<[0,1]x4s>", "<tp1,pp2>", "<[0]x3,[1]x1>", "<[0]x2r,[1]x2>"),
}
GOAL = (0.9, 1.1)  # of predicted / measured
LIMIT = timedelta(minutes=30)
COLUMNS = ("ranks", "strategy", "steps", "measured s", "predicted s", "ratio", "from", "to", "wrong most")


@dataclass(frozen=True)
class Round:
    """What one round found: the profiles before and after its steps, and each step with every rank's events."""

    before: Profile
    after: Profile
    steps: tuple[tuple[TracedStep, tuple[tuple[TraceEvent, ...], ...]], ...]


@dataclass(frozen=True)
class Taken:
    """One step: its strategy, its seconds, and those of its simulation, by each profile that could be fitted."""

    strategy: str
    measured: float
    compared: tuple[ComparedStep, ...]

    @property
    def predicted(self) -> float:
        """The mean of the simulations."""
        return fmean(step.predicted_s for step in self.compared)

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.predicted / self.measured


def on_ranks(sizes: Sizes, texts: Sequence[str], rounds: int, device: str, dtype: torch.dtype) -> tuple[Round, ...]:
    """Profile and train in turn; every rank calls it, and rank 0 gets what was found."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    world = join(device)
    program = hg.capture(sizes.model(), dtype=dtype, check="off")
    strategies = [hg.Strategy.parse(text, sizes.layers) for text in texts]
    model = sizes.model()
    exe = hg.compile(model, strategies, adamw, dtype=dtype, device=device, program=program, check="off")
    kinds = tuple(dict.fromkeys(stage.kind for s in strategies for p in s.pipelines for stage in p.stages))
    schemes = tuple(dict.fromkeys((kind.tp, 1) for kind in kinds))
    longest = max(sum(m) for s in strategies for p in assign(s, sizes.lengths).tokens for m in p)
    settings = MeasureSettings(schemes, kinds, longest, repeats=1)
    subject = MeasuredModel(program, initial_buffers(model), sizes.vocabulary, 2048)
    groups = Groups(world, LIMIT)
    for strategy in strategies:  # what compiles and connects once should not count
        exe.step(sizes.sequences(0), strategy)
    before = measure(subject, settings, groups)
    found = []
    for turn in range(rounds):
        steps = []
        for strategy in strategies:
            exe.spans = []
            report = exe.step(sizes.sequences(turn), strategy)
            seconds = max(world.gather(report.seconds - report.planning_s))
            step = TracedStep(report.step, report.strategy, report.assignment, seconds)
            steps.append((step, tuple(map(tuple, world.gather(exe.spans)))))
        after = measure(subject, settings, groups)
        found.append(Round(before, after, tuple(steps)))
        before = after
    groups.close()
    exe.close()
    return tuple(found) if world.rank == 0 else ()


def taken(rounds: Sequence[Round], ranks: int) -> list[Taken]:
    """Price every step by the profiles of its round; a step that neither of them can price is left out."""
    found = []
    for each in rounds:
        for step, events in each.steps:
            compared = []
            for profile in (each.before, each.after):
                costs = hg.Costs(profile, profile.cluster(ranks))
                try:
                    compared.append(compared_step(costs, step, events))
                except hg.Unsupported:  # the machine was too busy for this kind of stage
                    continue
            if compared:
                found.append(Taken(step.strategy, step.seconds, tuple(compared)))
    return found


def row(ranks: int, strategy: str, found: Sequence[Taken]) -> tuple[str | float, ...]:
    """Return a strategy's line: medians over rounds, and where the model is wrong most."""
    ratios = sorted(one.ratio for one in found)
    steps = tuple(step for one in found for step in one.compared)
    middle = (median(one.measured for one in found), median(one.predicted for one in found))
    sentence = RunComparison("", ("",) * ranks, steps).sentence
    return str(ranks), strategy, str(len(found)), *middle, median(ratios), ratios[0], ratios[-1], sentence


def reported(rounds: int, device: str, ranks: Sequence[int], sizes: Sizes | None = None) -> BenchReport:
    """Run it on each number of ranks."""
    cuda = device == "cuda"
    chosen = sizes or (LARGE if cuda else SMALL)
    dtype = torch.bfloat16 if cuda else torch.float32
    rows = []
    left_out = 0
    for count in ranks:
        texts = STRATEGIES[count]
        if count == 1:
            found = taken(on_ranks(chosen, texts, rounds, device, dtype), count)
        else:
            found = taken(hg.launch(on_ranks, count, chosen, texts, rounds, device, dtype, timeout=LIMIT)[0], count)
        left_out += rounds * len(texts) - len(found)
        by_strategy = {text: [t for t in found if t.strategy.startswith(f"{text}@")] for text in _names(texts)}
        rows += [row(count, text, of_it) for text, of_it in by_strategy.items() if of_it]
    if not rows:
        raise ValueError("no profile could be fitted: this machine is too busy")
    middle = median(float(line[COLUMNS.index("ratio")]) for line in rows)
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    notes = (
        f"on {name}, {cores} cores, load {os.getloadavg()[0]:.1f}; {left_out} steps could not be priced, as the "
        "machine was too busy while it was profiled",
    )
    low, high = GOAL
    target = Target(
        "predicted / measured step, median over strategies",
        f"{low} to {high}",
        f"{middle:.3f}",
        low <= middle <= high,
    )
    return BenchReport(f"predicted / measured step on {device}", COLUMNS, tuple(rows), notes, targets=(target,))


def _names(texts: Sequence[str]) -> list[str]:
    """Return strategies as steps name them."""
    return [hg.Strategy.parse(text, SMALL.layers).name for text in texts]


def print_predicted(rounds: int, device: str, ranks: Sequence[int] | None = None, path: Path | None = None) -> None:
    """Run it, print a table, and write it to a file if one is named."""
    report = reported(rounds, device, ranks or ((1,) if device == "cuda" else (1, 2)))
    Console(width=170).print(to_table(report))
    for target in report.targets:
        print(f"{target.name}: {target.found}, wanted {target.wanted}: {target.verdict}")
    for note in report.notes:
        print(note)
    if path is not None:
        report.save(path)


if __name__ == "__main__":
    print_predicted(rounds=5, device="cpu")

"""Predicted beside measured: steps of real runs on this machine, priced by a profile that is measured between them.

    python benchmarks/costs.py --only predicted                # 1 and 2 local ranks over gloo
    python benchmarks/costs.py --only predicted --device cuda  # one GPU, one rank

In each round the model is profiled anew, as `hydragraph profile` does it, and then every strategy runs one step: what
else the machine does for a while then hits both alike. A step's prediction is by the mean of the profiles before and
after it. Run it with one thread per rank (OMP_NUM_THREADS=1) and no more ranks than cores; the medians count.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from benchmarks.memory import Sizes, adamw
from hydragraph.cost.compare import ComparedStep, Comparison, compared_step
from hydragraph.cost.profile import Profile
from hydragraph.cost.trace_file import Event, TracedStep
from hydragraph.frontend.initialise import initial_buffers
from hydragraph.planner.quick import assign
from hydragraph.runtime.groups import Groups
from hydragraph.runtime.launch import join
from hydragraph.runtime.measure import MeasuredModel, MeasureSettings, measure
from hydragraph.runtime.trace import events_of

STRATEGIES = {
    1: ("<tp1,pp1>", "<[0]x4r>"),
    2: ("2*<tp1,pp1>", "<tp2,pp1>", "<[0,1]x4s>", "<tp1,pp2>", "<[0]x3,[1]x1>", "<[0]x2r,[1]x2>"),
}
SMALL = Sizes(hidden=256, layers=4, lengths=(500, 400, 300, 200, 200, 100, 100, 60, 60, 40, 40))
LARGE = Sizes(hidden=2048, layers=4, vocabulary=32_000, lengths=(4000, 3000, 2000, 1500, 1000, 1000, 500, 500, 200))
GOAL = (0.9, 1.1)  # of predicted / measured
LIMIT = timedelta(minutes=30)


@dataclass(frozen=True)
class Round:
    """What one round found: the profiles before and after its steps, and each step with every rank's events."""

    before: Profile
    after: Profile
    steps: tuple[tuple[TracedStep, tuple[tuple[Event, ...], ...]], ...]


@dataclass(frozen=True)
class Taken:
    """One step: its strategy, the slowest rank's seconds, and the simulation's, by the profiles before and after it."""

    strategy: str
    measured: float
    predicted: float
    steps: tuple[ComparedStep, ComparedStep]


def on_ranks(sizes: Sizes, texts: Sequence[str], rounds: int, device: str, dtype: torch.dtype) -> tuple[Round, ...]:
    """Profile and train in turn; every rank calls it, and rank 0 gets what was found."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    world = join(device)
    program = hg.capture(sizes.model(), dtype=dtype, check="off")
    strategies = [hg.Strategy.parse(text, sizes.layers) for text in texts]
    exe = hg.compile(
        sizes.model(), strategies, optimizer=adamw, device=device, dtype=dtype, program=program, check="off"
    )
    longest = max(sum(m) for s in strategies for p in assign(s, sizes.lengths).tokens for m in p)
    kinds = tuple(dict.fromkeys(stage.kind for s in strategies for p in s.pipelines for stage in p.stages))
    schemes = tuple(dict.fromkeys((kind.tp, 1) for kind in kinds))
    settings = MeasureSettings(schemes, kinds, longest, repeats=1)
    subject = MeasuredModel(program, initial_buffers(sizes.model()), sizes.vocabulary, 2048)
    groups = Groups(world, LIMIT)
    for strategy in strategies:  # what compiles and connects once should not count
        exe.step(sizes.sequences(0), strategy)
    profiles = [measure(subject, settings, groups)]
    found = []
    for turn in range(rounds):
        steps = []
        for strategy in strategies:
            exe.spans = []
            report = exe.step(sizes.sequences(turn), strategy)
            seconds = max(world.gather(report.seconds - report.planning_s))
            step = TracedStep(report.step, report.strategy, report.assignment, seconds)
            steps.append((step, tuple(world.gather(events_of(exe.spans)))))
        profiles.append(measure(subject, settings, groups))
        found.append(Round(profiles[-2], profiles[-1], tuple(steps)))
    groups.close()
    exe.close()
    return tuple(found) if world.rank == 0 else ()


def taken(rounds: Sequence[Round], ranks: int) -> list[Taken]:
    """Price every step by the profiles of its round."""
    found = []
    for each in rounds:
        both = [hg.Costs(profile, profile.cluster(ranks)) for profile in (each.before, each.after)]
        for step, events in each.steps:
            one, two = (compared_step(costs, step, events) for costs in both)
            found.append(Taken(step.strategy, step.seconds, (one.predicted_s + two.predicted_s) / 2, (one, two)))
    return found


def table(found: Sequence[Taken], ranks: int, where: str) -> Table:
    """Return a row per strategy: medians over rounds, and where the model is wrong most."""
    made = Table(title=f"predicted / measured step, {ranks} ranks on {where}", title_justify="left")
    for heading in ("strategy", "measured s", "predicted s", "ratio", "from", "to", "wrong most"):
        made.add_column(heading, justify="left" if heading in ("strategy", "wrong most") else "right", overflow="fold")
    for strategy in dict.fromkeys(one.strategy for one in found):
        of_it = [one for one in found if one.strategy == strategy]
        ratios = sorted(one.predicted / one.measured for one in of_it)
        steps = tuple(step for one in of_it for step in one.steps)
        sentence = Comparison("", ("",) * ranks, steps).sentence
        made.add_row(
            strategy.partition("@")[0],
            f"{median(one.measured for one in of_it):.3f}",
            f"{median(one.predicted for one in of_it):.3f}",
            *(f"{ratio:.2f}" for ratio in (median(ratios), ratios[0], ratios[-1])),
            sentence,
        )
    return made


def ratios_of(found: Sequence[Taken]) -> list[float]:
    """Return the median of predicted / measured of every strategy."""
    by_strategy: dict[str, list[float]] = {}
    for one in found:
        by_strategy.setdefault(one.strategy, []).append(one.predicted / one.measured)
    return [median(ratios) for ratios in by_strategy.values()]


def print_predicted(rounds: int, device: str, ranks: Sequence[int] = (1, 2)) -> None:
    """Run it, and print a table for each number of ranks and the median over strategies."""
    every: list[float] = []
    cuda = device == "cuda"
    sizes = LARGE if cuda else SMALL
    dtype = torch.bfloat16 if cuda else torch.float32
    counts = (1,) if cuda else tuple(ranks)
    for count in counts:
        found = run(sizes, STRATEGIES[count], rounds, device, dtype, count)
        Console(width=150).print(table(found, count, device))
        every += ratios_of(found)
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    low, high = GOAL
    inside = "inside" if low <= median(every) <= high else "OUTSIDE"
    where = f"{cores} cores, load {load:.1f}"
    print(f"median over {len(every)} strategies: {median(every):.3f}, {inside} {low} to {high}; {where}")


def run(sizes: Sizes, texts: Sequence[str], rounds: int, device: str, dtype: torch.dtype, ranks: int) -> list[Taken]:
    """Run the rounds on so many ranks."""
    strategies = tuple(text.replace("x4", f"x{sizes.layers}") for text in texts)
    if ranks == 1:
        return taken(on_ranks(sizes, strategies, rounds, device, dtype), 1)
    found = hg.launch(on_ranks, ranks, sizes, strategies, rounds, device, dtype, timeout=LIMIT)
    return taken(found[0], ranks)

"""What choosing a strategy every step gains in a real run, beside what the planner expected of it.

    python benchmarks/dynamic.py                              # measures a profile first; 4 processes over gloo
    python benchmarks/dynamic.py --profile measured.json      # keeps it there, and reads it the next time

The demo's model trains on the demo's corpus, with longer sequences and so few of them in a mini-batch that their number
matters. Three executables live in the same processes and step in turn on the same mini-batches from the same weights:
the best homogeneous strategy, the best strategy of all, both found on sample mini-batches, and "auto", which chooses
for every mini-batch (with gain 0, so that it does so even where it would stay static by itself). The losses must agree:
the exit code is 1 where they differ by more than 1e-5.

All ranks share this host's cores, while the profile is measured as while it is used. But a rank that has less to do
leaves its core to others, which no profile knows: where there are fewer cores than ranks, uneven plans take less than
predicted.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hydragraph as hg
from hydragraph.candidates import planner_of, proposed, request_of, strategy_of
from hydragraph.cost.profile import Profile, Scheme
from hydragraph.cost.schemes import schemes_of
from hydragraph.data.token_file import TokenFile
from hydragraph.frontend.initialise import initial_buffers
from hydragraph.planner.policy import Policy, static_or_dynamic
from hydragraph.planner.refining import homogeneous
from hydragraph.runtime.groups import Groups
from hydragraph.runtime.launch import join
from hydragraph.runtime.measure import MeasuredModel, MeasureSettings, measure
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import mini_batches, open_tokens, prepare
from hydragraph.train.model import build_model
from hydragraph.train.optimizer import optimizer_factory

DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"
RANKS = 4
SAMPLE = 8  # mini-batches that strategies are found on; others than those trained on
REPEATS = 3  # of every measurement
BOUND = 1e-5  # of relative difference between the losses
HOMOGENEOUS, STATIC, DYNAMIC = "homogeneous", "static", "dynamic"


@dataclass(frozen=True)
class Taken:
    """What one side did in one step: its loss, the slowest rank's seconds, what was expected, and under what."""

    loss: float
    seconds: float
    expected_s: float
    strategy: str


@dataclass(frozen=True)
class Row:
    """One step: its mini-batch, and what each side did by its name."""

    lengths: tuple[int, ...]
    taken: Mapping[str, Taken]

    @property
    def difference(self) -> float:
        """The largest relative difference between losses."""
        losses = [t.loss for t in self.taken.values()]
        return (max(losses) - min(losses)) / abs(min(losses))


@dataclass(frozen=True)
class Run:
    """What a run found.

    Attributes:
        profile: measured, or given.
        candidates: of the dynamic side.
        decision: what would have been decided with the usual gain.
        rows: one per step.
    """

    profile: Profile
    candidates: tuple[str, ...]
    decision: str
    rows: tuple[Row, ...]


def configured(context: int, tokens: int) -> TrainConfig:
    """Return the demo's run with longer sequences."""
    changes = {
        "model.config.max_position_embeddings": context,
        "data.tokens_per_step": tokens,  # before the length, which must not exceed it
        "data.max_length": context,
        "ranks": RANKS,
    }
    return TrainConfig.load(DEMO, [f"{name}={value}" for name, value in changes.items()])


# On every rank.


def on_ranks(config: TrainConfig, directory: Path, steps: int, profile: Profile | None) -> Run:
    """Measure where no profile is given, then train all sides in turn."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    file, ranks = open_tokens(directory).file, join("cpu").ranks
    profile = profile or measured(config, file)
    sample = batches(replace(config, seed=config.seed + 1), file, SAMPLE)
    lengths = [[len(s) for s in batch] for batch in sample]
    sides, candidates, decision = chosen(config, file, profile, lengths, ranks)
    for exe in sides.values():
        for strategy in exe.strategies:  # what compiles once should not count
            exe.gradients(sample[0], strategy)
    rows = []
    for number, batch in enumerate(batches(config, file, steps)):
        names = [*sides][number % len(sides) :] + [*sides][: number % len(sides)]
        taken = {name: stepped(sides[name], batch) for name in names}
        rows.append(Row(tuple(len(s) for s in batch), taken))
    for exe in sides.values():
        exe.close()
    return Run(profile, candidates, decision, tuple(rows))


def measured(config: TrainConfig, file: TokenFile) -> Profile:
    """Measure all schemes of powers of two, as `hydragraph profile` does."""
    world, model = join("cpu"), model_of(config, file)
    program = hg.capture(model, check="off")
    degrees = [tp for tp in (1, 2, 4) if tp <= world.ranks and all(heads % tp == 0 for heads in program.heads)]
    schemes: tuple[Scheme, ...] = tuple(
        (tp, pp) for tp in degrees for pp in (1, 2, 4) if tp * pp <= world.ranks and pp <= program.layers
    )
    groups = Groups(world, timedelta(minutes=10))
    subject = MeasuredModel(program, initial_buffers(model), file.vocabulary, config.data.max_length)
    found = measure(subject, MeasureSettings(schemes, (), config.data.max_length, REPEATS), groups)
    groups.close()
    return found


def model_of(config: TrainConfig, file: TokenFile) -> torch.nn.Module:
    """Build the run's model, the same on every call."""
    return build_model(config.model, file.vocabulary, file.end_of_text, config.seed)


def batches(config: TrainConfig, file: TokenFile, count: int) -> list[list[Tensor]]:
    """Return the first mini-batches of a run."""
    return list(islice(mini_batches(config, file), count))


def chosen(
    config: TrainConfig, file: TokenFile, profile: Profile, lengths: Sequence[Sequence[int]], ranks: int
) -> tuple[dict[str, hg.Executable], tuple[str, ...], str]:
    """Return the sides by name, the dynamic side's candidates, and what the usual policy would decide."""
    program = hg.capture(model_of(config, file), check="off")
    candidates = proposed(program, ranks, profile, lengths)
    equal = homogeneous(schemes_of(profile, ranks), ranks)
    alike = [strategy_of(s, program.layers) for s in equal if s[0][1] <= program.layers]
    best = [strategies[best_of(strategies, profile, lengths, ranks)] for strategies in (alike, [*candidates, *alike])]
    made: dict[str, hg.Executable] = {}
    for name, strategy in ((HOMOGENEOUS, best[0]), (STATIC, best[1]), (DYNAMIC, "auto")):
        model = model_of(config, file)
        made[name] = hg.compile(
            model,
            strategy,  # type: ignore[arg-type]
            optimizer_factory(config.optimizer, model),
            config.max_grad_norm,
            device="cpu",
            profile=profile,
            lengths=lengths,
            policy=Policy(gain=0.0, workers=0),
            check="off",
        )
    decision = planner_of(candidates, profile, ranks, Policy(workers=0), lengths)[1]
    return made, tuple(map(str, made[DYNAMIC].strategies)), decision


def best_of(strategies: Sequence[hg.Strategy], profile: Profile, lengths: Sequence[Sequence[int]], ranks: int) -> int:
    """Return the index of the strategy that takes least for all sample mini-batches."""
    request = request_of(strategies, profile, ranks, 0)
    found = static_or_dynamic(request.candidates, request.charges, lengths, Policy())
    if found.static is None:
        raise ValueError("no strategy takes all sample mini-batches: lower --context")
    return found.static


def stepped(exe: hg.Executable, batch: Sequence[Tensor]) -> Taken:
    """Train one step, all ranks beginning together."""
    dist.barrier()
    report = exe.step(batch)
    slowest = torch.tensor(report.seconds - report.planning_s)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Taken(report.loss, float(slowest), report.expected_s, report.strategy)


# Printing.


def table(run: Run) -> Table:
    """Return a line for each step, and the medians."""
    made = Table(title="seconds: measured / predicted, without planning", title_justify="left")
    sides = [HOMOGENEOUS, STATIC, DYNAMIC]
    for heading in ("step", "sequences", "longest", "loss", "differ by", *sides, "chosen"):
        made.add_column(heading, justify="left" if heading == "chosen" else "right", no_wrap=heading != "chosen")
    for number, row in enumerate(run.rows, start=1):
        made.add_row(
            str(number),
            str(len(row.lengths)),
            str(max(row.lengths)),
            f"{row.taken[STATIC].loss:.5f}",
            f"{row.difference:.1e}",
            *(f"{row.taken[s].seconds:.3f} / {row.taken[s].expected_s:.3f}" for s in sides),
            row.taken[DYNAMIC].strategy,
        )
    middle = (f"{median_of(run, s):.3f} / {median_of(run, s, 'expected_s'):.3f}" for s in sides)
    made.add_row("median", "", "", "", "", *middle, "", style="bold")
    return made


def median_of(run: Run, side: str, what: str = "seconds") -> float:
    """Return a side's median over the steps."""
    return float(median(getattr(row.taken[side], what) for row in run.rows))


def summary(run: Run) -> list[str]:
    """Say what was gained, measured and predicted, and how far predictions were off."""
    first = run.rows[0].taken
    lines = [f"candidates: {', '.join(run.candidates)}", f"with the usual gain: {run.decision}"]
    for side in (HOMOGENEOUS, STATIC):
        measured_, predicted = (
            sum(getattr(r.taken[DYNAMIC], what) for r in run.rows) / sum(getattr(r.taken[side], what) for r in run.rows)
            for what in ("seconds", "expected_s")
        )
        lines.append(
            f"dynamic / {side} ({first[side].strategy}): {measured_:.3f} measured, {predicted:.3f} predicted, all steps"
        )
    for side in (HOMOGENEOUS, STATIC, DYNAMIC):
        ratios = sorted(r.taken[side].seconds / r.taken[side].expected_s for r in run.rows)
        lines.append(
            f"{side}: measured / predicted {median(ratios):.2f} in the median ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return lines


def main() -> None:
    """Print the table and what follows from it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--context", type=int, default=1024, help="tokens of the longest sequence")
    parser.add_argument("--tokens", type=int, default=3072, help="of a step, at most")
    parser.add_argument("--profile", type=Path, help="read it if it is there; otherwise keep what is measured there")
    given = parser.parse_args()
    config = configured(given.context, given.tokens)
    known = Profile.load(given.profile) if given.profile is not None and given.profile.is_file() else None
    run = hg.launch(on_ranks, RANKS, config, prepare(config), given.steps, known, timeout=timedelta(minutes=30))[0]
    if given.profile is not None and known is None:
        run.profile.save(given.profile)
    console = Console(width=170)
    console.print(f"profile: {run.profile.name}", highlight=False)
    for (tp, pp), why in run.profile.failed.items():
        console.print(f"left out <tp{tp},pp{pp}>: {why}", highlight=False)
    console.print(table(run))
    for line in summary(run):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    worst = max(row.difference for row in run.rows)
    if worst > BOUND:
        console.print(f"WRONG: losses differ by {worst:.1e}, more than {BOUND:g}")
        sys.exit(1)
    console.print(f"losses differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()

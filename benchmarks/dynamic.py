"""A real run in which choosing a strategy every step wins: two local ranks, each with a budget of memory.

    python -m benchmarks.dynamic                              # measures a profile first; 2 processes over gloo
    python -m benchmarks.dynamic --profile measured.json      # keeps it there, and reads it the next time
    python -m benchmarks.dynamic --budget 160                 # MB: then every rank takes every sequence

A rank has a budget of memory, as a GPU has. Lengths have a long tail: most mini-batches have short sequences only, and
a few have one that fits no rank alone. A static strategy must take that one, so it divides and recomputes every
mini-batch; choosing every step does so only where it must.

Candidates are all strategies of two ranks with layers split evenly: two replicas, tensor parallel (with sequence
parallelism or without), and two stages, each stage recomputed or not. Every one that can run all mini-batches is a
static rival, with the same profile, budget and assignment of sequences. All sides live in the same processes and step
in turn on the same mini-batches from the same weights; the losses must agree: the exit code is 1 where they differ by
more than 1e-5. The budget is what plans are made with, less 10 %; in a run of its own, the largest sum of live tensor
bytes of each rank is measured (every storage, as in benchmarks/memory.py) and printed next to it, with the memory that
the mini-batch with the longest sequence would need on two replicas.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hydragraph as hg
from benchmarks.memory import LiveBytes, adamw
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.cost.measured_profile import Profile
from hydragraph.engine.candidate_strategies import Planning, request_of
from hydragraph.errors import Unsupported
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.planner.policy import Policy
from hydragraph.runtime.profile_measurement import MeasuredModel, MeasureSettings, measure
from hydragraph.spec.stage_kind import StageKind

RANKS = 2
REPEATS = 5  # of every measurement
BOUND = 1e-5  # of relative difference between the losses
PLANNED = 0.9  # of the budget; the rest is for messages under way
SHORTEST = 40  # tokens
TAIL = 1.4  # of the Pareto distribution: a length is above x with probability (SHORTEST / x) ** TAIL
DYNAMIC = "every step"
KINDS = tuple(
    StageKind(tp, sequence_parallel, recompute)
    for tp, sequence_parallel in ((1, False), (2, False), (2, True))
    for recompute in (False, True)
)
LIMIT = timedelta(minutes=30)


@dataclass(frozen=True)
class Sizes:
    """The model and its data.

    Attributes:
        hidden, layers, vocabulary: of a Llama.
        context: tokens of the longest sequence.
        tokens: a mini-batch has sequences until it has at least so many.
        seed: of weights and data.
    """

    hidden: int = 128
    layers: int = 4
    vocabulary: int = 512
    context: int = 2560
    tokens: int = 2048
    seed: int = 1

    def model(self) -> torch.nn.Module:
        """Build it, the same on every call."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(self.seed)
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=self.hidden,
                intermediate_size=self.hidden * 11 // 4,
                num_attention_heads=max(2, self.hidden // 32),
                num_key_value_heads=max(2, self.hidden // 64),
                vocab_size=self.vocabulary,
                num_hidden_layers=self.layers,
                max_position_embeddings=self.context,
            )
        )

    def lengths(self, count: int) -> list[list[int]]:
        """Draw the lengths of mini-batches: a long tail, cut at the context."""
        random = np.random.default_rng(self.seed)
        batches = []
        for _ in range(count):
            batch: list[int] = []
            while sum(batch) < self.tokens:
                batch.append(int(min(self.context, SHORTEST * (1 + random.pareto(TAIL)))))
            batches.append(batch)
        return batches

    def sequences(self, lengths: Sequence[int], turn: int) -> list[Tensor]:
        """Draw a mini-batch's tokens."""
        generator = torch.Generator().manual_seed(1000 * self.seed + turn)
        return [torch.randint(0, self.vocabulary, (n,), generator=generator) for n in lengths]


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
    """Results of a run.

    Attributes:
        rows: one per step.
        reach: of every candidate by its text, the longest sequence that it takes within the budget.
        left_out: strategies that were not measured well or fit no sequence within the budget, and why.
    """

    rows: tuple[Row, ...]
    reach: Mapping[str, int]
    left_out: Mapping[str, str]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(max(row.lengths) for row in self.rows)

    def seconds(self, side: str, what: str = "seconds") -> float:
        """Return a side's seconds of all steps, measured or expected."""
        return float(sum(getattr(row.taken[side], what) for row in self.rows))

    @property
    def sides(self) -> list[str]:
        """Choosing every step, then the static rivals, the quickest first."""
        static = [side for side in self.rows[0].taken if side != DYNAMIC]
        return [DYNAMIC, *sorted(static, key=self.seconds)]


def candidates(layers: int) -> list[hg.Strategy]:
    """Return all strategies of two ranks with layers split evenly."""
    half = layers // 2
    texts = [
        *(f"<[0]x{layers}{one}> + <[1]x{layers}{two}>" for one, two in (("", ""), ("r", ""), ("r", "r"))),
        *(f"<[0,1]x{layers}{kind}>" for kind in ("", "s", "r", "sr")),
        *(f"<[0]x{half}{one},[1]x{layers - half}{two}>" for one in ("", "r") for two in ("", "r")),
    ]
    return [hg.Strategy.parse(text, layers=layers) for text in texts]


def within(profile: Profile, budget: float) -> Profile:
    """Return the profile of a rank that may use `budget` bytes."""
    if profile.device is None:
        raise ValueError(f"profile {profile.name} does not say where it was measured: measure it with this program")
    return replace(profile, device=replace(profile.device, memory=PLANNED * budget))


def usable(strategies: Sequence[hg.Strategy], profile: Profile) -> tuple[dict[hg.Strategy, int], dict[str, str]]:
    """Return the longest sequence that each strategy takes within the budget, and why others are left out."""
    reach: dict[hg.Strategy, int] = {}
    left_out: dict[str, str] = {}
    for strategy in strategies:
        try:
            most = request_of([strategy], Planning(profile), RANKS).reach(0)
        except Unsupported as error:  # a fit that failed, on a busy machine
            left_out[named(strategy)] = str(error)
            continue
        if most > 0:
            reach[strategy] = most
        else:
            left_out[named(strategy)] = "its weights alone are beyond the budget"
    return reach, left_out


def named(strategy: hg.Strategy | str) -> str:
    """Return a strategy's text without its hash."""
    return str(strategy).partition("@")[0]


# On every rank.


def measured(sizes: Sizes) -> Profile:
    """Measure all kinds of stages, as `hydragraph profile` does."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    model = sizes.model()
    program = hg.capture(model, check="off")
    groups = Groups(join("cpu"), LIMIT)
    subject = MeasuredModel(program, initial_buffers(model), sizes.vocabulary, sizes.context)
    settings = MeasureSettings(((1, 1), (2, 1), (1, 2)), KINDS, sizes.context, REPEATS)
    found = measure(subject, settings, groups)
    groups.close()
    return found


def on_ranks(sizes: Sizes, batches: Sequence[Sequence[int]], profile: Profile) -> Run:
    """Train all sides in turn; the profile says what a rank may use."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    reach, left_out = usable(candidates(sizes.layers), profile)
    longest = max(map(max, batches))
    sides = {DYNAMIC: compiled(sizes, list(reach), profile)}
    sides |= {named(s): compiled(sizes, s, profile) for s, most in reach.items() if most >= longest}
    short = sizes.sequences([64, 32, 32, 16], -1)
    for exe in sides.values():
        for strategy in exe.strategies:  # what compiles once should not count
            exe.gradients(short, strategy)
    rows = []
    for turn, lengths in enumerate(batches):
        names = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
        batch = sizes.sequences(lengths, turn)
        taken = {name: stepped(sides[name], batch) for name in names}
        rows.append(Row(tuple(lengths), {name: taken[name] for name in sides}))
    for exe in sides.values():
        exe.close()
    return Run(tuple(rows), {named(s): most for s, most in reach.items()}, left_out)


def compiled(sizes: Sizes, strategies: hg.Strategy | list[hg.Strategy], profile: Profile) -> hg.Executable:
    """Return an executable that chooses anew every step from these strategies."""
    return hg.compile(
        sizes.model(),
        strategies,
        adamw,
        device="cpu",
        profile=profile,
        policy=Policy(gain=0.0, workers=0),
        check="off",
    )


def stepped(exe: hg.Executable, batch: Sequence[Tensor]) -> Taken:
    """Train one step, all ranks beginning together."""
    dist.barrier()
    report = exe.step(batch)
    slowest = torch.tensor(report.seconds - report.planning_s)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Taken(report.loss, float(slowest), report.expected_s, named(report.strategy))


@dataclass(frozen=True)
class Held:
    """One rank's peaks of live tensor bytes.

    Attributes:
        steps: what ran in each step, and the peak.
        replicas: of the mini-batch with the longest sequence on two replicas, which the budget does not allow.
    """

    steps: tuple[tuple[str, int], ...]
    replicas: int


def watched(sizes: Sizes, batches: Sequence[Sequence[int]], profile: Profile, texts: Sequence[str]) -> Held:
    """Train by the candidates alone, choosing every step, and watch this rank's memory."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    exe = compiled(sizes, [hg.Strategy.parse(text, layers=sizes.layers) for text in texts], profile)
    found = []
    for turn, lengths in enumerate(batches):
        live = LiveBytes()
        with live:
            report = exe.step(sizes.sequences(lengths, turn))
        found.append((named(report.strategy), live.peak))
    live = LiveBytes()
    with live:
        exe.step(sizes.sequences(max(batches, key=max), 0), strategy=candidates(sizes.layers)[0])
    exe.close()
    return Held(tuple(found), live.peak)


# Printing.


def steps_table(run: Run) -> Table:
    """Return a line for each step, and the sums."""
    made = Table(title="seconds of each step: measured / expected, without planning", title_justify="left")
    for heading in ("step", "sequences", "longest", "loss", "differ by", *run.sides, "chosen"):
        made.add_column(heading, justify="left" if heading == "chosen" else "right", no_wrap=heading == "chosen")
    for number, row in enumerate(run.rows, start=1):
        made.add_row(
            str(number),
            str(len(row.lengths)),
            str(max(row.lengths)),
            f"{row.taken[DYNAMIC].loss:.5f}",
            f"{row.difference:.1e}",
            *(f"{row.taken[s].seconds:.3f} / {row.taken[s].expected_s:.3f}" for s in run.sides),
            row.taken[DYNAMIC].strategy,
        )
    sums = (f"{run.seconds(s):.3f} / {run.seconds(s, 'expected_s'):.3f}" for s in run.sides)
    made.add_row("all", "", str(run.longest), "", "", *sums, "", style="bold")
    return made


def candidates_table(run: Run) -> Table:
    """Return what each candidate takes, how often it was chosen, and what it takes where it stays."""
    made = Table(title="candidates", title_justify="left")
    for heading in ("strategy", "takes, tokens", "runs all", "chosen in steps", "static, s", "/ every step"):
        made.add_column(heading, justify="left" if heading == "strategy" else "right")
    chosen = Counter(row.taken[DYNAMIC].strategy for row in run.rows)
    for text, reach in run.reach.items():
        whole = text in run.rows[0].taken
        seconds = (f"{run.seconds(text):.3f}", f"{run.seconds(text) / run.seconds(DYNAMIC):.2f}") if whole else ("", "")
        made.add_row(text, str(reach), "yes" if whole else "no", str(chosen[text]), *seconds)
    return made


def summary(run: Run) -> list[str]:
    """Say what was gained, measured and expected, and how far expectations were off."""
    dynamic, *static = run.sides
    if not static:
        return ["no candidate runs all mini-batches, so there is no static rival: raise --budget"]
    best = static[0]
    ratios = sorted(row.taken[best].seconds / row.taken[dynamic].seconds for row in run.rows)
    gained, hoped = (run.seconds(best, what) / run.seconds(dynamic, what) for what in ("seconds", "expected_s"))
    lines = [
        f"best static strategy ({best}) / choosing every step: {gained:.2f} measured, {hoped:.2f} expected, of all "
        f"steps; {median(ratios):.2f} in the median step"
    ]
    for side in run.sides:
        off = sorted(row.taken[side].seconds / row.taken[side].expected_s for row in run.rows)
        lines.append(f"{side}: measured / expected {median(off):.2f} in the median ({off[0]:.2f} to {off[-1]:.2f})")
    return lines


def memory_lines(per_rank: Sequence[Held], budget: float) -> list[str]:
    """Return lines with the peak memory of ranks under each strategy that ran, and the budget."""
    peaks: dict[str, int] = {}
    for strategy, peak in (step for held in per_rank for step in held.steps):
        peaks[strategy] = max(peak, peaks.get(strategy, 0))
    replicas = max(held.replicas for held in per_rank)
    return [
        f"live tensor bytes, longest sequence on two replicas: {replicas / 1e6:.1f} of {budget / 1e6:.1f} MB",
        *(
            f"live tensor bytes at most, {strategy}: {peak / 1e6:.1f} of {budget / 1e6:.1f} MB"
            + ("" if peak <= budget else ", WRONG: beyond the budget")
            for strategy, peak in peaks.items()
        ),
    ]


def main() -> None:
    """Print the tables and what follows from them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--budget", type=float, default=40.0, help="MB that a rank may hold")
    parser.add_argument("--context", type=int, default=Sizes.context, help="tokens of the longest sequence")
    parser.add_argument("--tokens", type=int, default=Sizes.tokens, help="of a mini-batch, at least")
    parser.add_argument("--hidden", type=int, default=Sizes.hidden)
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--seed", type=int, default=Sizes.seed)
    parser.add_argument("--profile", type=Path, help="file of the profile: read if it exists, else measured and saved")
    given = parser.parse_args()
    sizes = Sizes(given.hidden, given.layers, context=given.context, tokens=given.tokens, seed=given.seed)
    console = Console(width=180)
    if given.profile is not None and given.profile.is_file():
        profile = Profile.load(given.profile)
    else:
        profile = hg.launch(measured, RANKS, sizes, timeout=LIMIT)[0]
        if given.profile is not None:
            profile.save(given.profile)
    budget = given.budget * 1e6
    planned = within(profile, budget)
    batches = sizes.lengths(given.steps)
    console.print(f"profile: {profile.name}; {RANKS} ranks, each with {given.budget:g} MB", highlight=False)
    run = hg.launch(on_ranks, RANKS, sizes, batches, planned, timeout=LIMIT)[0]
    for strategy, why in run.left_out.items():
        console.print(f"left out {strategy}: {why}", highlight=False, soft_wrap=True, markup=False)
    console.print(steps_table(run))
    console.print(candidates_table(run))
    for line in summary(run):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    held = hg.launch(watched, RANKS, sizes, batches, planned, list(run.reach), timeout=LIMIT)
    told = memory_lines(held, budget)
    for line in told:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    worst = max(row.difference for row in run.rows)
    if worst > BOUND:
        console.print(f"WRONG: losses differ by {worst:.1e}, more than {BOUND:g}")
    else:
        console.print(f"losses differ by {worst:.1e} at most")
    sys.exit(1 if worst > BOUND or any("WRONG" in line for line in told) else 0)


if __name__ == "__main__":
    main()

"""Plans on ranks that are really slowed down: predicted and measured seconds of an iteration, and the losses.

    python benchmarks/slowed.py                          # 4 local ranks over gloo, three cases; some minutes
    python benchmarks/slowed.py --rates 0=5.42 --rounds 5

A separate process (`Brake`) stops and continues the ranks (SIGSTOP, SIGCONT) so that in every 100 ms each computes
for its share: a healthy one for `--share` of a core, one at rate x for 1 / x of that. A rank's computation is read from
its CPU clock, so other work on the machine does not reduce its share, as long as all shares fit the cores.

The model is profiled here on ranks that are not slowed down. `hg.plan` plans by that profile and the rates; its rivals
are plans that anybody would write down: equal pipelines with equal layers and batches, and the same without the slow
ranks. All train in turn on the same mini-batches, in the same processes, from the same weights. A step is predicted by
the simulation of what it ran. Pairs of plans whose predictions differ by more than 10 % should be measured in that
order. The exit code is 1 where losses differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.cost.measured_profile import Profile
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.planner.plan import Plan
from hydragraph.planner.policy import Policy
from hydragraph.runtime.profile_measurement import MeasuredModel, MeasureSettings, measure

RANKS = 4
PERIOD_S = 0.1  # of the brake
LOOKS = 50  # at the clocks in a period
SHARE = 0.25  # of a core that a healthy rank has
CASES: tuple[dict[int, float], ...] = ({1: 2.57}, {1: 5.42}, {0: 2.57, 3: 5.42})
BOUND = 1e-5  # of relative difference between losses
APART = 1.1  # predictions that differ by no more may be measured in either order
PLAN = "hg.plan"
SPIN_S = 2.0  # for which ranks compute to find what share they have
LIMIT = timedelta(minutes=30)
ATTEMPTS = 4  # to profile a busy machine


@dataclass(frozen=True)
class Sizes:
    """A Llama whose computation outweighs its weights, and its mini-batches."""

    hidden: int = 64
    layers: int = 8
    vocabulary: int = 257
    sequences: int = 16
    length: int = 512

    def model(self) -> nn.Module:
        """Build it, the same on every call."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=self.hidden,
                intermediate_size=self.hidden * 11 // 4,
                num_attention_heads=self.hidden // 32,
                num_key_value_heads=self.hidden // 32,
                vocab_size=self.vocabulary,
                num_hidden_layers=self.layers,
                max_position_embeddings=2048,
            )
        )

    def mini_batch(self, turn: int) -> list[Tensor]:
        """Draw a mini-batch."""
        generator = torch.Generator().manual_seed(turn)
        return [torch.randint(0, self.vocabulary, (self.length,), generator=generator) for _ in range(self.sequences)]

    @property
    def workload(self) -> hg.Workload:
        """Workload to plan for."""
        return hg.Workload(self.sequences, self.length)


# The brake: a process that gives each of the others its share of a core.


class Braked:
    """A process that may compute for `quota_s` seconds in every period.

    Args:
        pid: of the process.
        quota_s: CPU seconds in a period.
    """

    def __init__(self, pid: int, quota_s: float) -> None:
        self._pid = pid
        self._quota_s = quota_s
        self._left_s = quota_s
        self._stopped = False
        self._used_s = self._clock()

    def period(self) -> None:
        """Begin a period: what was computed too much is taken off, what was not used is lost."""
        self._left_s = min(self._left_s, 0.0) + self._quota_s
        if self._stopped and self._left_s > 0:
            self.release()

    def look(self) -> None:
        """Stop the process once it has had its share."""
        used = self._clock()
        self._left_s -= used - self._used_s
        self._used_s = used
        if self._left_s <= 0 and not self._stopped:
            os.kill(self._pid, signal.SIGSTOP)
            self._stopped = True

    def release(self) -> None:
        """Let the process continue."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
        self._stopped = False

    def _clock(self) -> float:
        # The CPU clock of another process, as clock_getcpuclockid(3) makes its number: 2 is the scheduler's own clock.
        return time.clock_gettime((~self._pid << 3) | 2)


def brake(folder: Path, period_s: float) -> None:
    """Brake the processes that are named in a folder, until it is gone.

    A file RANK holds "PID SHARE"; when it is removed, the process is no longer slowed down.

    Args:
        folder: with the files.
        period_s: in which each process computes for its share.
    """
    with suppress(PermissionError):  # a late look lets a process compute too much, which it then has to wait for
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    braked: dict[str, Braked] = {}
    while folder.exists():
        named = {file.name: file for file in folder.glob("[0-9]*")}
        for name in braked.keys() - named.keys():
            braked.pop(name).release()
        for name in named.keys() - braked.keys():
            with suppress(OSError):  # it has ended
                pid, share = named[name].read_text().split()
                braked[name] = Braked(int(pid), float(share) * period_s)
        until = time.monotonic() + period_s
        for name, each in [*braked.items()]:
            try:
                each.period()
            except OSError:  # it has ended
                named[name].unlink(missing_ok=True)
        while time.monotonic() < until:
            time.sleep(period_s / LOOKS)
            for each in braked.values():
                with suppress(OSError):
                    each.look()
    for each in braked.values():
        each.release()


class Brake:
    """Starts the process that brakes; ranks enter and leave by themselves.

    Args:
        shares: of a core, by rank.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._folder = TemporaryDirectory()
        self._shares = tuple(shares)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Entry:
        folder = Path(self._folder.name)
        self._process = subprocess.Popen([sys.executable, __file__, "--brake", str(folder)])
        return Entry(folder, self._shares)

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()
        assert self._process is not None
        self._process.wait()


@dataclass(frozen=True)
class Entry:
    """Context in which a rank is slowed down: `enter` starts it, `leave` ends it."""

    folder: Path
    shares: tuple[float, ...]

    def enter(self, rank: int) -> None:
        """Have this process braked from now on."""
        written = self.folder / f"of-{rank}"
        written.write_text(f"{os.getpid()} {self.shares[rank]}")
        written.rename(self.folder / str(rank))  # rename is atomic: the file is complete or missing
        time.sleep(3 * PERIOD_S)

    def leave(self, rank: int) -> None:
        """Go on unbraked."""
        (self.folder / str(rank)).unlink(missing_ok=True)


# On every rank.


def profiled(sizes: Sizes) -> Profile:
    """Measure stages of one rank, as `hydragraph profile` does, and messages between two."""
    _alone()
    model = sizes.model()
    program = hg.capture(model, check="off")
    subject = MeasuredModel(program, initial_buffers(model), sizes.vocabulary, sizes.length)
    groups = Groups(join("cpu"), LIMIT)
    found = measure(subject, MeasureSettings(((1, 1),), (), 8 * sizes.length), groups)
    groups.close()
    return found


def _alone() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")


@dataclass(frozen=True)
class Side:
    """A plan to train by.

    Attributes:
        strategy, home: what runs.
        costs: that sequences are assigned by; None: in equal parts.
    """

    strategy: hg.Strategy
    home: hg.Home | None = None
    costs: hg.Costs | None = None


@dataclass(frozen=True)
class Taken:
    """What a side did in a step: its loss, the slowest rank's seconds, and which sequences went where."""

    loss: float
    seconds: float
    assignment: hg.Assignment


@dataclass(frozen=True)
class Trained:
    """Steps of every side, in turn, and the share of a core that this rank found itself to have."""

    steps: tuple[Mapping[str, Taken], ...]
    share: float


def train(sizes: Sizes, sides: Mapping[str, Side], rounds: int, entry: Entry | None) -> Trained:
    """Train by every side in turn; all ranks call it.

    Args:
        entry: to the brake, or None if no rank is slow.
    """
    _alone()
    rank = join("cpu").rank
    model = sizes.model()
    program = hg.capture(model, check="off")
    made = {
        name: hg.compile(
            model,
            side.strategy,
            lambda named: torch.optim.AdamW(named, lr=1e-3),
            device="cpu",
            program=program,
            check="off",
            home=side.home,
            profile=side.costs,
            policy=Policy(workers=0),
        )
        for name, side in sides.items()
    }
    for exe in made.values():  # what is compiled and connected once should not count
        exe.gradients(sizes.mini_batch(-1))
    dist.barrier()
    share = 1.0
    if entry is not None:
        entry.enter(rank)
        share = share_found()
    steps = []
    names = list(made)
    for turn in range(rounds):
        first = turn % len(names)  # whoever begins, everybody takes turns
        batch = sizes.mini_batch(turn)
        taken = {name: _stepped(made[name], batch) for name in (*names[first:], *names[:first])}
        steps.append({name: taken[name] for name in names})
    if entry is not None:
        entry.leave(rank)
    for exe in made.values():
        exe.close()
    return Trained(tuple(steps), share)


def _stepped(exe: hg.Executable, batch: Sequence[Tensor]) -> Taken:
    dist.barrier()
    report = exe.step(batch)
    slowest = torch.tensor(report.seconds - report.planning_s, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Taken(report.loss, float(slowest), report.assignment)


def share_found() -> float:
    """Compute for a while, and return for what part of it this process could."""
    began = time.monotonic()
    cpu = time.process_time()
    values = torch.ones(64, 64)
    while time.monotonic() - began < SPIN_S:
        values = values @ values / 64
    return (time.process_time() - cpu) / (time.monotonic() - began)


# Plans.


def sides_of(costs: hg.Costs, sizes: Sizes, plan: Plan) -> dict[str, Side]:
    """Return the plan and its rivals."""
    ranks = range(costs.ranks)
    healthy = min(costs.health.rate(rank) for rank in ranks)
    quick = [rank for rank in ranks if costs.health.rate(rank) == healthy]
    found = {PLAN: Side(plan.strategy, plan.home, costs)}
    found["equal: dp4"] = Side(_equal([[rank] for rank in ranks], sizes.layers))
    found["equal: pp4"] = Side(_equal([list(ranks)], sizes.layers))
    half = costs.ranks // 2
    found["equal: dp2 pp2"] = Side(_equal([list(ranks)[:half], list(ranks)[half:]], sizes.layers))
    found[f"without the slow: dp{len(quick)}"] = Side(_equal([[rank] for rank in quick], sizes.layers))
    return found


def _equal(pipelines: Sequence[Sequence[int]], layers: int) -> hg.Strategy:
    """Return pipelines of stages of one rank each, with layers as equal as can be."""
    made = []
    for ranks in pipelines:
        ends = [layers * (i + 1) // len(ranks) for i in range(len(ranks))]
        counts = [b - a for a, b in itertools.pairwise([0, *ends])]
        made.append(hg.Pipeline(tuple(hg.Stage((rank,), n) for rank, n in zip(ranks, counts, strict=True))))
    return hg.Strategy(tuple(made))


@dataclass(frozen=True)
class Found:
    """A side's medians: what a step took, and what its simulation takes."""

    name: str
    side: Side
    measured: float
    predicted: float
    counts: tuple[int, ...]


def compared(costs: hg.Costs, sides: Mapping[str, Side], trained: Trained) -> list[Found]:
    """Return the sides, what is predicted to be the quickest first."""
    found = []
    for name, side in sides.items():
        steps = [step[name] for step in trained.steps]
        assignment = steps[0].assignment
        owned = costs.changed(home=side.home or hg.Home())
        predicted = owned.simulate(side.strategy, assignment).seconds
        found.append(Found(name, side, median(step.seconds for step in steps), predicted, assignment.counts))
    return sorted(found, key=lambda each: each.predicted)


def ordered(found: Sequence[Found]) -> tuple[int, int]:
    """Return how many pairs are measured in the order that was predicted, and how many are predicted apart."""
    apart = [
        (quick, slow) for quick, slow in itertools.combinations(found, 2) if slow.predicted > APART * quick.predicted
    ]
    return sum(quick.measured < slow.measured for quick, slow in apart), len(apart)


def difference(trained: Trained) -> float:
    """Return the largest relative difference between losses of one step."""
    every = [[taken.loss for taken in step.values()] for step in trained.steps]
    return max((max(losses) - min(losses)) / abs(min(losses)) for losses in every)


def profile_here(sizes: Sizes, say: Callable[[str], None]) -> Profile:
    """Measure a profile, again where the machine was too busy to fit one."""
    for _ in range(ATTEMPTS):
        found: Profile = hg.launch(profiled, 2, sizes, timeout=LIMIT)[0]
        if not found.unfit and found.link is not None:
            return found
        say(f"profiled again: {found.unfit or found.notes}")
    raise ValueError(f"this machine is too busy to profile: {found.unfit or found.notes}")


def print_slowed(
    cases: Sequence[Mapping[int, float]],
    rounds: int = 3,
    share: float = SHARE,
    sizes: Sizes | None = None,
    kept: Path | None = None,
) -> bool:
    """Print a table for every case; return whether all losses agree.

    Args:
        kept: file of the profile: read if it exists, else written.
    """
    sizes = sizes or Sizes()
    console = Console(width=150, highlight=False)
    say = Console(stderr=True, width=200, highlight=False).print
    if kept is not None and kept.is_file():
        profile = Profile.load(kept)
    else:
        profile = profile_here(sizes, say)
        if kept is not None:
            profile.save(kept)
    right = True
    total = [0, 0]
    for rates in cases:
        shares = [share / rates.get(rank, 1.0) for rank in range(RANKS)]
        costs = hg.Costs(profile, profile.cluster(RANKS), hg.Health({r: 1 / each for r, each in enumerate(shares)}))
        plan = hg.plan(costs, sizes.workload, method="straggler")
        sides = sides_of(costs, sizes, plan)
        say(f"ranks at {dict(rates)}: {plan.strategy.name}")
        with Brake(shares) as entry:
            ranks = hg.launch(train, RANKS, sizes, sides, rounds, entry, timeout=LIMIT)
        found = compared(costs, sides, ranks[0])
        console.print(table_of(rates, found))
        pairs = ordered(found)
        total = [a + b for a, b in zip(total, pairs, strict=True)]
        got = ", ".join(f"{of.share / each:.2f}" for of, each in zip(ranks, shares, strict=True))
        off = difference(ranks[0])
        console.print(
            f"{pairs[0]} of {pairs[1]} pairs that are predicted {APART - 1:.0%} apart or more are measured in that "
            f"order; losses differ by {off:.1e} at most; ranks had {got} of their shares; load {os.getloadavg()[0]:.1f}"
        )
        if off > BOUND:
            console.print(f"WRONG: losses differ by more than {BOUND:g}")
            right = False
    console.print(f"in all: {total[0]} of {total[1]} pairs in the predicted order")
    return right


def table_of(rates: Mapping[int, float], found: Sequence[Found]) -> Table:
    """Return a line for every side."""
    named = ", ".join(f"rank {rank} at {rate}" for rank, rate in rates.items())
    table = Table(title=f"{named}: medians, seconds of an iteration", title_justify="left")
    for heading in (
        "plan",
        "predicted",
        "measured",
        "measured / predicted",
        f"measured / {PLAN}",
        "micro-batches",
        "strategy",
    ):
        table.add_column(heading, justify="left" if heading in ("plan", "strategy") else "right")
    ours = next(each.measured for each in found if each.name == PLAN)
    for each in found:
        table.add_row(
            each.name,
            *(f"{seconds:.2f}" for seconds in (each.predicted, each.measured)),
            *(f"{ratio:.2f}" for ratio in (each.measured / each.predicted, each.measured / ours)),
            " ".join(map(str, each.counts)),
            each.side.strategy.name.partition("@")[0],
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", help="of slow ranks, as 1=2.57 3=5.42: this case alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=float, default=SHARE, help="of a core that a healthy rank has")
    parser.add_argument("--profile", type=Path, help="file of the profile: read if it exists, else measured and saved")
    parser.add_argument("--brake", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--period", type=float, default=PERIOD_S, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.brake is not None:
        brake(given.brake, given.period)
        return
    cases = CASES
    if given.rates:
        pairs = (text.split("=") for text in given.rates)
        cases = ({int(rank): float(rate) for rank, rate in pairs},)
    sys.exit(0 if print_slowed(cases, given.rounds, given.share, kept=given.profile) else 1)


if __name__ == "__main__":
    main()

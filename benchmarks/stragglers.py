"""How soon and how exactly ranks that are slowed for real are found, and how often one is that is not.

    python benchmarks/stragglers.py                      # all tables
    python benchmarks/stragglers.py --only found         # one of: found, acted, steady, quiet
    python benchmarks/stragglers.py --only quiet --steps 1000

Four ranks on the CPU train a small Llama. One of them is stopped (SIGSTOP) for a part of every 100 ms, from outside, so
that it gets 1/2.57, 1/5.42 or 1/12.53 of its time: the rates of Malleus's stragglers. The real slowdown is measured
twice. One measure is the clock of the process that stops it, which may wake late. The other, called the truth, is the
rank's own CPU clock: the seconds of an iteration divided by the CPU seconds of a healthy one. All others wait for the
slow rank, so the truth includes the side effects of stops: late wakes, and caches filled by others meanwhile.

- found: iterations from the first that is slow from its beginning until the rank is named, and the rate then.
- quiet: no rank is slowed, so every rank that is named is a false alarm. On a busy machine some other process may
  really have slowed a rank for several iterations.
- steady: `hydragraph train` on two ranks with a core each, one of which stays slow: seconds of a step after the run has
  adapted, divided by those of a healthy step, next to T_opt = N / ((N - n) + sum 1/x) and a run that does not adapt.
- acted: a rank is slowed 5.42 times for a while, with and without the controller in turn: seconds of a step, and the
  decisions. Costs are a datasheet's, so only their ratios are right.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import transformers
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from hydragraph.cost.costs import Costs
from hydragraph.cost.datasheet import datasheet
from hydragraph.planner.policy import Policy
from hydragraph.spec.cluster import Cluster, Device, Interconnect
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.train.stragglers.background_replanning import Replanned, Replanner, ReplanQuestion
from hydragraph.train.stragglers.controller import Controller, Replanning
from hydragraph.train.stragglers.monitor import Monitor

RANKS = 4
LAYERS = 4
STRATEGY = "<tp1,pp1> + <tp1,pp1> + <tp1,pp1> + <tp1,pp1>"
DEEP = "<tp1,pp2> + <tp1,pp2>"
LEVELS = (2.57, 5.42, 12.53)  # Malleus
WARM = 12  # iterations before anything happens
SLOW = 8  # iterations that a rank is slow
ACTED = 16  # iterations of each part with the controller
WELL = 8  # iterations that it is well in between
LIMIT = timedelta(hours=2)


# Slowing a process down, from outside of it.


@contextmanager
def slowed(pid: int, rate: float, told: Path) -> Iterator[None]:
    """Slow a process inside of this."""
    command = [sys.executable, "-S", str(Path(__file__).with_name("throttle.py")), str(pid), str(rate), str(told)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        yield
    finally:
        process.terminate()
        process.wait()


# On the ranks.


@dataclass(frozen=True)
class Sizes:
    """A model and its mini-batches."""

    hidden: int = 192
    layers: int = LAYERS
    tokens: int = 4096
    longest: int = 512
    strategy: str = STRATEGY


def llama(sizes: Sizes) -> torch.nn.Module:
    """Return the model that is trained."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=2048,
        num_hidden_layers=sizes.layers,
        max_position_embeddings=sizes.longest,
    )
    return transformers.LlamaForCausalLM(config)


def mini_batch(sizes: Sizes, seed: int) -> list[torch.Tensor]:
    """Return sequences of very different lengths: half of them drawn from a lognormal, as web text's are."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor] = []
    left = sizes.tokens
    while left > 8:
        length = min(left, sizes.longest, max(8, int(draw.lognormvariate(4.5, 0.9))))
        found.append(torch.randint(0, 2048, (length,), generator=generator))
        left -= length
    return found


@dataclass(frozen=True)
class Watched:
    """One iteration: its seconds, this rank's CPU seconds, and the rates that were known after it."""

    seconds: float
    cpu: float
    rates: dict[int, float]
    scatter: tuple[float, float]


def compiled(sizes: Sizes) -> hg.Executable:
    """Return the executable of this rank."""
    model = llama(sizes)
    strategy = hg.Strategy.parse(sizes.strategy, layers=sizes.layers)
    return hg.compile(
        model, strategy, lambda named: torch.optim.AdamW(named, lr=1e-3), device="cpu", check="off", progress_s=600
    )


def monitor_of(exe: hg.Executable) -> Monitor:
    """Return a monitor without any measured profile."""
    cluster = default_cluster(exe.ranks)
    return Monitor(Costs(datasheet(exe.program, cluster), cluster))


def watched(sizes: Sizes, phases: Sequence[tuple[int, float, int]], folder: Path) -> list[Watched]:
    """Train through phases of (rank, rate, iterations), where rate 1 means healthy; return the observations."""
    exe = compiled(sizes)
    exe.watched = True
    (folder / f"pid-{exe.rank}").write_text(str(os.getpid()))
    monitor = monitor_of(exe)
    seen: list[Watched] = []
    step = 0
    for number, (rank, rate, iterations) in enumerate(phases):
        with (
            slowed(int((folder / f"pid-{rank}").read_text()), rate, folder / f"truth-{number}")
            if exe.rank == (rank + 1) % exe.ranks and rate > 1
            else nullcontext()
        ):
            for _ in range(iterations):
                began = time.process_time()
                report = exe.step(mini_batch(sizes, step))
                cpu = time.process_time() - began
                if not step:
                    monitor.baseline(report.ranks)
                step += 1
                monitor.observe(report.chosen, report.assignment, report.ranks)
                scatter = (monitor._device.scatter, monitor._core.scatter)
                seen.append(Watched(report.seconds, cpu, dict(monitor.health.rates), scatter))
                if os.environ.get("SHOW") and not exe.rank:
                    own = " ".join(f"{sum(r.own):6.3f}/{r.ran:.3f}/{r.queued:.3f}" for r in report.ranks)
                    print(f"{step:4d} {rate:5.2f} {report.seconds:6.2f}  {own}  {scatter} {seen[-1].rates}")
    exe.close()
    return seen


# Tables.


def load() -> str:
    """Say how busy the machine is."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def found(console: Console, sizes: Sizes, repeats: int) -> None:
    """Slow ranks down, and report when they are found and with what rate."""
    phases: list[tuple[int, float, int]] = [(0, 1.0, WARM)]
    for i in range(repeats):
        for j, rate in enumerate(LEVELS):
            phases += [((i + j) % RANKS, rate, SLOW), (0, 1.0, WELL)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        by_rank = hg.launch(watched, RANKS, sizes, phases, folder, timeout=LIMIT)
        stopped = {int(p.name.removeprefix("truth-")): float(p.read_text()) for p in folder.glob("truth-*")}
    seen = by_rank[0]
    table = Table(title="Ranks that are slowed for real (stopped for a part of every 100 ms)")
    columns = (
        "rank",
        "asked",
        "by stops",
        "truth",
        "found after",
        "rate then",
        "rate at last",
        "error",
        "well after",
        "others named",
    )
    for column in columns:
        table.add_column(column, justify="right")
    at = 0
    for number, (rank, rate, iterations) in enumerate(phases):
        during = seen[at : at + iterations]
        after = seen[at + iterations : at + iterations + WELL]
        at += iterations
        if rate == 1:
            continue
        first = next((i for i, each in enumerate(during, start=1) if rank in each.rates), None)
        again = next((i for i, each in enumerate(after, start=1) if rank not in each.rates), None)
        then = during[first - 1].rates[rank] if first else math.nan
        last = during[-1].rates.get(rank, math.nan)
        others = {other for each in during for other in each.rates if other != rank}
        well = median(each.cpu for each in by_rank[rank][WARM // 2 : WARM])
        truth = median(each.seconds for each in during[1:]) / well  # the first may be slow for a part of it only
        error = last / truth - 1
        cells = (
            rank,
            rate,
            f"{stopped[number]:.2f}",
            f"{truth:.2f}",
            first or "never",
            f"{then:.2f}",
            f"{last:.2f}",
            f"{error:+.0%}",
        )
        table.add_row(*map(str, (*cells, again or "never", sorted(others) or "none")))
    console.print(table)
    healthy = median(each.seconds for each in seen[1:WARM])
    console.print(
        f"A healthy iteration took {healthy:.2f} s; scatter of devices {seen[-1].scatter[0]:.2f}, of cores "
        f"{seen[-1].scatter[1]:.2f} (standard deviations of logarithms); {load()}."
    )


def quiet(console: Console, sizes: Sizes, steps: int) -> None:
    """Run without slow ranks, and count the ranks that are named anyway."""
    with tempfile.TemporaryDirectory() as name:
        seen = hg.launch(watched, RANKS, sizes, [(0, 1.0, steps)], Path(name), timeout=LIMIT)[0]
    alarms = [
        (step, rank, each.rates[rank])
        for step, (before, each) in enumerate(itertools.pairwise(seen), start=2)
        for rank in each.rates
        if rank not in before.rates
    ]
    lasted = sum(bool(each.rates) for each in seen)
    console.print(
        f"{len(alarms)} false alarms in {steps} iterations of {median(e.seconds for e in seen):.2f} s "
        f"({1000 * len(alarms) / steps:.2f} per 1,000), {lasted} iterations under one; {load()}, "
        f"scatter of devices {seen[-1].scatter[0]:.2f}, of cores {seen[-1].scatter[1]:.2f}"
    )
    for step, rank, rate in alarms:
        console.print(f"  iteration {step}: rank {rank}, {rate:.2f}")


def acted(console: Console, sizes: Sizes, repeats: int) -> None:
    """Slow one rank 5.42 times for a while, and compare steps with the controller and without."""
    sizes = replace(sizes, strategy=DEEP)
    phases = [(0, 1.0, WARM), (1, 5.42, ACTED), (0, 1.0, ACTED)]
    table = Table(title="Rank 1 of 4 takes 5.42 times as long, then is well again: median seconds of steps")
    for column in ("controller", "healthy", "slow", "well again", "strategy when slow"):
        table.add_column(column, justify="right")
    told: list[str] = []
    slow: dict[bool, list[float]] = {False: [], True: []}
    for control in (True, False) * repeats:
        with tempfile.TemporaryDirectory() as name:
            seen, events = hg.launch(controlled, RANKS, sizes, phases, Path(name), control, timeout=LIMIT)[0]
        healthy, during, after = (seen[WARM // 2 : WARM], seen[-2 * ACTED : -ACTED], seen[-ACTED:])
        slow[control] += [seconds for seconds, _ in during[ACTED // 2 :]]
        row = (median(s for s, _ in part[len(part) // 2 :]) for part in (healthy, during, after))
        table.add_row("on" if control else "off", *(f"{each:.2f}" for each in row), during[-1][1])
        told += events
    console.print(table)
    ratio = median(slow[False]) / median(slow[True])
    console.print(f"While one is slow, steps take {ratio:.2f} times as long without the controller; {load()}.")
    for line in told:
        console.print(line, markup=False)


def steady(console: Console, repeats: int, rates: Sequence[float], tokens: int) -> None:
    """Slow one of two ranks of `hydragraph train` permanently; compare its steps with those of an unadapted run."""
    columns = ("rate", "by stops", "T_opt", "with replan: true", "above T_opt", "does nothing", "a healthy step")
    table = Table(title="Two ranks on a core each, one slowed: steps by the healthy step (medians)")
    for column in columns:
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = measured_in(folder, tokens)
        for rate in tuple(rates) * repeats:
            on, off = (Trained(folder, profile, replans, tokens).slowed(rate, steps) for replans, steps in RUNS)
            ideal = 2 / (1 + 1 / on.rate)
            row = (f"{rate}", f"{on.rate:.2f}", f"{ideal:.2f}", f"{on.ratio:.2f}", f"{on.ratio / ideal - 1:+.0%}")
            table.add_row(*row, f"{off.ratio:.2f}", f"{on.healthy:.2f} s, {off.healthy:.2f} s")
            console.print(" ".join(row), f"{off.ratio:.2f}", *on.told, sep="\n  ", markup=False)
    console.print(table)
    console.print(load())


RUNS = ((True, 40), (False, 6))  # whether it plans again, and for how many steps a rank is slow
LAST = 8  # of them, that count


def train_config(folder: Path, profile: Path | None, replans: bool, tokens: int) -> Path:
    """Write the config of two ranks that train a small Llama, on texts that are written into the folder."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    draw = random.Random(0)
    for number in range(200):
        words = (f"word{draw.randrange(300)}" for _ in range(draw.randrange(20, 400)))
        (texts / f"{number:03}.txt").write_text(" ".join(words))
    record = {
        "model": {
            "architecture": "LlamaForCausalLM",
            "config": {
                "hidden_size": 192,
                "intermediate_size": 528,
                "num_hidden_layers": 8,
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "max_position_embeddings": 64,
            },
        },
        "data": {"paths": [str(texts)], "vocab_size": 600, "max_length": 64, "tokens_per_step": tokens},
        "strategies": ["2*<tp1,pp1>", "<tp1,pp2>"],
        "plan": {"choose": True, "profile": str(profile)} if profile else {},
        "elastic": {"replan": replans},
        "steps": 1000,
        "ranks": 2,
        "device": "cpu",
        "check": "off",
        "output": str(folder / "run"),
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(record))  # which is YAML, too
    return file


def measured_in(folder: Path, tokens: int) -> Path:
    """Measure the profile, as a user would."""
    made = folder / "profile.json"
    command = ["profile", str(train_config(folder, None, False, tokens)), "--schemes", "tp1pp1", "--out", str(made)]
    subprocess.run([sys.executable, "-m", "hydragraph", *command], check=True, stdout=subprocess.DEVNULL)
    return made


@dataclass(frozen=True)
class Steady:
    """Seconds of a healthy step, the final slowdown of steps, the rate of one rank, and the reported decisions."""

    healthy: float
    ratio: float
    rate: float
    told: Sequence[str]


class Trained:
    """A run of `hydragraph train`."""

    def __init__(self, folder: Path, profile: Path, replans: bool, tokens: int) -> None:
        self._folder = folder
        self._run = Path(tempfile.mkdtemp(dir=folder)) / "run"
        command = ["train", str(train_config(folder, profile, replans, tokens)), "--set", f"output={self._run}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hydragraph", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def slowed(self, rate: float, steps: int) -> Steady:
        """Let the run warm up, slow rank 1 for `steps` steps, and end the run."""
        try:
            self._wait(3)
            pids = [place["pid"] for place in json.loads((self._run / "ranks.json").read_text())]
            for core, pid in enumerate(pids):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {core})
            healthy = self._wait(WARM + LAST)[-LAST:]
            with slowed(pids[1], rate, self._folder / "truth"):
                last = self._wait(WARM + LAST + steps)[-min(LAST, steps - 2) :]
        finally:
            self._process.terminate()
            self._process.wait()
        told = [str(json.loads(line)["why"]) for line in (self._run / "events.jsonl").read_text().splitlines()]
        well = median(healthy)
        return Steady(well, median(last) / well, float((self._folder / "truth").read_text()), told)

    def _wait(self, steps: int) -> list[float]:
        """Return the seconds of the steps so far, once there are so many."""
        file = self._run / "metrics.jsonl"
        while True:
            assert self._process.poll() is None, "the run has ended"
            lines = file.read_text().splitlines() if file.exists() else []
            if len(lines) >= steps:
                return [json.loads(line)["seconds"] for line in lines]
            time.sleep(0.1)


def controlled(
    sizes: Sizes, phases: Sequence[tuple[int, float, int]], folder: Path, control: bool
) -> tuple[list[tuple[float, str]], list[str]]:
    """Train through phases; return seconds and strategy of each step, and on rank 0 what was decided."""
    program = hg.capture(llama(sizes), check="off")
    cluster = Cluster.homogeneous(RANKS, device=Device(2e11, int(8e9), 1e10), within_node=Interconnect(2e9, 5e-5))
    profile = datasheet(program, cluster)
    exe = hg.compile(
        llama(sizes),
        hg.Strategy.parse(sizes.strategy, layers=sizes.layers),
        lambda named: torch.optim.AdamW(named, lr=1e-3),
        device="cpu",
        program=program,
        profile=profile,
        policy=Policy(workers=0),
    )
    exe.watched = True
    controller: Controller | None = None
    if not exe.rank and control:
        costs = Costs(profile, profile.cluster(RANKS))

        def switch(answer: Replanned) -> None:
            assert answer.request is not None
            exe.choose_from(answer.strategies, answer.request, answer.static)

        steps = sum(iterations for _, _, iterations in phases)
        question = ReplanQuestion(costs, (), exe.strategies, exe.strategies, exe.request, Policy())
        controller = Controller(Monitor(costs), Replanning(question, Replanner(), switch, steps))
    (folder / f"pid-{exe.rank}").write_text(str(os.getpid()))
    seen: list[tuple[float, str]] = []
    told: list[str] = []
    for number, (rank, rate, iterations) in enumerate(phases):
        with (
            slowed(int((folder / f"pid-{rank}").read_text()), rate, folder / f"truth-{number}")
            if exe.rank == (rank + 1) % exe.ranks and rate > 1
            else nullcontext()
        ):
            for _ in range(iterations):
                report = exe.step(mini_batch(sizes, len(seen)))
                seen.append((report.seconds, report.strategy))
                told += [event.line for event in controller.stepped(report)] if controller is not None else []
    if controller is not None:
        controller.close()
    exe.close()
    return seen, told


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("found", "quiet", "acted", "steady"))
    parser.add_argument("--steps", type=int, default=1000, help="iterations without slow ranks")
    parser.add_argument("--repeats", type=int, default=2, help="of every level")
    parser.add_argument("--rates", type=float, nargs="+", default=LEVELS, help="of --only steady")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step of --only steady")
    parser.add_argument("--sizes", default="{}", help='of the model, such as {"hidden": 128, "tokens": 1024}')
    chosen = parser.parse_args()
    console = Console(width=130)
    sizes = Sizes(**json.loads(chosen.sizes))
    if chosen.only in (None, "found"):
        found(console, sizes, chosen.repeats)
    if chosen.only in (None, "acted"):
        acted(console, sizes, chosen.repeats)
    if chosen.only in (None, "steady"):
        steady(console, chosen.repeats, chosen.rates, chosen.tokens)
    if chosen.only in (None, "quiet"):
        quiet(console, sizes, chosen.steps)


if __name__ == "__main__":
    main()

"""`strategies: auto` on two uneven machines, beside strategies that a person would write, and FSDP2.

    sudo python benchmarks/auto.py                # about 15 minutes on two cores
    sudo python benchmarks/auto.py --drawn 6      # then six other pairs of machines, the plans only

Two machines of one rank each (network namespaces, joined by a link of 200 Mbit/s; needs root, iproute2 and tc) train a
small Llama on texts of very different lengths. Another process stops and continues every process of a rank from its
start, so that the second machine computes 0.4 times as much as the first. The sides train on the same mini-batches from
the same weights, one after the other, `--rounds` times in turn:

- auto: `strategies: auto` and nothing else, first without and then with the cache of measurements.
- by hand: a profile of one machine, scaled to both, and a cluster file with the true speeds and the true link; the best
  plan that `hg.plan` finds with them.
- equal data parallelism, and a pipeline of two equal stages, without a profile.
- uneven pipeline: layers in proportion to the machines' speeds, the strategy that a person would pick.
- FSDP2 with equal shares.

The printed table has seconds per step, over all steps after the first (planning again included) and in their second
half. Below it are the explanation that auto gives, when each line of its log appeared, and the seconds that the costs
of the files by hand predict for its strategies, relative to the best plan of these files.
The exit code is 1 if losses differ between sides, if that ratio is above 1.02, or if the second half of auto's run
takes over 1.05 times as long as another side's.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

from rich.console import Console
from rich.table import Table

import hydragraph as hg
from benchmarks.everything import AGREE, HANGS_S, LONGEST, Brakes, Done, read_steps, slower, words_of, write_texts
from hydragraph.cost.costs import Costs
from hydragraph.cost.measured_profile import Profile
from hydragraph.planner.price_candidate import PricedPlan
from hydragraph.planner.price_mini_batches import MiniBatchPrices
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.record import from_record
from hydragraph.spec.strategy import Strategy
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import mini_batches, open_tokens, prepare
from hydragraph.train.step_metrics import read_metrics
from tests.nodes import Node, TwoNodes, shaping_refusal

ROOT = Path(__file__).parents[1]
RANKS = 2
STATIC = {"equal data parallelism": "2*<tp1,pp1>", "equal pipeline": "<tp1,pp2>"}
AUTO, AGAIN, BY_HAND, UNEVEN, FSDP = "auto", "auto, measured before", "by hand", "uneven pipeline", "FSDP2"
SIDES = (AUTO, AGAIN, BY_HAND, *STATIC, UNEVEN, FSDP)
STARTS_S = 8.0  # for the process that brakes
SAMPLE = 20  # mini-batches that plans are compared on
WITHIN = 1.02  # of the best plan by hand
SLOWER = 1.05  # largest accepted ratio of auto's measured time to another side's


@dataclass(frozen=True)
class Pair:
    """Two machines and the model that they train.

    Attributes:
        shares: of a core, per machine.
        bits_per_s: of the link.
        hidden, layers: of the model.
    """

    shares: tuple[float, float] = (0.8, 0.32)
    bits_per_s: float = 200e6
    hidden: int = 128
    layers: int = 6

    @classmethod
    def drawn(cls, seed: int) -> Pair:
        """Draw another pair."""
        draw = random.Random(seed)
        shares = [0.8, round(0.8 * draw.uniform(0.25, 1), 2)]
        draw.shuffle(shares)
        link = draw.choice([5e6, 20e6, 100e6, 200e6, 1e9])
        return cls((shares[0], shares[1]), link, draw.choice([96, 128, 192]), draw.choice([4, 6, 8]))

    def __str__(self) -> str:
        fast, slow = self.shares
        return f"{fast:g} and {slow:g} of a core, {self.bits_per_s / 1e6:g} Mbit/s, {self.layers} x {self.hidden}"

    @property
    def uneven_pipeline(self) -> str:
        fast = round(self.layers * self.shares[0] / sum(self.shares))
        first = min(max(fast, 1), self.layers - 1)
        return f"<[0]x{first},[1]x{self.layers - first}>"

    def config(self, folder: Path, name: str, steps: int, **changed: Any) -> TrainConfig:
        """Return the config of a side."""
        sizes = {"hidden_size": self.hidden, "intermediate_size": self.hidden * 11 // 4, "num_attention_heads": 4}
        sizes |= {"num_hidden_layers": self.layers, "num_key_value_heads": 2, "max_position_embeddings": LONGEST}
        record = {
            "model": {"architecture": "LlamaForCausalLM", "config": sizes},
            "data": {
                "paths": [str(folder / "texts.jsonl")],
                "vocab_size": 1024,
                "tokens_per_step": 4096,
                "max_length": LONGEST,
                "heldout": 0,
                "cache": str(folder / "cache"),
            },
            "strategies": "auto",
            "schedule": {"decay": "constant", "warmup": 5},
            "steps": steps,
            "ranks": RANKS,
            "device": "cpu",
            "check": "off",
            "checkpoint_every": steps,
            "output": str(folder / name / "run"),
        }
        return from_record(TrainConfig, {**record, **changed})

    def write_cluster(self, file: Path) -> None:
        """Write the cluster file that a person would write, who knows the speeds and the link."""
        link = f"{{bytes_per_s: {self.bits_per_s / 8:.3e}, latency_s: 3.0e-4}}"
        types, nodes = ["types:"], ["nodes:"]
        for i, share in enumerate(self.shares):
            types.append(
                f"  m{i}: {{flops_per_s: {share * 5e10:.3e}, memory_bytes: 8.0e9, memory_bytes_per_s: 1.0e10}}"
            )
            nodes.append(f"  - {{type: m{i}, devices: 1, inner: {link}, outer: {link}}}")
        file.write_text("\n".join(types + nodes) + "\n")


# Files by hand, and plans with them.


@dataclass(frozen=True)
class ByHand:
    """Files that a person would write for a pair of machines, and the best plan with them."""

    profile: Path
    cluster: Path
    costs: Costs
    batches: tuple[tuple[int, ...], ...]
    plan: hg.Plan

    @property
    def strategy(self) -> str:
        """The plan's strategy as text."""
        return str(self.plan.strategy).partition("@")[0]

    def seconds(self, strategies: Sequence[str], layers: int) -> float:
        """Return the predicted mean seconds of the sample mini-batches, which take these strategies in turn.

        Args:
            strategies: texts with their fingerprints, as in metrics.jsonl.
        """
        total = 0.0
        for text, count in Counter(strategies).items():
            strategy = text.partition("@")[0]
            settled = MiniBatchPrices(self.costs, self.batches).settle(Strategy.parse(strategy, layers), "given")
            assert isinstance(settled, PricedPlan), f"{strategy}: {settled}"
            total += count * settled.seconds
        return total / len(strategies)


def measured_profile(folder: Path, pair: Pair) -> Profile:
    """Measure the profile of one machine without brakes, by the command that users run."""
    config, made = folder / "profiled.yaml", folder / "measured.json"
    pair.config(folder, "profiled", 1, strategies=["2*<tp1,pp1>"]).save(config)
    command = [sys.executable, "-m", "hydragraph", "profile", str(config), "--schemes", "tp1pp1", "--out", str(made)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **_THREADS}, cwd=ROOT)
    return Profile.load(made)


def by_hand(folder: Path, pair: Pair) -> ByHand:
    """Write the files, and plan with them."""
    measured = measured_profile(folder, pair)
    profile, cluster = folder / "profile.json", folder / "cluster.yaml"
    Profile.merge([slower(measured, 1 / share, f"m{i}") for i, share in enumerate(pair.shares)]).save(profile)
    pair.write_cluster(cluster)
    config = pair.config(folder, "profiled", 1)
    stream = mini_batches(config, open_tokens(config, prepare(config)))
    batches = tuple(stream.skip() for _ in range(SAMPLE))
    costs = Costs(Profile.load(profile), Cluster.load(cluster))
    plan = hg.plan(costs, hg.Workload(lengths=[list(batch) for batch in batches]))
    return ByHand(profile, cluster, costs, batches, plan)


# Runs.


@dataclass(frozen=True)
class Ran:
    """Results of one run.

    Attributes:
        steps: what it wrote of every step.
        began: when its command started.
        appeared: lines of the first rank's log, and the seconds after the start when each appeared.
        strategies: of the steps; none for FSDP2.
        explanation: of a run that planned by itself.
    """

    steps: Mapping[int, Done]
    began: float
    appeared: tuple[tuple[float, str], ...]
    strategies: tuple[str, ...]
    explanation: tuple[str, ...]

    @property
    def startup_s(self) -> float:
        """From the command to the end of the first step."""
        return self.steps[1].at - self.began

    @property
    def step_s(self) -> float:
        """Mean seconds of the steps after the first."""
        return (self.steps[len(self.steps)].at - self.steps[1].at) / (len(self.steps) - 1)

    @property
    def later_s(self) -> float:
        """Mean seconds of the steps in the second half."""
        half = len(self.steps) // 2
        return (self.steps[len(self.steps)].at - self.steps[half].at) / (len(self.steps) - half)


def run(name: str, folder: Path, pair: Pair, hand: ByHand, steps: int, round_: int, port: int) -> Ran:
    """Train with one side from its start to its end."""
    where = f"{name}-{round_}".replace(" ", "-").replace(",", "")
    here = folder / where
    here.mkdir()
    command = _command(name, folder, where, pair, hand, steps)
    caches = folder / f"cache-{round_}"  # of measurements; the second run of auto finds those of the first
    with TwoNodes(here / "nodes") as nodes, braked(here, nodes, pair.shares) as brake:
        nodes.shape(pair.bits_per_s)
        began = time.time()
        started = []
        for node in nodes:
            place: dict[str, Any] = {
                "RANK": str(node.number),
                "WORLD_SIZE": str(RANKS),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
            }
            place |= {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": str(port)}
            place |= {"XDG_CACHE_HOME": str(caches / f"of-{node.number}"), **_THREADS}
            started.append(node.start(command, here / f"{node.number}.log", **place))
        lines: list[tuple[float, str]] = []
        moved = time.monotonic()
        while brake() or not lines:
            said = (here / "0.log").read_text(errors="replace").splitlines()
            if len(said) > len(lines):
                moved = time.monotonic()
                lines += [(time.time() - began, line) for line in said[len(lines) :]]
            if time.monotonic() - moved > HANGS_S:
                raise RuntimeError("\n".join([f"{name} stands still:", *said[-20:]]))
            time.sleep(0.1)
        for process in started:  # nsenter stops with a process that is stopped, and does not continue with it
            process.kill()
            process.wait()
    log = here / "run" / "metrics.jsonl"
    found = read_steps(log)
    if len(found) < steps:
        raise RuntimeError(f"{name} ended after step {len(found)}:\n{(here / '0.log').read_text()[-3000:]}")
    history = [] if name == FSDP else read_metrics(log)
    explanation = tuple(history[0].plan) if history else ()
    return Ran(found, began, tuple(lines), tuple(m.strategy for m in history), explanation)


def _command(name: str, folder: Path, where: str, pair: Pair, hand: ByHand, steps: int) -> list[str]:
    """Return the command of a side's ranks, and write its config."""
    changed: dict[str, Any] = {}
    if name == BY_HAND:
        plan = {"choose": True, "profile": str(hand.profile), "cluster": str(hand.cluster)}
        changed = {"strategies": [hand.strategy], "plan": plan, "home": str(hand.plan.home)}
    elif name in STATIC:
        changed = {"strategies": [STATIC[name]]}
    elif name == UNEVEN:
        changed = {"strategies": [pair.uneven_pipeline]}
    elif name == FSDP:
        changed = {"strategies": [STATIC["equal data parallelism"]]}
    file = folder / where / "config.yaml"
    pair.config(folder, where, steps, **changed).save(file)
    if name == FSDP:
        script = [sys.executable, str(ROOT / "benchmarks/sharded.py"), str(file)]
        return [*script, "--output", str(folder / where / "run"), "--until", str(steps)]
    return [sys.executable, "-m", "hydragraph", "train", str(file)]


@contextmanager
def braked(folder: Path, nodes: TwoNodes, shares: Sequence[float]) -> Iterator[Callable[[], bool]]:
    """Yield a function that slows down the processes of all ranks that run by now, and returns whether any do."""
    brakes = Brakes(folder / "brakes")
    time.sleep(STARTS_S)

    def brake() -> bool:
        ranks = {pid: share for node, share in zip(nodes, shares, strict=True) for pid in _of_ranks(node)}
        brakes.set(ranks)
        return bool(ranks)

    try:
        yield brake
    finally:
        brakes.set({})
        brakes.close()


def _of_ranks(node: Node) -> list[int]:
    """Return the processes of a node's rank, except the one that has entered the node with it."""
    running = {pid for pid, environment in node.processes().items() if "RANK" in environment}
    return [pid for pid in running if words_of(pid)[:1] == [sys.executable]]


# What is printed.


def table(pair: Pair, ran: Mapping[str, Sequence[Ran]]) -> Table:
    """Return a row per side: medians over the rounds."""
    made = Table(title=f"{pair}; {len(ran[AUTO])} round(s), {os.cpu_count()} cores")
    for heading in ("", "to the first step", "s per step", "auto's / this", "later half", "auto's / this", "strategy"):
        made.add_column(heading, justify="left" if heading in ("", "strategy") else "right")
    whole, later = (median(getattr(r, name) for r in ran[AUTO]) for name in ("step_s", "later_s"))
    for name, rounds in ran.items():
        mine = [median(getattr(r, each) for r in rounds) for each in ("startup_s", "step_s", "later_s")]
        strategies = " ".join(f"{text} ({n})" for text, n in Counter(rounds[-1].strategies).most_common(3))
        numbers = (f"{mine[0]:.1f} s", f"{mine[1]:.3f}", f"{whole / mine[1]:.2f}", f"{mine[2]:.3f}")
        made.add_row(name, *numbers, f"{later / mine[2]:.2f}", strategies)
    return made


def planned(hand: ByHand, ran: Ran, layers: int) -> tuple[float, float]:
    """Return the seconds that the costs by hand predict for auto's first strategies, and for the best plan by hand."""
    before = ran.strategies[:SAMPLE]  # before it planned again
    return hand.seconds(before, layers), hand.seconds([hand.strategy], layers)


def slower_than(ran: Mapping[str, Sequence[Ran]]) -> dict[str, float]:
    """Return the sides that auto is slower than, and the ratio of auto's time to theirs."""
    later = {name: median(each.later_s for each in rounds) for name, rounds in ran.items()}
    ratios = {name: later[AUTO] / seconds for name, seconds in later.items() if name not in (AUTO, AGAIN)}
    return {name: ratio for name, ratio in ratios.items() if ratio > SLOWER}


def differences(ran: Mapping[str, Sequence[Ran]]) -> float:
    """Return the largest relative difference of a step's loss between two runs."""
    every = [each.steps for rounds in ran.values() for each in rounds]
    losses = [[steps[step].loss for steps in every] for step in every[0]]
    return max((max(each) - min(each)) / abs(min(each)) for each in losses)


_THREADS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument(
        "--drawn", type=int, default=0, help="compare plans for so many other pairs of machines instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the drawn pairs")
    parser.add_argument("--folder", type=Path, help="keep everything there; default: a temporary one")
    chosen = parser.parse_args()
    if (why := shaping_refusal()) is not None:
        sys.exit(why)
    pairs = [Pair.drawn(chosen.seed + i) for i in range(chosen.drawn)] or [Pair()]
    sides = (AUTO,) if chosen.drawn else (AUTO, *(name for name in chosen.sides if name != AUTO))
    with tempfile.TemporaryDirectory(prefix="hydragraph-auto-") as temporary:
        wrong = [
            compare(pair, sides, chosen, (chosen.folder or Path(temporary)) / str(i)) for i, pair in enumerate(pairs)
        ]
    sys.exit(any(wrong))


def compare(pair: Pair, sides: Sequence[str], chosen: argparse.Namespace, folder: Path) -> bool:
    """Run all sides on a pair of machines and print what they did; return whether something is wrong."""
    say = Console(stderr=True, highlight=False).print
    steps = 2 if chosen.drawn else chosen.steps
    folder.mkdir(parents=True)
    say(f"{pair}: writing texts, measuring a profile")
    write_texts(folder)
    hand = by_hand(folder, pair)
    ran: dict[str, list[Ran]] = {name: [] for name in sides}
    port = 29700
    for round_ in range(1 if chosen.drawn else chosen.rounds):
        for name in sides:
            port += 1
            ran[name].append(run(name, folder, pair, hand, steps, round_, port))
            say(f"{name}: {ran[name][-1].startup_s:.1f} s to the first step, {ran[name][-1].step_s:.3f} s per step")
    Console(width=150).print(table(pair, ran))
    first = ran[AUTO][0]
    print("\n".join(first.explanation))
    if not chosen.drawn:
        for name in {AUTO, AGAIN} & ran.keys():
            print(f"\nwhen the lines of {name} appeared, until its first step:")
            for at, line in ran[name][0].appeared:
                if at <= ran[name][0].startup_s + 0.1:
                    print(f"  {at:5.1f} s  {line[:120]}")
    mine, best = planned(hand, first, pair.layers)
    apart = differences(ran)
    print(
        f"predicted by the files by hand: {mine:.3f} s for auto's plan, {best:.3f} s for theirs, {hand.strategy}",
        end="",
    )
    print(f": {mine / best:.3f}; losses differ by at most {apart:.1e}, relative")
    slower = slower_than(ran)
    for name, ratio in slower.items():
        print(f"auto takes {ratio:.2f} times as long as {name}")
    return apart > AGREE or mine / best > WITHIN or bool(slower)


if __name__ == "__main__":
    main()

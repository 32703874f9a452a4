"""What a slow link between two nodes costs hydragraph, FSDP2 and DDP: all take turns in one run on both nodes.

    python benchmarks/two_nodes.py                          # one rank per node, at 100 and 400 Mbit/s
    python benchmarks/two_nodes.py --per-node 2 --rates 400

The nodes are network namespaces of this machine, joined by a link that tc makes slow (needs root; `tests/nodes.py`).
Both share its cores: computing takes as long as on one machine with the same number of ranks, and only the link is
slow.

Printed are, per rate and side, medians over the rounds: a step's wall time, its ratio to the two rivals, what a node
sends over the link in it (headers included), and for how long that keeps the link busy at least. Of hydragraph's steps
also how long ranks waited for weights (pull) and gradients (push), and which part of the link's time was hidden behind
computing: 1 - waited / busy. The pipeline runs twice, with its state where the stages compute it (the default home) and
in equal shares of all ranks; the last line holds the default against DDP, with the ratio that is aimed at.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from benchmarks.step import Sizes, Step, adamw, rivals
from hydragraph.runtime.instruction_trace import ExposedSeconds
from tests.nodes import TwoNodes, limited, shaping_refusal, torchrun

SIZES = Sizes(512, 4, 1024)
MBIT = 1e6
STRATEGIES = {
    2: {"data parallel": "2*<tp1,pp1>", "lopsided": "<[0]x3,[1]x1>", "pipeline": "<tp1,pp2>"},
    4: {  # ranks 0 and 1 are on one node, 2 and 3 on the other
        "data parallel": "4*<tp1,pp1>",
        "lopsided": "<[0,1]x3,[2]x1> + <[3]x4>",
        "pipeline": "<[0]x2,[2]x2> + <[1]x2,[3]x2>",
    },
}
EQUAL = "pipeline, equal home"
AIMED = {2: 0.35, 4: 0.2}  # a pipeline's time over that of DDP at 100 Mbit/s, by the number of ranks
AGREE = 1e-4  # between the losses of the first step


@dataclass(frozen=True)
class Taken:
    """One step of one side: seconds of the slowest rank, bytes that a node sent, seconds waited for pull and push."""

    wall: float
    sent: float
    pull: float = 0.0
    push: float = 0.0


Found = dict[str, list[Taken]]


# On the ranks.


def on_rank(rates: Sequence[float], rounds: int) -> dict[float, Found]:
    """Let all sides take turns at each rate."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    sides, found = Sides(SIZES), {}
    for rate in rates:
        if int(os.environ["LOCAL_RANK"]) == 0:
            subprocess.run(["tc", "qdisc", "replace", "dev", _interface(), "root", *limited(rate)], check=True)
        found[rate] = sides.alternate(rounds)
    sides.close()
    return found


class Sides:
    """FSDP2, DDP and hydragraph's strategies on the ranks that this is called on, all alive together.

    Args:
        sizes: of what they train.
    """

    def __init__(self, sizes: Sizes) -> None:
        warnings.filterwarnings("ignore")
        self._steps: dict[str, Callable[[int], tuple[float, ExposedSeconds]]] = {
            n: _plain(s) for n, s in rivals(sizes).items()
        }
        self._executables = []
        texts = STRATEGIES[dist.get_world_size()]
        for name, text in {**texts, EQUAL: texts["pipeline"]}.items():
            strategy = hg.Strategy.parse(text, sizes.layers)
            home = "equal" if name == EQUAL else None
            exe = hg.compile(sizes.model(), strategy, optimizer=adamw, device="cpu", check="off", home=home)
            self._steps[name] = _ours(exe, sizes)
            self._executables.append(exe)
        losses = {name: step(-1)[0] for name, step in self._steps.items()}
        assert max(losses.values()) - min(losses.values()) < AGREE, f"the sides do not compute the same: {losses}"

    def alternate(self, rounds: int) -> Found:
        """Run all sides in turn, in changing order, after a round of warming up; the same is returned on every rank."""
        statistic = Path("/sys/class/net") / _interface() / "statistics" / "tx_bytes"
        names = list(self._steps)
        found: Found = {name: [] for name in names}
        for turn in range(rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                sent, began = int(statistic.read_text()), time.perf_counter()
                _, exposed = self._steps[name](turn)
                wall = time.perf_counter() - began
                dist.barrier()  # also what other ranks of this node have sent
                sent = int(statistic.read_text()) - sent
                per_rank: list[tuple[float, int]] = [(0.0, 0)] * dist.get_world_size()
                dist.all_gather_object(per_rank, (wall, sent))
                if turn:
                    walls, bytes_sent = zip(*per_rank, strict=True)
                    found[name].append(Taken(max(walls), statistics.fmean(bytes_sent), exposed.pull, exposed.push))
        return found

    def close(self) -> None:
        """End hydragraph's communication."""
        for exe in self._executables:
            exe.close()


def _interface() -> str:
    return os.environ["GLOO_SOCKET_IFNAME"]


def _plain(step: Step) -> Callable[[int], tuple[float, ExposedSeconds]]:
    def run(turn: int) -> tuple[float, ExposedSeconds]:
        loss = torch.tensor(step(turn))
        if turn < 0:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return float(loss), ExposedSeconds()

    return run


def _ours(exe: hg.Executable, sizes: Sizes) -> Callable[[int], tuple[float, ExposedSeconds]]:
    def run(turn: int) -> tuple[float, ExposedSeconds]:
        report = exe.step(sizes.sequences(turn))
        return report.loss, report.exposed

    return run


# On this machine.


def measured(per_node: int, rates: Sequence[float], rounds: int) -> dict[float, Found]:
    """Start the ranks on two nodes and return what rank 0 found."""
    with tempfile.TemporaryDirectory(prefix="hydragraph-nodes-") as name, TwoNodes(Path(name) / "nodes") as nodes:
        inside = ["--inside", str(Path(name) / "found"), "--rounds", str(rounds)]
        inside += ["--rates", *(f"{rate / MBIT:g}" for rate in rates)]
        started = [
            node.start(
                [*torchrun(node, nodes, per_node), "-m", "benchmarks.two_nodes", *inside],
                Path(name) / f"{node.number}.log",
                OMP_NUM_THREADS="1",
            )
            for node in nodes
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit("\n".join((Path(name) / f"{number}.log").read_text()[-3000:] for number in (0, 1)))
        told = loads((Path(name) / "found").read_text())
    return {float(r): {n: [Taken(**t) for t in taken] for n, taken in sides.items()} for r, sides in told.items()}


def table(title: str, rate: float, found: Mapping[str, Sequence[Taken]]) -> Table:
    """Return the medians of one rate."""
    shown = Table(title=title, title_justify="left")
    headings = ("", "step s", "/ FSDP2", "/ DDP", "MB a node sends", "link busy s", "waits: pull s", "push s", "hidden")
    for heading in headings:
        shown.add_column(heading, justify="left" if not heading else "right")
    middle = {name: _median(taken) for name, taken in found.items()}
    for name, taken in middle.items():
        busy, waited = taken.sent * 8 / rate, taken.pull + taken.push
        ratios = [f"{taken.wall / middle[rival].wall:.2f}" for rival in ("FSDP2", "DDP")]
        waits = ["", "", ""] if name in ("FSDP2", "DDP") else _waits(taken, hidden(waited, busy))
        shown.add_row(name, f"{taken.wall:.2f}", *ratios, f"{taken.sent / 1e6:.1f}", f"{busy:.2f}", *waits)
    return shown


def hidden(waited_s: float, busy_s: float) -> float:
    """Return the fraction of the link's time that was hidden, that is, without any rank waiting."""
    return max(0.0, 1 - waited_s / busy_s)


def _waits(taken: Taken, part: float) -> list[str]:
    return [f"{taken.pull:.2f}", f"{taken.push:.2f}", f"{part:.0%}"]


def _median(taken: Sequence[Taken]) -> Taken:
    return Taken(*(statistics.median(getattr(t, name) for t in taken) for name in ("wall", "sent", "pull", "push")))


def main() -> None:
    """Print a table per rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 400], help="of the link, Mbit/s")
    parser.add_argument("--per-node", type=int, choices=[1, 2], default=1, help="ranks of each node")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)  # on a rank: where to write what it found
    chosen = parser.parse_args()
    rates = [rate * MBIT for rate in chosen.rates]
    if chosen.inside is not None:
        found = on_rank(rates, chosen.rounds)
        if dist.get_rank() == 0:
            every = {
                rate: {n: [asdict(t) for t in taken] for n, taken in sides.items()} for rate, sides in found.items()
            }
            chosen.inside.write_text(dumps(every))
        return
    if (why := shaping_refusal()) is not None:
        sys.exit(why)
    console = Console(width=140)
    for rate, sides in measured(chosen.per_node, rates, chosen.rounds).items():
        title = f"{rate / MBIT:g} Mbit/s, 2 nodes with {chosen.per_node} rank(s) each, hidden {SIZES.hidden}, "
        title += f"{SIZES.layers} layers, {SIZES.tokens} tokens, {chosen.rounds} rounds"
        console.print(table(title, rate, sides))
        ratio = _median(sides["pipeline"]).wall / _median(sides["DDP"]).wall
        aimed = AIMED[2 * chosen.per_node]
        console.print(f"pipeline: {ratio:.2f} of DDP's time; aimed at: at most {aimed:g} at 100 Mbit/s")


if __name__ == "__main__":
    main()

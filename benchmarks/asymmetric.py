"""What degrees that differ between pipelines cost when gradients are summed and weights sent: our link over gloo.

    python benchmarks/asymmetric.py                  # 6 local ranks; about a minute on an idle machine
    python benchmarks/asymmetric.py --hidden 1536

AutoHet (its figure 3) adds GPUs to a symmetric setup, so that its tensor-parallel degrees differ, and finds 8 to 49 %
less throughput in its Megatron-LM, whose gradients are transposed before they are summed. Here the same pairs push the
gradients of a Llama to their owners and pull its weights, without any computation at the same time. More ranks also
have more messages, so 4 + 2 is also compared with 3 + 3, which has as many ranks and sends nearly the same bytes: the
remaining difference is the cost of asymmetry.

All setups take turns in the same processes. The main figure is the CPU time of all ranks together: over gloo on one
host sending is copying, and the wall clock means little when ranks outnumber cores. Both are printed.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.cost.link_bytes import DIRECTIONS, Direction
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.program import Program
from hydragraph.passes.weight_layouts import BucketLayouts, layouts
from hydragraph.runtime.buffers import Buffers
from hydragraph.runtime.exchange import Exchange, Transfer, pull_exchange, push_exchange

RANKS = 6
LIMIT = timedelta(minutes=20)
PUBLISHED = "8-49 % less throughput"


@dataclass(frozen=True)
class Setup:
    """Two pipelines of one stage each.

    Attributes:
        name: their degrees.
        stages: their ranks; the state is owned by all of them in equal shares.
    """

    name: str
    stages: tuple[tuple[int, ...], tuple[int, ...]]

    def strategy(self, layers: int) -> hg.Strategy:
        """Return it as a strategy."""
        return hg.Strategy(tuple(hg.Pipeline((hg.Stage(ranks, layers),)) for ranks in self.stages))

    @property
    def home(self) -> hg.Home:
        """Home that divides the state equally among the ranks in use."""
        used = {rank for stage in self.stages for rank in stage}
        return hg.Home([int(rank in used) for rank in range(RANKS)])


ONE_ONE = Setup("1 + 1", ((0,), (2,)))
TWO_ONE = Setup("2 + 1", ((0, 1), (2,)))
TWO_TWO = Setup("2 + 2", ((0, 1), (4, 5)))
FOUR_TWO = Setup("4 + 2", ((0, 1, 2, 3), (4, 5)))
THREE_THREE = Setup("3 + 3", ((0, 1, 2), (3, 4, 5)))
SETUPS = (ONE_ONE, TWO_ONE, TWO_TWO, FOUR_TWO, THREE_THREE)
PAIRS = ((TWO_ONE, ONE_ONE), (FOUR_TWO, TWO_TWO), (FOUR_TWO, THREE_THREE))


@dataclass(frozen=True)
class Spent:
    """Cost of one direction (pull or push) of a setup, as the median over rounds.

    Attributes:
        cpu: seconds of all ranks together.
        wall: seconds of the slowest rank.
        sent: bytes that ranks send to others.
    """

    cpu: float
    wall: float
    sent: int


def captured(hidden: int, layers: int) -> Program:
    """Return the program of a Llama with twelve heads, which 1, 2, 3 and 4 divide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=4096,
        num_hidden_layers=layers,
        max_position_embeddings=2048,
    )
    with torch.device("meta"):
        return hg.capture(LlamaForCausalLM(config), check="off")


class Link:
    """One direction of a setup on one rank: its exchanges, and the tensors that they move."""

    def __init__(self, placed: Sequence[BucketLayouts], direction: Direction, groups: Groups) -> None:
        rank = groups.world.rank
        self._groups = groups
        self._direction = direction
        self._exchanges: list[tuple[Exchange, torch.Tensor]] = []
        for each in placed:
            if direction == "pull":
                exchange = pull_exchange(each.home, each.used, rank, RANKS)
                shard = torch.randn(exchange.source)
            else:
                exchange = push_exchange(each.used, each.home, rank, RANKS)
                shard = torch.zeros(exchange.target)
            self._exchanges.append((exchange, shard))
        self.sent = sum(4 * (sum(e.sent) - e.sent[rank]) for e, _ in self._exchanges)

    def run(self) -> tuple[float, float]:
        """Move everything; return this process's CPU seconds, and those of the wall clock."""
        buffers = Buffers(torch.device("cpu"))
        buffers.begin()
        gradients = [torch.zeros(e.source) for e, _ in self._exchanges] if self._direction == "push" else []
        dist.barrier()
        began = time.perf_counter()
        cpu = time.process_time()
        with torch.no_grad():
            if self._direction == "pull":
                waiting = [Transfer(e, self._groups, buffers).pull(t, torch.float32) for e, t in self._exchanges]
            else:
                pushed = zip(self._exchanges, gradients, strict=True)
                waiting = [Transfer(e, self._groups, buffers).push(g, t) for (e, t), g in pushed]
            for finish in waiting:
                finish()
        return time.process_time() - cpu, time.perf_counter() - began


def on_ranks(hidden: int, layers: int, rounds: int) -> dict[tuple[str, Direction], Spent]:
    """Pull and push by all setups in turn; every rank calls it, and gets the same answer."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    program = captured(hidden, layers)
    world = join("cpu")
    groups = Groups(world, LIMIT)
    links = {
        (setup.name, direction): Link(
            layouts(program, setup.strategy(layers), HomeLayouts(setup.home, RANKS).by_name(program.buckets)),
            direction,
            groups,
        )
        for setup in SETUPS
        for direction in DIRECTIONS
    }
    found: dict[tuple[str, Direction], list[tuple[float, float]]] = {key: [] for key in links}
    for turn in range(rounds + 1):
        for key, link in links.items():
            spent = world.gather(link.run())
            if turn:  # the first round connects
                found[key].append((sum(cpu for cpu, _ in spent), max(wall for _, wall in spent)))
    sent = {key: sum(world.gather(link.sent)) for key, link in links.items()}
    groups.close()
    return {
        key: Spent(median(cpu for cpu, _ in each), median(wall for _, wall in each), sent[key])
        for key, each in found.items()
    }


def print_asymmetric(hidden: int = 768, layers: int = 4, rounds: int = 9) -> None:
    """Print what the setups take, and the ratios of the pairs."""
    found = hg.launch(on_ranks, RANKS, hidden, layers, rounds, timeout=LIMIT)[0]
    console = Console(width=150, highlight=False)
    table = Table(title=f"asymmetric over symmetric degrees, {rounds} rounds in turn", title_justify="left")
    for heading in (
        "degrees",
        "beside",
        "direction",
        "MB sent",
        "CPU ms",
        "ratio of CPU",
        "per byte",
        "wall ms",
        "ratio",
    ):
        table.add_column(heading, justify="left" if heading in ("degrees", "beside", "direction") else "right")
    for asymmetric, symmetric in PAIRS:
        for direction in DIRECTIONS:
            one = found[asymmetric.name, direction]
            other = found[symmetric.name, direction]
            table.add_row(
                asymmetric.name,
                symmetric.name,
                direction,
                f"{one.sent / 1e6:.0f} / {other.sent / 1e6:.0f}",
                f"{1e3 * one.cpu:.0f} / {1e3 * other.cpu:.0f}",
                f"{one.cpu / other.cpu:.2f}",
                f"{one.cpu / one.sent / (other.cpu / other.sent):.2f}",
                f"{1e3 * one.wall:.0f} / {1e3 * other.wall:.0f}",
                f"{one.wall / other.wall:.2f}",
            )
    console.print(table)
    console.print(f"published for asymmetric degrees (AutoHet, figure 3): {PUBLISHED}; load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768, help="of the Llama; twelve divides it")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    print_asymmetric(given.hidden, given.layers, given.rounds)


if __name__ == "__main__":
    main()

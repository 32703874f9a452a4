"""What a second owner of everything costs a step: copies 2 against copies 1, in turns, in the same processes.

    python benchmarks/copies.py                      # 4 ranks; about two minutes
    python benchmarks/copies.py --tokens 2000 --ranks 2
    python benchmarks/copies.py --links              # pulls and pushes of such a step alone, CPU seconds of all ranks

First owners hand the gradients that they have added up on to second ones, and both update. The update is the fused one.
Homes take turns by `Executable.move`, so both see the same noise. The result is the median over pairs of turns, for the
wall clock and for the CPU seconds of all ranks together: when ranks outnumber cores, the wall clock also includes waits
for other ranks' updates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.ir.layout import GradientKind, home, propagation
from hydragraph.ir.parameter import Bucket, Parameter
from hydragraph.runtime.buffers import Buffers
from hydragraph.runtime.exchange import Transfer, hand_exchange, pull_exchange, push_exchange

LIMIT = timedelta(minutes=9)


@dataclass(frozen=True)
class Turn:
    """Seconds of one step on one rank, wall clock and CPU, under one home."""

    copies: int
    wall: float
    cpu: float


def turns(ranks: int, hidden: int, layers: int, tokens: int, rounds: int) -> list[Turn]:
    """Train under both homes in turns; the first step under each is not counted."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4096,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    strategy = hg.Strategy.parse(f"{ranks}*<tp1,pp1>", layers)
    exe = hg.compile(model, strategy, lambda named: hg.AdamW(named, lr=1e-4), device="cpu", check="off")
    generator = torch.Generator().manual_seed(1)
    batch = [torch.randint(0, 4096, (tokens,), generator=generator) for _ in range(ranks)]
    found = []
    for turn in range(2 * rounds):
        copies = 1 + turn % 2
        exe.move(exe.world, hg.Home(copies=copies), range(ranks))
        for counted in (False, True):
            wall, cpu = time.perf_counter(), time.process_time()
            exe.step(batch)
            if counted:
                found.append(Turn(copies, time.perf_counter() - wall, time.process_time() - cpu))
    exe.close()
    return found


def links(ranks: int, hidden: int, layers: int, rounds: int) -> dict[tuple[int, str], list[float]]:
    """Pull and push what a step of data-parallel ranks does, under both homes in turns; return CPU seconds of each."""
    torch.set_num_threads(1)
    world = join()
    groups = Groups(world, LIMIT)
    buffers = Buffers(world.device)
    layer = 4 * hidden**2 + 3 * hidden * (hidden * 11 // 4)
    sizes = [4096 * hidden, *[layer] * layers, 4096 * hidden]
    found: dict[tuple[int, str], list[float]] = {}
    for turn in range(2 * (1 + rounds)):
        copies = 1 + turn % 2
        pulls, pushes = [], []
        for size in sizes:
            bucket, owners = Bucket("b", (Parameter("w", (size,)),), ("b",)), home(size, range(ranks), copies=copies)
            users = propagation(bucket, [(rank,) for rank in range(ranks)], {"w": GradientKind.PARTIAL})
            own = torch.ones(owners.local_size(world.rank))
            pulls.append((pull_exchange(owners, users, world.rank, ranks), own))
            handing = hand_exchange(owners, world.rank, ranks)
            pushes.append((push_exchange(users, owners, world.rank, ranks), torch.ones(size), own, handing))
        buffers.begin()
        for what in ("pull", "push"):
            groups.gather(None)
            began = time.process_time()
            if what == "pull":
                for finish in [Transfer(each, groups, buffers).pull(own, torch.float32) for each, own in pulls]:
                    buffers.give(finish())
            else:
                started = [Transfer(each, groups, buffers).push(sent, own, to) for each, sent, own, to in pushes]
                for finish in started:
                    finish()
            if turn > 1:
                found.setdefault((copies, what), []).append(time.process_time() - began)
    groups.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1000, help="of each rank")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--links", action="store_true", help="pulls and pushes alone")
    options = parser.parse_args(arguments)
    if options.links:
        shape = options.ranks, options.hidden, options.layers, options.rounds
        each = hg.launch(links, options.ranks, *shape, timeout=LIMIT)
        for copies, what in each[0]:
            sums = [sum(turn) for turn in zip(*(rank[copies, what] for rank in each), strict=True)]
            Console().print(f"copies {copies}: {what} {median(sums):.3f} CPU s of all ranks, at least {min(sums):.3f}")
        return
    by_rank = hg.launch(
        turns,
        options.ranks,
        options.ranks,
        options.hidden,
        options.layers,
        options.tokens,
        options.rounds,
        timeout=LIMIT,
    )
    table = Table(title=f"{options.ranks} ranks, {options.tokens} tokens each, hidden {options.hidden}")
    for name in ("copies", "step s", "CPU s of all ranks"):
        table.add_column(name, justify="right")
    walls, cpus = {}, {}
    for copies in (1, 2):
        together = [each for each in zip(*by_rank, strict=True) if each[0].copies == copies]
        walls[copies] = [max(turn.wall for turn in each) for each in together]
        cpus[copies] = [sum(turn.cpu for turn in each) for each in together]
        table.add_row(str(copies), f"{median(walls[copies]):.3f}", f"{median(cpus[copies]):.3f}")
    console = Console()
    console.print(table)
    # By pairs of turns, one right after the other: what else the machine does changes slowly.
    wall, cpu = (median(b / a for a, b in zip(x[1], x[2], strict=True)) - 1 for x in (walls, cpus))
    console.print(f"a second owner costs {wall:+.1%} of a step, {cpu:+.1%} of its CPU time; medians of pairs of turns")


if __name__ == "__main__":
    main()

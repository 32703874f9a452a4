"""What a training step costs beside plain PyTorch: both sides take turns in one run, and ratios of medians are printed.

    python benchmarks/step.py            # all tables
    python benchmarks/step.py one        # one rank against the eager Hugging Face model
    python benchmarks/step.py extremes   # the same with one sequence of 8K tokens, and with 2,000 of four
    python benchmarks/step.py ranks      # 2 and 4 local ranks over gloo against FSDP2 and DDP

All sides train the same Llama on the same packed sequences with the same attention operator and AdamW. CPU seconds
are of all threads of all ranks: on a busy machine they tell more than the wall clock.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend import huggingface
from hydragraph.frontend.packed_batch import pack
from hydragraph.frontend.packed_inputs import token_cross_entropy
from hydragraph.spec.workload import sequence_of

VOCABULARY = 4096
Step = Callable[[int], float]  # takes the round, returns the loss


@dataclass(frozen=True)
class Sizes:
    """A Llama's dimensions, and the tokens of one step; `length`: of every sequence, if they are equally long."""

    hidden: int
    layers: int
    tokens: int
    length: int | None = None

    def model(self) -> nn.Module:
        """Build it, the same on every call."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 128,
            vocab_size=VOCABULARY,
            num_hidden_layers=self.layers,
            max_position_embeddings=8192,
        )
        return LlamaForCausalLM(config)

    def sequences(self, turn: int) -> list[Tensor]:
        """Draw sequences of very different lengths that sum to `tokens`."""
        generator = torch.Generator().manual_seed(turn)
        if self.length is not None:
            drawn = torch.randint(0, VOCABULARY, (self.tokens,), generator=generator)
            return list(drawn.split(self.length))
        left, found = self.tokens, []
        while left:
            length = min(left, int(16 + 240 * torch.rand((), generator=generator) ** 3))
            length = left if left - length < 2 else length
            found.append(torch.randint(0, VOCABULARY, (length,), generator=generator))
            left -= length
        return found


class Model(Protocol):
    """What rivals train: a Llama, and the sequences of each step."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    def model(self) -> nn.Module:
        """Build it, the same on every call."""
        ...

    def sequences(self, turn: int) -> list[Tensor]:
        """Draw the sequences of a step."""
        ...


ONE = {512: Sizes(512, 4, 1024), 1024: Sizes(1024, 2, 512)}
EXTREMES = {"1 sequence of 8,192 tokens": Sizes(256, 2, 8192, 8192), "2,000 of 4": Sizes(256, 2, 8000, 4)}
SHARED = Sizes(512, 4, 2048)
STRATEGIES = {
    2: {
        "data parallel": "2*<tp1,pp1>",
        "data parallel, streamed": "2*<tp1,pp1>w",
        "tensor parallel 2": "<tp2,pp1>",
        "pipeline 2": "<tp1,pp2>",
    },
    4: {
        "data parallel": "4*<tp1,pp1>",
        "data parallel, streamed": "4*<tp1,pp1>w",
        "tensor parallel 2 x 2": "2*<tp2,pp1>",
        "pipeline 2 x 2": "2*<tp1,pp2>",
        "lopsided": "<[0,1]x3,[2]x1> + <tp1,pp1>",
    },
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer of every side."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def packed_batch(sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pack sequences as every side gets them."""
    return pack([sequence_of(s, i, causal=True) for i, s in enumerate(sequences)])


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], targets: float) -> float:
    """Train a plain (or wrapped) model on one packed batch; the loss is divided by `targets`."""
    loss = token_cross_entropy(huggingface.caller(model)(model, batch), batch) / targets
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def packed_model(sizes: Model) -> nn.Module:
    """Build the model with the attention operator that hydragraph gives it."""
    model = sizes.model()
    huggingface.use_packed_attention(model)
    return model


@dataclass(frozen=True)
class Timing:
    """Seconds of one step: wall clock, and CPU of all this process's threads."""

    wall: float
    cpu: float


def timed(step: Step, turn: int) -> Timing:
    """Run one step and time it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    step(turn)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return Timing(wall, after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime)


def alternate(sides: Mapping[str, Step], rounds: int) -> dict[str, list[Timing]]:
    """Run all sides in turn, in changing order, after two rounds of warming up."""
    found: dict[str, list[Timing]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(rounds + 2):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if dist.is_initialized():
                dist.barrier()
            timing = timed(sides[name], turn)
            if turn >= 2:
                found[name].append(timing)
    return found


# One rank.


def one_rank(sizes: Sizes, rounds: int) -> dict[str, list[Timing]]:
    """Time the eager model and ours on one rank."""
    eager = packed_model(sizes)
    optimizer = adamw(eager.parameters())
    exe = hg.compile(
        sizes.model(), hg.Strategy.parse("<tp1,pp1>", sizes.layers), optimizer=adamw, device="cpu", check="off"
    )

    def plain(turn: int) -> float:
        batch = packed_batch(sizes.sequences(turn))
        return eager_step(eager, optimizer, batch, int((batch["labels"] != -100).sum()))

    def ours(turn: int) -> float:
        return exe.step(sizes.sequences(turn)).loss

    try:
        assert abs(plain(-1) - ours(-1)) < 1e-4, "the two sides do not compute the same"
        return alternate({"eager": plain, "hydragraph": ours}, rounds)
    finally:
        exe.close()


# Several ranks.


def rivals(sizes: Model) -> dict[str, Step]:
    """Return FSDP2's and DDP's steps on the ranks that this is called on; a step's losses average to the global one."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    ranks, rank = dist.get_world_size(), dist.get_rank()

    def share(turn: int) -> tuple[dict[str, Tensor], float]:
        """Return this rank's part, as balanced as longest-first makes it, and the targets per rank."""
        from hydragraph.planner.quick_plan import assign as assign_longest_first

        sequences = sizes.sequences(turn)
        strategy = hg.Strategy.parse(f"{ranks}*<tp1,pp1>", sizes.layers)
        mine = assign_longest_first(strategy, [len(s) for s in sequences]).micro_batches[rank]
        targets = sum(len(s) - 1 for s in sequences)
        return packed_batch([sequences[i] for m in mine for i in m]), targets / ranks  # both average over ranks

    def baseline(wrap: Callable[[nn.Module], nn.Module]) -> Step:
        model = wrap(packed_model(sizes))
        optimizer = adamw(model.parameters())
        return lambda turn: eager_step(model, optimizer, *share(turn))

    def sharded(model: nn.Module) -> nn.Module:
        mesh = dist.init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return {"FSDP2": baseline(sharded), "DDP": baseline(DistributedDataParallel)}


def on_ranks(sizes: Sizes, rounds: int) -> dict[str, list[Timing]]:
    """Time FSDP2, DDP and hydragraph's strategies on the ranks that this is called on, all alive together."""
    warnings.filterwarnings("ignore")
    sides, executables = rivals(sizes), []
    for name, text in STRATEGIES[dist.get_world_size()].items():
        strategy = hg.Strategy.parse(text, sizes.layers)
        exe = hg.compile(sizes.model(), strategy, optimizer=adamw, device="cpu", check="off")
        executables.append(exe)
        sides[name] = lambda turn, exe=exe: exe.step(sizes.sequences(turn)).loss
    found = alternate(sides, rounds)
    for exe in executables:
        exe.close()
    return found


def summed(per_rank: Sequence[Mapping[str, Sequence[Timing]]]) -> dict[str, list[Timing]]:
    """Join the ranks' times: the longest wall clock, the sum of CPU seconds."""
    return {
        name: [Timing(max(t.wall for t in each), sum(t.cpu for t in each)) for each in zip(*times, strict=True)]
        for name in per_rank[0]
        if (times := [rank[name] for rank in per_rank])
    }


# Printing.


def medians(timings: Sequence[Timing]) -> Timing:
    """Return the medians."""
    return Timing(statistics.median(t.wall for t in timings), statistics.median(t.cpu for t in timings))


def table(title: str, found: Mapping[str, Sequence[Timing]], against: Sequence[str]) -> Table:
    """Return medians and, for each of `against`, the ratio of CPU and wall seconds to it."""
    shown = Table(title=title, title_justify="left")
    for heading in ("", "wall ms", "CPU ms", *(f"{kind} / {name}" for name in against for kind in ("CPU", "wall"))):
        shown.add_column(heading, justify="left" if not heading else "right")
    for name, timings in found.items():
        own = medians(timings)
        ratios = []
        for other in against:
            base = medians(found[other])
            ratios += [f"{own.cpu / base.cpu:.3f}", f"{own.wall / base.wall:.3f}"]
        shown.add_row(name, f"{own.wall * 1e3:.1f}", f"{own.cpu * 1e3:.1f}", *ratios)
    return shown


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=["one", "extremes", "ranks", []], default=[])
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    console = Console(width=140)
    wanted = chosen.tables or ["one", "extremes", "ranks"]
    if "one" in wanted:
        for hidden, sizes in ONE.items():
            title = f"one rank, hidden {hidden}, {sizes.layers} layers, {sizes.tokens} tokens, {chosen.rounds} rounds"
            console.print(table(title, one_rank(sizes, chosen.rounds), ["eager"]))
    if "extremes" in wanted:
        rounds = max(3, chosen.rounds // 3)
        for name, sizes in EXTREMES.items():
            title = f"one rank, hidden {sizes.hidden}, {sizes.layers} layers, {name}, {rounds} rounds"
            console.print(table(title, one_rank(sizes, rounds), ["eager"]))
    if "ranks" in wanted:
        for ranks in STRATEGIES:
            found = summed(hg.launch(on_ranks, ranks, SHARED, chosen.rounds, timeout=timedelta(minutes=20)))
            title = f"{ranks} ranks over gloo, hidden {SHARED.hidden}, {SHARED.layers} layers, {SHARED.tokens} tokens"
            console.print(table(title, found, ["FSDP2", "DDP"]))


if __name__ == "__main__":
    main()

"""Measured and expected memory of a rank, and the bytes that it sends: full fine-tuning, then LoRA by `peft`.

    python benchmarks/memory.py                     # 2 and 4 local ranks over gloo
    python benchmarks/memory.py --ranks 2 --dtype bfloat16

The expected value is that of `hydragraph check`: the home state (16 bytes per parameter over the ranks: weight,
gradient, AdamW's moments; 4 where it is frozen) plus the weights, gradients, activations and messages of the strategy
(`hydragraph.cost.rank_memory`), with messages that end when a simulation ends them. The measured value counts every
storage that a tensor operator made, for as long as it lives. The table shows the rank with the largest difference, next
to the same walk with messages that end when they did (`walk`), and to two bounds: without any messages, and with all
messages for as long as they may take. Pulled and pushed bytes are the weights and gradients that all ranks together
send to others in one step. The exit code is 1 where a rank is off by more than 10 %, or its walk by more than 1 %.

Another table compares data parallelism with FSDP2, which gathers each layer's weights before its forward and again
before its backward, as streaming does. Both sides train on the same micro-batch per rank, and their bytes are counted
alike.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import hydragraph as hg
from benchmarks.step import rivals
from hydragraph.cost.compiled_blocks import CompiledBlocks, VariantOf
from hydragraph.cost.datasheet import datasheet
from hydragraph.cost.footprint import MicroBatch
from hydragraph.cost.rank_memory import Memory, MemoryWalk, exchange_name
from hydragraph.cost.traffic_bytes import HomeTraffic
from hydragraph.frontend.mini_batch import token_multiple
from hydragraph.frontend.packed_batch import padding
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.instruction import Instruction, Op, Stream
from hydragraph.ir.value import Value
from hydragraph.planner.quick_plan import assign
from hydragraph.report.memory_fit import MemoryFit, fit
from hydragraph.runtime import executor
from hydragraph.runtime.exchange import Exchange
from hydragraph.runtime.host_copies import HostCopy, copy_to_host
from hydragraph.spec.default_cluster import default_cluster

VOCABULARY = 4096
STEPS = 3
GOAL = 0.1  # of difference between what check says and what is measured
WALK_GOAL = 0.01  # the same, where messages end when they did
STRATEGIES = {
    2: {
        "data parallel": "2*<tp1,pp1>",
        "data parallel, streamed": "2*<tp1,pp1>w",
        "data parallel, offloaded": "2*<tp1,pp1>o",
        "tensor parallel 2": "<tp2,pp1>",
        "sequence parallel 2": "<[0,1]x6s>",
        "pipeline 2": "<tp1,pp2>",
        "pipeline 2, recomputed": "<[0]x3r,[1]x3r>",
        "pipeline 2, recomputed in part": "<tp1,pp2>r0.5",
        "sequence parallel 2, recomputed in part": "<tp2,pp1>sr0.3",
        "lopsided": "<[0]x4,[1]x2>",
    },
    4: {
        "data parallel": "4*<tp1,pp1>",
        "data parallel, streamed": "4*<tp1,pp1>w",
        "tensor parallel 2 x 2": "2*<tp2,pp1>",
        "pipeline 2 x 2": "2*<tp1,pp2>",
        "lopsided": "<[0,1]x4,[2]x2> + <[3]x6>",
        "lopsided, recomputed": "<[0,1]x4sr,[2]x2> + <[3]x6r>",
    },
}


@dataclass(frozen=True)
class Sizes:
    """A Llama's dimensions, and the lengths of one step's sequences."""

    hidden: int = 256
    layers: int = 6
    vocabulary: int = VOCABULARY
    lengths: tuple[int, ...] = (700, 500, 400, 300, 200, 200, 100, 100, 60, 60, 40, 40)
    lora: int = 0
    device: str = "meta"

    def model(self) -> nn.Module:
        """Build it: on the device, or with adapters of rank `lora` on every linear layer, on the CPU."""
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_attention_heads=self.hidden // 32,
            num_key_value_heads=self.hidden // 64,
            vocab_size=self.vocabulary,
            num_hidden_layers=self.layers,
            max_position_embeddings=2048,
        )
        if not self.lora:
            torch.manual_seed(0)
            with torch.device(self.device):
                return LlamaForCausalLM(config)
        import peft

        torch.manual_seed(0)
        adapters = peft.LoraConfig(r=self.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(LlamaForCausalLM(config), adapters)

    def sequences(self, turn: int) -> list[Tensor]:
        """Draw one step's sequences."""
        generator = torch.Generator().manual_seed(turn)
        return [torch.randint(0, self.vocabulary, (n,), generator=generator) for n in self.lengths]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all CPU storages that are alive: those there were, and those that operators make inside.

    Args:
        resized: storages change their size, as FSDP2 empties them: they are counted anew after every operator.

    Attributes:
        live, peak: bytes, now and at most.
    """

    def __init__(self, resized: bool = False) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._resized = resized
        self._known: dict[int, weakref.ref[Any]] = {}
        gc.collect()
        for found in gc.get_objects():
            if issubclass(type(found), Tensor):
                self._add(found)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and count what it made."""
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            self._add(leaf)
        if self._resized:
            found = (reference() for reference in self._known.values())
            self.peak = max(self.peak, sum(storage.nbytes() for storage in found if storage is not None))
        return made

    def _add(self, value: object) -> None:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or is_lazy(value):
            return
        if value.device.type != "cpu":
            return
        storage = value.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        if not self._resized:
            self.peak = max(self.peak, self.live)


@dataclass(frozen=True)
class Measured:
    """One rank's peak of live bytes, what is expected of the strategy alone, and together with all its messages.

    Attributes:
        checked: what `hydragraph check` says.
        walked: expected with messages that end when they did.
        pulled, pushed: bytes of weights and of gradients that it sends to other ranks in one step.
    """

    peak: int
    checked: Memory
    walked: Memory
    expected: Memory
    at_most: Memory
    pulled: int
    pushed: int

    @property
    def difference(self) -> float:
        """Relative excess of the checked over the measured bytes."""
        return self.checked.total / self.peak - 1

    @property
    def walk_difference(self) -> float:
        """Relative excess of the walked over the measured bytes."""
        return self.walked.total / self.peak - 1


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def ready(sizes: Sizes, texts: Sequence[str], dtype: torch.dtype = torch.float32) -> tuple[hg.Program, object]:
    """Capture the model and compile it for strategies, before ranks are forked."""
    program = hg.capture(sizes.model(), dtype=dtype, check="off")
    return program, hg.precompile(program, [hg.Strategy.parse(text, sizes.layers) for text in texts])


def measure(prepared: tuple[hg.Program, object], sizes: Sizes, text: str, home: hg.Home | None = None) -> Measured:
    """Train on every rank and watch its memory."""
    strategy = hg.Strategy.parse(text, sizes.layers)
    exe = hg.compile(sizes.model(), strategy, optimizer=adamw, device="cpu", program=prepared[0], home=home)
    home = exe._session.owners.home
    compiled, batches = exe._session.preparer._variants.get, micro_batches(strategy, sizes.lengths)  # compiled already
    blocks = CompiledBlocks(exe.program, compiled)
    traffic = HomeTraffic(blocks.buckets, HomeLayouts(home, exe.ranks).of)
    walk = partial(MemoryWalk, blocks, strategy, batches, exe.rank, exe.ranks, traffic=traffic)
    live = LiveBytes()
    ended = []
    with live, mock.patch.object(executor, "copy_to_host", unseen_copy):
        for turn in range(STEPS):
            with ends_of(exe._session.executor) as over:
                exe.step(sizes.sequences(turn))
            ended.append(over)
            if turn == 0:
                live.peak = live.live  # without the initialisation of the model
    expected, at_most = (walk(messages=messages).peak() for messages in (False, True))
    walked = max((walk(over=over).peak() for over in ended[1:]), key=lambda memory: memory.total)
    checked = check(exe.program, strategy, compiled, exe.ranks, sizes.lengths, home).memory[exe.rank]
    exe.close()
    links = exe._session.preparer.get(*exe._ran[exe._communications])
    pulled, pushed = (sum(sent(each, exe.rank) for each in both.values()) for both in (links.pulls, links.pushes))
    return Measured(live.peak, checked, walked, expected, at_most, pulled * exe.program.dtype.itemsize, pushed * 4)


@contextmanager
def ends_of(runs: executor.Executor) -> Iterator[dict[int, list[str]]]:
    """Yield the exchanges that a step ends without having to wait, by the index of an instruction (`MemoryWalk`)."""
    over: dict[int, list[str]] = {}
    now, end = -1, executor.Executor._end

    def begin(_: Instruction) -> None:
        nonlocal now
        now += 1

    def note(it: Any, stream: Stream, under_way: Any, value: Value) -> None:
        over.setdefault(now, []).append(exchange_name(Op.PULL if stream is Stream.PULL else Op.PUSH, value.exchange))
        end(it, stream, under_way, value)

    runs.before = begin
    with mock.patch.object(executor.Executor, "_end", staticmethod(note)):
        yield over
    runs.before = None


def unseen_copy(*given: Any) -> HostCopy:
    """Copy saved tensors to host memory, which is not the device's, although both are the CPU's here."""
    with _disable_current_modes():
        return copy_to_host(*given)


def nothing() -> None:
    """Prepare nothing: FSDP2 captures no program."""


def rival(_: object, sizes: Sizes) -> int:
    """Train by FSDP2 on every rank, and return its peak of live bytes."""
    step = rivals(replace(sizes, device="cpu"))["FSDP2"]
    live = LiveBytes(resized=True)
    with live:
        for turn in range(STEPS):
            step(turn)
    return live.peak


def check(
    program: hg.Program,
    strategy: hg.Strategy,
    compiled: VariantOf,
    ranks: int,
    lengths: Sequence[int],
    home: hg.Home | None,
) -> MemoryFit:
    """Return what `hydragraph check` finds, of a cluster like its default."""
    where = default_cluster(ranks)
    degrees = sorted({stage.tp for pipeline in strategy.pipelines for stage in pipeline.stages})
    blocks = CompiledBlocks(program, compiled)
    costs = hg.Costs(datasheet(program, where, degrees=degrees), where, home=home, blocks=blocks)
    return fit(costs, strategy, assign(strategy, lengths))


def sent(exchange: Exchange, rank: int) -> int:
    """Return the elements that a rank sends to others."""
    return sum(exchange.sent) - exchange.sent[rank]


def micro_batches(strategy: hg.Strategy, lengths: Sequence[int]) -> list[list[MicroBatch]]:
    """Return the micro-batches that a step makes of sequences of such lengths, by pipeline."""
    found = []
    for pipeline, chosen in zip(strategy.pipelines, assign(strategy, lengths).micro_batches, strict=True):
        each = [[lengths[i] for i in micro_batch] for micro_batch in chosen]
        blanks = [padding(one, token_multiple(pipeline)) for one in each]
        found.append([MicroBatch(sum(one) + b, len(one) + bool(b)) for one, b in zip(each, blanks, strict=True)])
    return found


# Printing.


def table(title: str, found: Mapping[str, Sequence[Measured]]) -> Table:
    """Return, for each strategy, the rank that differs most."""
    shown = Table(title=title, title_justify="left")
    home = ("home_weights", "optimizer_state", "home_gradients")
    parts = (*home, "weights", "gradients", "activations", "working", "messages")
    headings = ("expected", "measured", "difference", "walk", "no messages", "all messages", "pulled", "pushed")
    for heading in ("MB", "rank", *parts, *headings):
        shown.add_column(heading, justify="left" if heading == "MB" else "right")
    for name, per_rank in found.items():
        rank = max(range(len(per_rank)), key=lambda r: abs(per_rank[r].difference))
        worst = per_rank[rank]
        values = [getattr(worst.checked, part) for part in parts] + [worst.checked.total, worst.peak]
        numbers = [f"{value / 1e6:.2f}" for value in values]
        walks = (worst.walked, worst.expected, worst.at_most)
        bounds = (f"{each.total / worst.peak - 1:+.1%}" for each in walks)
        moved = (f"{sum(getattr(m, what) for m in per_rank) / 1e6:.2f}" for what in ("pulled", "pushed"))
        shown.add_row(name, str(rank), *numbers, f"{worst.difference:+.1%}", *bounds, *moved)
    return shown


def beside_fsdp2(title: str, found: Mapping[str, Sequence[Measured]], peaks: Sequence[int]) -> Table:
    """Return the peaks of the fullest ranks, and their ratios."""
    shown = Table(title=title, title_justify="left")
    for heading in ("", "MB", "of FSDP2's"):
        shown.add_column(heading, justify="right" if heading else "left")
    shown.add_row("FSDP2", f"{max(peaks) / 1e6:.2f}", "")
    for name in ("data parallel", "data parallel, streamed"):
        peak = max(each.peak for each in found[name])
        shown.add_row(name, f"{peak / 1e6:.2f}", f"{peak / max(peaks):.2f}")
    return shown


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", choices=sorted(STRATEGIES), default=sorted(STRATEGIES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--hidden", type=int, default=Sizes.hidden)
    parser.add_argument(
        "--home", default="equal", help="shares of the state by rank, for one number of --ranks: 3,1,0,2"
    )
    parser.add_argument("--lora", type=int, default=8, help="rank of the adapters; 0: full fine-tuning only")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    limit, dtype = timedelta(minutes=10), getattr(torch, chosen.dtype)
    home = hg.Home.parse(chosen.home)
    every: list[Measured] = []
    for ranks, lora in itertools.product(chosen.ranks, (0, chosen.lora) if chosen.lora else (0,)):
        sizes = Sizes(hidden=chosen.hidden, lora=lora)
        prepare = partial(ready, sizes, list(STRATEGIES[ranks].values()), dtype)
        found = {
            n: hg.launch(measure, ranks, sizes, s, home, timeout=limit, prepare=prepare)
            for n, s in STRATEGIES[ranks].items()
        }
        what = f"LoRA of rank {lora}" if lora else "all parameters"
        shape = (
            f"hidden {sizes.hidden}, {sizes.layers} layers, {sum(sizes.lengths)} tokens, {chosen.dtype}, home {home}"
        )
        title = f"{ranks} ranks, {what}: {shape}"
        Console(width=190).print(table(title, found))
        if not lora and chosen.dtype == "float32" and home == hg.Home():
            peaks = hg.launch(rival, ranks, sizes, timeout=limit, prepare=nothing)
            Console(width=190).print(beside_fsdp2(f"{ranks} ranks, beside FSDP2: {shape}", found, peaks))
        every += [one for per_rank in found.values() for one in per_rank]
    checked = max(abs(one.difference) for one in every)
    walked = max(abs(one.walk_difference) for one in every)
    print(f"{len(every)} ranks: check is off by {checked:.1%} at most, the walk by {walked:.1%}")
    sys.exit(int(checked > GOAL or walked > WALK_GOAL))


if __name__ == "__main__":
    main()

"""Two ways of profiling stages, in turn on the same layers: AutoHet's, by powers of two, and ours, per block.

    python benchmarks/profiles.py                # one rank of one thread; some minutes of CPU
    python benchmarks/profiles.py --layers 24

AutoHet measures stages of 1, 2, 4, ... layers and adds them up (its equation 5, `Powers`). We measure one block,
in a chain of `CHAIN` as a stage would run it, and fit what lengths change (`runtime.profile_fitting`). Both are
compared with measured stages of every other number of layers. Ours is also compared for micro-batches that it did not
measure, which equation 5 can predict only after another measurement. Times are CPU times of this process, so other
processes do not affect them.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean, median

import torch
from rich.console import Console
from rich.table import Table

import hydragraph as hg
from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.launch import join
from hydragraph.cost.block_pieces import PricedDevice
from hydragraph.errors import Unsupported
from hydragraph.frontend.meta_initialiser import initial_buffers
from hydragraph.runtime.profile_fitting import Lengths, fit_work, micro_batches, token_counts
from hydragraph.runtime.profile_measurement import CHAIN, Bench, DevicePlace, MeasuredModel
from hydragraph.spec.stage_kind import StageKind

ROUNDS = 5
LONGEST = 512  # tokens of the longest micro-batch that is measured
POINTS = 4  # numbers of tokens
UNSEEN: tuple[Lengths, ...] = ((96,), (300,), (200, 100, 40))
LIMIT = timedelta(minutes=10)


@dataclass(frozen=True)
class Powers:
    """Seconds of stages of 1, 2, 4, ... layers, for one micro-batch.

    T(n layers) = sum over the binary digits of n of T(2^i layers)    (AutoHet, equation 5)

    Example: 1, 2 and 4 layers take 1.1, 2.0 and 3.9 s. Five layers are 4 + 1: 5.0 s; seven are 4 + 2 + 1: 7.0 s.
    """

    measured: tuple[float, ...]

    def seconds(self, layers: int) -> float:
        """Return the seconds of a stage of `layers` layers.

        Raises:
            Unsupported: a required power of two was not measured.
        """
        if layers.bit_length() > len(self.measured):
            raise Unsupported(
                f"a stage of {layers} layers",
                where="profile by powers of two",
                remedy=f"measure stages of up to {1 << (layers.bit_length() - 1)} layers: {powers_to(layers)}",
            )
        return sum(seconds for i, seconds in enumerate(self.measured) if layers >> i & 1)


def powers_to(layers: int) -> tuple[int, ...]:
    """Return the numbers of layers to measure for stages of up to `layers` layers."""
    return tuple(1 << i for i in range(layers.bit_length()))


@dataclass(frozen=True)
class Errors:
    """How far a way's predictions are off measured stages: the relative errors, and what measuring took."""

    name: str
    seen: tuple[float, ...]
    unseen: tuple[float, ...]
    spent_s: float


def errors(hidden: int, layers: int, rounds: int) -> tuple[Errors, Errors]:
    """Profile in both ways, in turn, and hold both against measured stages; first Eq. 5's, then ours."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    model = _model(hidden, layers)
    program = hg.capture(model, check="off")
    groups = Groups(join("cpu"), LIMIT)
    subject = MeasuredModel(program, initial_buffers(model), 257, 2048)
    device = PricedDevice("here", math.inf, program.dtype.itemsize)
    bench = Bench(subject, StageKind(1), groups, [DevicePlace("", "")], device, time.process_time)
    runs = [bench.block_run(program.blocks[1]) for _ in range(layers)]

    def timed(count: int, row: Lengths) -> float:
        """Return the seconds of a stage of `count` layers, which are all equal."""
        return count * sum(bench.time(runs[:count], row))

    rows = micro_batches(token_counts(LONGEST, 4, POINTS, span=16))
    counts = powers_to(layers)
    others = [n for n in range(1, layers + 1) if n not in counts]
    spent = [0.0, 0.0]
    by_powers: dict[tuple[int, Lengths], list[float]] = {}
    by_block: dict[Lengths, list[float]] = {}
    stages: dict[tuple[int, Lengths], list[float]] = {}
    for turn in range(rounds + 1):
        for row in (*rows, *UNSEEN):
            if row in rows:
                began = time.process_time()
                powers = {(n, row): timed(n, row) for n in counts}
                between = time.process_time()
                block = timed(min(CHAIN, layers), row) / min(CHAIN, layers)
                ended = time.process_time()
            truth = {(n, row): timed(n, row) for n in others}
            if not turn:  # memory is got in the first round
                continue
            if row in rows:
                spent[0] += between - began
                spent[1] += ended - between
                for key, seconds in powers.items():
                    by_powers.setdefault(key, []).append(seconds)
                by_block.setdefault(row, []).append(block)
            for key, seconds in truth.items():
                stages.setdefault(key, []).append(seconds)
    groups.close()
    measured = {key: median(each) for key, each in stages.items()}
    fit = fit_work(rows, [median(by_block[row]) for row in rows]).constants
    powers_of = {row: Powers(tuple(median(by_powers[n, row]) for n in counts)) for row in rows}

    def ours(n: int, row: Lengths) -> float:
        return n * (sum((fit.a * each + fit.b) * each for each in row) + fit.c)

    return (
        Errors(
            "powers of two (AutoHet, equation 5)",
            tuple(powers_of[row].seconds(n) / seconds - 1 for (n, row), seconds in measured.items() if row in rows),
            (),
            spent[0],
        ),
        Errors(
            "per block, fitted over lengths (ours)",
            tuple(ours(n, row) / seconds - 1 for (n, row), seconds in measured.items() if row in rows),
            tuple(ours(n, row) / seconds - 1 for (n, row), seconds in measured.items() if row in UNSEEN),
            spent[1],
        ),
    )


def _model(hidden: int, layers: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 32,
            vocab_size=257,
            num_hidden_layers=layers,
            max_position_embeddings=2048,
        )
    )


def print_profiles(hidden: int = 128, layers: int = 12, rounds: int = ROUNDS) -> None:
    """Print both ways' errors and what they took."""
    found = errors(hidden, layers, rounds)
    title = f"profiles of stages of up to {layers} layers, hidden {hidden}, beside measured ones; {rounds} rounds"
    table = Table(title=title, title_justify="left")
    for heading in ("profile", "mean error", "worst", "mean, other lengths", "worst", "CPU s", "ratio"):
        table.add_column(heading, justify="left" if heading == "profile" else "right")
    for each in found:
        table.add_row(
            each.name,
            *_of(each.seen),
            *(_of(each.unseen) if each.unseen else ("not measured", "")),
            f"{each.spent_s:.1f}",
            f"{each.spent_s / found[1].spent_s:.2f}",
        )
    Console(width=150, highlight=False).print(table)


def _of(relative: Sequence[float]) -> tuple[str, str]:
    sizes = [abs(each) for each in relative]
    return f"{fmean(sizes):.1%}", f"{max(sizes):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    print_profiles(given.hidden, given.layers, given.rounds)


if __name__ == "__main__":
    main()

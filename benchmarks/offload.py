"""Offloaded activations on one device: python benchmarks/offload.py [--tokens 32768] [--hidden 2048] [--layers 22]

Trains a Llama on one sequence per step, without offloading and with it, and prints the seconds of a step, the peak of
allocated memory, both as predicted, and whether the gradients of both are equal to the bit. On a machine without a GPU
it trains a small model, and only the last column means something.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import hydragraph as hg
from benchmarks.memory import Sizes, adamw, check

PAIRS = (("<tp1,pp1>", "<tp1,pp1>o"), ("<tp1,pp1>r0.5", "<tp1,pp1>r0.5o"), ("<tp1,pp1>r", "<tp1,pp1>ro"))
STEPS = 3  # after one to warm up


@dataclass(frozen=True)
class Found:
    """Measured and predicted seconds and peak bytes of a strategy, and the gradients of its first mini-batch."""

    seconds: float
    peak: int
    predicted_s: float
    predicted_peak: int
    host: int
    gradients: dict[str, Tensor]


def measure(program: hg.Program, sizes: Sizes, text: str, device: str) -> Found:
    """Train under a strategy."""
    strategy = hg.Strategy.parse(text, sizes.layers)
    exe = hg.compile(sizes.model(), strategy, optimizer=adamw, device=device, program=program)
    gradients = exe.gradients(sizes.sequences(0))
    exe.step(sizes.sequences(0))
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for turn in range(STEPS):
        exe.step(sizes.sequences(turn))
    seconds = (time.perf_counter() - began) / STEPS
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    expected = check(program, strategy, exe._session.preparer._variants.get, 1, sizes.lengths, None)
    exe.close()
    memory = expected.memory[0]
    return Found(seconds, peak, expected.seconds, memory.total, memory.host, gradients)


def main() -> None:
    """Print the table."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768 if gpu else 512)
    parser.add_argument("--hidden", type=int, default=2048 if gpu else 128)
    parser.add_argument("--layers", type=int, default=22 if gpu else 6)
    chosen = parser.parse_args()
    sizes = Sizes(chosen.hidden, chosen.layers, lengths=(chosen.tokens,), device="cpu")
    dtype, device = (torch.bfloat16, "cuda") if gpu else (torch.float32, "cpu")
    program = hg.capture(replace(sizes, device="meta").model(), dtype=dtype, check="off")
    table = Table(title=f"{chosen.tokens} tokens, hidden {chosen.hidden}, {chosen.layers} layers, {dtype}, {device}")
    for heading in ("strategy", "a step takes", "predicted", "peak", "predicted", "on the host", "gradients"):
        table.add_column(heading)
    for pair in PAIRS:
        found = [measure(program, sizes, text, device) for text in pair]
        plain = found[0].gradients
        for text, one in zip(pair, found, strict=True):
            unequal = sum(not torch.equal(plain[name], one.gradients[name]) for name in plain)
            memory = (f"{size / 1e9:.3f} GB" for size in (one.peak, one.predicted_peak, one.host))
            seconds = (f"{1e3 * s:.1f} ms" for s in (one.seconds, one.predicted_s))
            table.add_row(text, *seconds, *memory, f"{unequal} differ" if unequal else "equal to the bit")
    Console(width=150).print(table)


if __name__ == "__main__":
    main()

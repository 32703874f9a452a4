"""What deterministic training costs: python benchmarks/deterministic.py [--repeats 5]

CPU seconds of a step, of all ranks together, with `deterministic` and without, alternately in one process each: a busy
machine slows both. Sequences of several lengths, since short ones are packed otherwise.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg

STRATEGY = "<tp1,pp2> + 2*<tp1,pp1>"
RANKS = 4
TOKENS = 4096  # of a mini-batch


def model() -> LlamaForCausalLM:
    """Return a Llama of 7.6 million parameters."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=1024,
        )
    )


def measured(lengths: Sequence[int], repeats: int) -> list[tuple[list[float], list[float]]]:
    """Return for each length CPU seconds of this rank's steps, plain and deterministic, as they alternated."""
    torch.set_num_threads(1)
    ways = [
        hg.compile(
            model(), STRATEGY, lambda named: hg.AdamW(named, lr=1e-4), 1.0, check="off", deterministic=deterministic
        )
        for deterministic in (False, True)
    ]
    found = []
    for length in lengths:
        batch = [
            torch.randint(2048, (length,), generator=torch.Generator().manual_seed(i)) for i in range(TOKENS // length)
        ]
        seconds: tuple[list[float], list[float]] = [], []
        for repeat in range(repeats + 1):
            for exe, taken in zip(ways, seconds, strict=True):
                began = time.process_time()
                exe.step(batch)
                if repeat:  # the first prepares
                    taken.append(time.process_time() - began)
        found.append(seconds)
    for exe in ways:
        exe.close()
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    given = parser.parse_args()
    load = os.getloadavg()[0]
    ranks = hg.launch(measured, RANKS, given.lengths, given.repeats)
    table = Table(title=f"CPU seconds of a step, {RANKS} ranks, {STRATEGY}, {TOKENS} tokens; load {load:.0f}")
    for name in ("tokens of a sequence", "plain", "deterministic", ""):
        table.add_column(name, justify="right")
    for i, length in enumerate(given.lengths):
        plain, exact = (median(map(sum, zip(*(rank[i][way] for rank in ranks), strict=True))) for way in (0, 1))
        table.add_row(str(length), f"{plain:.2f}", f"{exact:.2f}", f"{exact / plain - 1:+.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()

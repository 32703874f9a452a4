"""Two bf16 steps of a small Llama on a GPU, eager and compiled, against the CPU: python benchmarks/smoke.py

The first question on new hardware: does a step run there, and are its numbers right? Takes about 20 seconds.
`--device cpu` compares the CPU with itself, which proves this program.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run by its path, this file knows only its own folder

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hydragraph as hg
from hydragraph.commands.bench.bench_table import BenchReport

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}
TOLERANCE = {"loss": 0.01, "gradient norm": 0.05}  # relative; bf16 products differ by the order of their sums
COLUMNS = ("device", "backend", "first loss", "second loss", "gradient norm", "seconds to the first step")


def main() -> None:
    """Run the steps, print a row as soon as it is measured, and exit with 1 where a number is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--backends", nargs="+", default=["eager", "inductor"])
    parser.add_argument("--json", type=Path, help="write the same as data, row by row")
    chosen = parser.parse_args()
    expected = row("cpu", "eager")
    rows, wrong = [expected], list[str]()
    for backend in chosen.backends:
        rows.append(row(chosen.device, backend))
        wrong += differences(rows[-1], expected)
        if chosen.json is not None:
            report(rows, wrong).save(chosen.json)
    for each in rows:
        print(*each, sep="  ")
    for what in wrong:
        print(f"smoke: {what}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


def row(device: str, backend: str) -> tuple[str, str, float, float, float, float]:
    """Take two steps; return what they gave."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator) for n in (200, 33, 90)]
    began = time.perf_counter()
    exe = hg.compile(
        model,
        hg.Strategy.parse("<tp1,pp1>", SIZES["num_hidden_layers"]),
        lambda named: torch.optim.AdamW(named, lr=1e-3),
        dtype=torch.bfloat16,
        device=device,
        backend=backend,
        check="off",
        max_grad_norm=1.0,
    )
    try:
        first = exe.step(data)
        took = time.perf_counter() - began
        second = exe.step(data)
    finally:
        exe.close()
    return device, backend, first.loss, second.loss, first.grad_norm, took


def differences(found: tuple, expected: tuple) -> Iterator[str]:
    """Say which numbers of a row differ from those of the CPU by more than bf16 explains."""
    for name, column in (("loss", 2), ("loss", 3), ("gradient norm", 4)):
        error = abs(found[column] - expected[column]) / abs(expected[column])
        if not error <= TOLERANCE[name]:
            yield (
                f"{COLUMNS[column]} of {found[0]}, {found[1]}: {found[column]:.6g}, and {expected[column]:.6g} on the "
                f"CPU ({error:.1e} apart, at most {TOLERANCE[name]:g})"
            )


def report(rows: list, wrong: list[str]) -> BenchReport:
    """Return the rows as a section of the page that gpu.sh writes."""
    notes = wrong or ["The numbers of every row agree with the CPU's."]
    return BenchReport("Two bf16 steps of a small Llama", COLUMNS, tuple(rows), tuple(notes), (), (), (), "")


if __name__ == "__main__":
    main()

"""How fast each kernel is beside other ways to compute the same, and beside a ceiling measured in the same run.

    python benchmarks/kernels.py                        # all kernels, sizes fit for the device
    python benchmarks/kernels.py slice_copy adamw       # some
    python benchmarks/kernels.py --csv results.csv

Memory-bound kernels are compared with the bandwidth of one large `copy_`, the others with one large matrix product in
the same dtype. Causal attention counts half of every sequence's square; its backward 2.5 times its forward. Medians
over rounds; all sides compute in turn, and each result is checked against the first side's before it is timed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels import adamw, linear_cross_entropy, slice_copy
from hydragraph.kernels.varlen_attention import varlen_attention

ROUNDS = 7
BACKENDS = {"cuda": ("torch", "triton", "flash_attn"), "cpu": ("loop",)}


@dataclass(frozen=True)
class Case:
    """One computation at one size.

    Attributes:
        kernel, size: what the table shows.
        work: bytes moved, or floating point operations.
        bound: "memory" or "products".
        sides: how it can be computed -> call that returns what it computed; the first is the reference.
    """

    kernel: str
    size: str
    work: float
    bound: str
    sides: dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Row:
    """One measured line: work per second in GB/s or TFLOP/s, and percent of the ceiling."""

    kernel: str
    size: str
    side: str
    milliseconds: float
    rate: float
    percent: float
    peak_megabytes: float


def main() -> None:
    """Measure what the arguments name and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--csv", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.kernels if name not in CASES]:
        parser.error(f"no kernel {unknown[0]!r}: use some of {', '.join(CASES)}")
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ceilings = {"memory": copy_bandwidth(device), "products": product_rate(device, dtype)}
    copy, product = ceilings["memory"] / 1e9, ceilings["products"] / 1e12
    print(f"ceilings: copy {copy:.1f} GB/s, {dtype} products {product:.2f} TFLOP/s")
    cases = (case for name in arguments.kernels or CASES for case in CASES[name](device, dtype))
    rows = [row for case in cases for row in measure(case, device, ceilings[case.bound])]
    show(rows)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Row.__dataclass_fields__)
            writer.writerows(vars(row).values() for row in rows)


def measure(case: Case, device: torch.device, ceiling: float) -> Iterator[Row]:
    """Check every side against the first, then time them in turn."""
    expected = next(iter(case.sides.values()))()
    kept: dict[str, Callable[[], Tensor]] = {}
    for side, call in case.sides.items():
        try:
            found = call()
        except Unsupported as error:
            print(f"{case.kernel} {case.size}: no {side}: {error}")
            continue
        error = float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))
        if not error < 2e-2:
            raise AssertionError(
                f"{case.kernel} {case.size}: {side} differs from {next(iter(case.sides))} by {error:.1e}"
            )
        kept[side] = call
    times: dict[str, list[float]] = {side: [] for side in kept}
    for _ in range(ROUNDS):
        for side, call in kept.items():
            times[side].append(seconds(call, device))
    scale = 1e9 if case.bound == "memory" else 1e12
    for side, call in kept.items():
        median = statistics.median(times[side])
        rate = case.work / median
        peak = peak_bytes(call, device) / 1e6
        yield Row(case.kernel, case.size, side, median * 1e3, rate / scale, 100 * rate / ceiling, peak)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time one call, on the device's own clock where it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Return how much a call allocates at its peak; NaN on CPU, where PyTorch does not say."""
    if device.type != "cuda":
        return float("nan")
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - before


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes read and written per second by one copy of 512 MB (64 MB on CPU)."""
    source = torch.zeros((512 if device.type == "cuda" else 64) * 2**18, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source), device) for _ in range(ROUNDS))


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return floating point operations per second of one square matrix product."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / min(seconds(lambda: a @ b, device) for _ in range(ROUNDS))


def slice_copies(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """The cast of a pull and the sum of a push, over ranges of uneven lengths."""
    for megabytes in (64, 256, 1024) if device.type == "cuda" else (1, 16):
        count = megabytes * 2**18
        lengths = (torch.rand(2000, generator=torch.Generator().manual_seed(0)) * count / 1000).long() // 8 * 8
        lengths = lengths[lengths.cumsum(0) <= count]
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(1))
        source = lengths.cumsum(0) - lengths
        target = torch.empty_like(source)
        target[order] = lengths[order].cumsum(0) - lengths[order]
        table = slice_copy.SliceTable.make(source, target, lengths, device=device)
        master, half = torch.randn(count, device=device), torch.zeros(count, dtype=torch.bfloat16, device=device)
        yield Case(
            "slice_copy fp32->bf16",
            f"{megabytes} MB, {len(lengths)} ranges",
            6.0 * table.elements,
            "memory",
            {
                "PyTorch": lambda m=master, h=half, t=table: _returning(h, slice_copy.reference, m, h, t, False),
                "hydragraph": lambda m=master, h=half, t=table: _returning(h, slice_copy.slice_copy, m, h, t),
            },
        )


def _returning(value: Tensor, call: Callable[..., object], *arguments: object) -> Tensor:
    call(*arguments)
    return value


def adamw_steps(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """One update of one flat shard, with the 16-bit copy."""
    settings = adamw.Settings(1e-3)
    for megabytes in (64, 256, 1024) if device.type == "cuda" else (4, 16):
        count = megabytes * 2**18
        flat = [torch.rand(count, device=device) for _ in range(4)]
        shards = [
            adamw.Shard(*(x.clone() for x in flat), torch.empty(count, dtype=torch.bfloat16, device=device), 1)
            for _ in range(2)
        ]
        yield Case(
            "adamw + bf16 copy",
            f"{megabytes} MB",
            30.0 * count,
            "memory",
            {
                "PyTorch": lambda s=shards[0]: _returning(s.weight, adamw.reference, [s], settings),
                "hydragraph": lambda s=shards[1]: _returning(s.weight, adamw.update, [s], settings),
            },
        )


def losses(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Forward and backward of the head and its loss."""
    sizes = [(16384, 4096, 32000), (16384, 4096, 131072)] if device.type == "cuda" else [(512, 128, 4096)]
    for tokens, hidden, vocabulary in sizes:
        x = torch.randn(tokens, hidden, device=device, dtype=dtype).requires_grad_()
        weight = (torch.randn(vocabulary, hidden, device=device, dtype=dtype) / hidden**0.5).requires_grad_()
        labels = torch.randint(vocabulary, (tokens,), device=device)

        def run(loss: Callable[..., Tensor], x: Tensor = x, w: Tensor = weight, labels: Tensor = labels) -> Tensor:
            return torch.autograd.grad(loss(x, w, labels), (x, w))[0]

        def eager(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(x @ w.T, labels, reduction="sum")

        sides = {"eager": lambda run=run, eager=eager: run(eager)}
        if device.type == "cuda":
            compiled = torch.compile(eager)
            sides["compiled"] = lambda run=run, compiled=compiled: run(compiled)
        sides["hydragraph"] = lambda run=run: run(linear_cross_entropy.linear_cross_entropy)
        work = 6.0 * tokens * hidden * vocabulary
        yield Case("linear_cross_entropy", f"T {tokens}, E {hidden}, V {vocabulary}", work, "products", sides)


def attentions(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Causal attention, forward and backward, over packed sequences of mixed lengths."""
    cuda = device.type == "cuda"
    for tokens, heads, kv, size in [(16384, 32, 8, 128), (16384, 32, 8, 64)] if cuda else [(512, 4, 2, 64)]:
        lengths = mixed_lengths(tokens)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        longest = torch.tensor(max(lengths))
        q, k, v = (torch.randn(tokens, h, size, device=device, dtype=dtype).requires_grad_() for h in (heads, kv, kv))
        grad = torch.randn_like(q)

        def run(
            name: str, q: Tensor = q, k: Tensor = k, v: Tensor = v, s: Tensor = starts, m: Tensor = longest
        ) -> Tensor:
            out = varlen_attention(q, k, v, s, max_length=m, backend=name)
            return torch.autograd.grad(out, (q, k, v), grad)[0]  # noqa: B023  a case runs before the next is made

        sides = {name: lambda run=run, name=name: run(name) for name in BACKENDS[device.type]}
        work = 3.5 * sum(2.0 * n * n * heads * size for n in lengths)
        yield Case("varlen_attention", f"T {tokens}, {heads}/{kv} heads of {size}", work, "products", sides)


def mixed_lengths(tokens: int) -> list[int]:
    """Return lengths of a long-tailed distribution that sum to `tokens`."""
    generator, left, found = torch.Generator().manual_seed(0), tokens, []
    while left:
        length = min(left, int(64 * 2 ** (7 * float(torch.rand((), generator=generator)))))
        found.append(length)
        left -= length
    return found


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table("kernel", "size", "side", "ms", "GB/s or TFLOP/s", "% of ceiling", "peak MB")
    for row in rows:
        numbers = (row.milliseconds, row.rate, row.percent, row.peak_megabytes)
        table.add_row(row.kernel, row.size, row.side, *(f"{x:.3g}" for x in numbers))
    Console().print(table)


CASES: dict[str, Callable[[torch.device, torch.dtype], Iterator[Case]]] = {
    "varlen_attention": attentions,
    "slice_copy": slice_copies,
    "adamw": adamw_steps,
    "linear_cross_entropy": losses,
}

if __name__ == "__main__":
    main()

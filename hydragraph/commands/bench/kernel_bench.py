"""Benchmark of kernels and their alternatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from hydragraph.commands.bench.bench_table import BenchReport, PictureBar, Target
from hydragraph.commands.bench.device_ceiling import DeviceCeilings, measure_ceilings
from hydragraph.commands.bench.interleaved_timing import alternate, peak_bytes
from hydragraph.commands.bench.kernel_cases import CASES, KernelCase, KernelSweep
from hydragraph.errors import Unsupported

ROUNDS = 7
# Minimum seconds per round, to make launch overhead negligible
AT_LEAST_S = 0.01
TOLERANCE = 2e-2
# Implementations that may fail in PyTorch's code
FOREIGN = ("compiled", "torch fused")
# Minimum ratio of speeds that counts as equally fast
NOISE = 0.98
COLUMNS = ("kernel", "size", "side", "ms", "GB/s or TFLOP/s", "% of ceiling", "peak MB")


@dataclass(frozen=True)
class KernelRow:
    """Measured implementation: `rate` in GB/s or TFLOP/s, and in percent of the measured ceiling."""

    kernel: str
    size: str
    side: str
    milliseconds: float
    rate: float
    percent: float
    peak_megabytes: float


def bench_kernels(
    names: Sequence[str],
    sweep: KernelSweep,
    tell: Callable[[str], None] = lambda what: None,
    keep: Callable[[BenchReport], None] = lambda report: None,
) -> BenchReport:
    """Measure the named kernels; by default, all.

    Args:
        keep: called with the report after every case.

    Raises:
        ValueError: a name is unknown, or a kernel's result is wrong.
    """
    if unknown := [name for name in names if name not in CASES]:
        raise ValueError(f"unknown kernel {unknown[0]!r}: choose from {', '.join(CASES)}")
    ceilings = measure_ceilings(sweep.device, sweep.dtype)
    rows: list[KernelRow] = []
    notes = [f"Ceilings, measured in this run: {ceilings}.", *_left_out(sweep)]
    for name in names or CASES:
        for case in CASES[name](sweep):
            tell(f"{case.kernel}, {case.size}")
            case_rows, refused = measure(case, sweep.device, ceilings)
            rows += case_rows
            notes += [note for note in refused if note not in notes]
            keep(_report(rows, notes, sweep, ceilings))
    return _report(rows, notes, sweep, ceilings)


def _report(
    rows: Sequence[KernelRow], notes: Sequence[str], sweep: KernelSweep, ceilings: DeviceCeilings
) -> BenchReport:
    bars = tuple(PictureBar(f"{r.kernel}\n{r.size}", r.side, r.percent) for r in rows)
    title = f"Kernels on {ceilings.device}"
    targets = kernel_targets(rows if sweep.full and sweep.device.type == "cuda" else ())
    cells = tuple(astuple(row) for row in rows)
    return BenchReport(title, COLUMNS, cells, tuple(notes), (), targets, bars, "% of the measured ceiling")


def _left_out(sweep: KernelSweep) -> Iterator[str]:
    yield "Attention and slice_copy are not measured with torch.compile: their eager versions are Python loops."
    if not sweep.compiled:
        yield "torch.compile was not measured: pass --compiled to measure it."
    if sweep.device.type == "cpu":
        yield "On the CPU, hydragraph's operators run plain PyTorch; Triton's interpreter is not measured."


def measure(case: KernelCase, device: torch.device, ceilings: DeviceCeilings) -> tuple[list[KernelRow], list[str]]:
    sides, refused = checked(case)
    calls = {name: (lambda turn, call=call: call()) for name, call in sides.items()}
    seconds = alternate(calls, device, ROUNDS, at_least_s=AT_LEAST_S)
    # rate: bytes or FLOPs per second, whichever limits the kernel.
    ceiling = ceilings.copy_bytes_per_s if case.bound == "memory" else ceilings.product_flops_per_s
    scale = 1e9 if case.bound == "memory" else 1e12
    rows = []
    for name, call in sides.items():
        rate = case.work / seconds[name]
        numbers = (seconds[name] * 1e3, rate / scale, 100 * rate / ceiling, peak_bytes(call, device) / 1e6)
        rows.append(KernelRow(case.kernel, case.size, name, *numbers))
    return rows, refused


def checked(case: KernelCase) -> tuple[dict[str, Callable[[], Tensor]], list[str]]:
    # The first side is the reference for the others' results.
    (first, reference), *others = case.sides.items()
    expected = reference().detach().float().clone()
    sides = {first: reference}
    refused = []
    for name, call in others:
        try:
            result = call().detach().float()
        except (Unsupported, RuntimeError, TypeError) as error:
            if not isinstance(error, Unsupported) and name not in FOREIGN:
                raise
            refused.append(f"{case.kernel}: {name} was not measured: {str(error).splitlines()[0]}.")
            continue
        error_size = float((result - expected).norm() / expected.norm().clamp(min=1e-30))
        if not error_size < TOLERANCE:
            raise ValueError(
                f"{case.kernel}, {case.size}: {name} has a relative error of {error_size:.1e} against {first}, so "
                "a kernel is wrong on this device: run tests/kernels"
            )
        sides[name] = call
    return sides, refused


def kernel_targets(rows: Sequence[KernelRow]) -> tuple[Target, ...]:
    return (*_attention_targets(rows), *_memory_targets(rows), *_loss_targets(rows))


def _times(rows: Sequence[KernelRow], kernel: str, size: str) -> dict[str, KernelRow]:
    return {r.side: r for r in rows if r.kernel == kernel and r.size == size}


def _ratio(rows: dict[str, KernelRow], side: str, other: str) -> float | None:
    return rows[other].milliseconds / rows[side].milliseconds if side in rows and other in rows else None


def _attention_targets(rows: Sequence[KernelRow]) -> Iterator[Target]:
    sizes = {r.size: _times(rows, r.kernel, r.size) for r in rows if r.kernel == "varlen_attention"}
    large = sizes.get("T 16384, 32/8 heads of 128", {})
    name = "attention, 16K tokens, 32/8 heads of 128: Triton against varlen_attn"
    # "torch" runs varlen_attn
    yield Target.at_least(name, 0.9, _ratio(large, "triton", "torch"), "{:.2f}x")
    backends = ("flash_attn", "torch", "triton")
    worst = [
        min(side[name].milliseconds for name in backends if name in side) / side["dispatch"].milliseconds
        for side in sizes.values()
        if "dispatch" in side and any(name in side for name in backends)
    ]
    name = "attention: dispatch against the fastest backend, at every size"
    text = f">= 1x (>= {NOISE:.2f}x passes: noise)"
    yield Target.at_least(name, NOISE, min(worst, default=None), "{:.2f}x", text)


def _memory_targets(rows: Sequence[KernelRow]) -> Iterator[Target]:
    for kernel in ("slice_copy", "adamw"):
        percents = [
            r.percent
            for r in rows
            if r.kernel.startswith(kernel) and r.side == "hydragraph" and int(r.size.split()[0]) >= 256
        ]
        name = f"{kernel}, 256 MB or more: percent of the measured copy bandwidth"
        yield Target.at_least(name, 90, min(percents, default=None), "{:.1f} %")


def _loss_targets(rows: Sequence[KernelRow]) -> Iterator[Target]:
    for vocabulary, name in ((32000, "32K"), (131072, "128K")):
        sides = _times(rows, "linear_cross_entropy", f"T 16384, E 4096, V {vocabulary}")
        head = f"head and loss, 16K tokens, {name} vocabulary"
        eager, compiled = (_ratio(sides, other, "hydragraph") for other in ("eager", "compiled"))
        yield Target.at_most(f"{head}: time against eager", 1.0, eager, "{:.2f}x")
        yield Target.at_most(f"{head}: time against compiled", 1.05, compiled, "{:.2f}x")
        memory = None
        if "hydragraph" in sides and "eager" in sides:
            memory = sides["hydragraph"].peak_megabytes / sides["eager"].peak_megabytes
        yield Target.at_most(f"{head}: peak memory against eager", 0.25, memory, "{:.2f}x")

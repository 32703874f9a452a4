"""`hydragraph bench`: measure kernels, strategy switches and training steps."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from hydragraph.commands.bench.bench_options import (
    BenchKernelsOptions,
    BenchLinkOptions,
    BenchReportOptions,
    BenchStepOptions,
    Size,
    write_page,
)
from hydragraph.commands.options import verb

if TYPE_CHECKING:
    from hydragraph.commands.bench.bench_table import BenchReport


@verb
def kernels_command(options: BenchKernelsOptions) -> None:
    """Time every kernel and its alternatives, over a sweep of sizes.

    Implementations ("sides") are checked, then timed in turn. Percentages compare GB/s with one large copy and TFLOP/s
    with one large matrix product of the same run. "dispatch" is the backend that hydragraph chooses.

    Example: hydragraph bench kernels adamw slice_copy --device cpu --csv kernels.csv --picture kernels.png
    """
    import torch

    from hydragraph.commands.bench.kernel_bench import bench_kernels
    from hydragraph.commands.bench.kernel_cases import KernelSweep

    device, compiled = options.choose_device()
    cuda = device.type == "cuda"
    full = cuda if options.size is None else options.size is Size.FULL
    sweep = KernelSweep(device, torch.bfloat16 if cuda else torch.float32, full, compiled)

    def keep(report: BenchReport) -> None:
        if options.json is not None:
            report.save(options.json)

    options.show(bench_kernels(options.names or (), sweep, _tell, keep))


@verb
def link_command(options: BenchLinkOptions) -> None:
    """Show the traffic of a strategy switch: a push of gradients and a pull of weights.

    Strategies do not change the home of the state, so a switch from A to B only pushes gradients from A and pulls
    weights to B. The bytes are exact. The seconds, and the percentage overlapped with computation, are simulated;
    --measure also measures them.

    Example: hydragraph bench link --from '2*<tp2,pp2>' --to '8*<tp1,pp1>' --model 7b
    """

    from hydragraph.commands.bench.bench_models import SHAPES
    from hydragraph.commands.bench.link_report import bench_link

    dtype, measure = options.dtype, options.measure
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"--dtype {dtype}: use bfloat16 or float32")
    if measure is None:
        measure = options.model in SHAPES and SHAPES[options.model].hidden <= 256
    if measure and dtype != "float32":
        dtype = "float32"
        _tell("local CPU ranks compute in float32, so weights are pulled in float32 (--no-measure keeps bfloat16)")
    options.show(bench_link(replace(options, dtype=dtype, measure=measure), _tell))


@verb
def step_command(options: BenchStepOptions) -> None:
    """Compare one rank's tokens/s and MFU with those of the Hugging Face model, on sequences of varying length.

    The Hugging Face model runs eagerly on padded batches, eagerly on packed batches with PyTorch's flash attention, and
    on packed batches with layers and loss compiled by torch.compile. All models train on the same sequences; losses and
    gradient norms are compared first.

    Example: hydragraph bench step --model small --tokens 1024 --compiled
    """
    from hydragraph.commands.bench.bench_models import SHAPES
    from hydragraph.commands.bench.step_bench import StepSettings, bench_step

    device, compiled = options.choose_device()
    cuda = device.type == "cuda"
    name = options.model or ("1b" if cuda else "small")
    if name not in SHAPES:
        raise ValueError(f"--model {name}: use one of {', '.join(SHAPES)}")
    tokens = options.tokens or (32768 if cuda else 1024)
    longest = options.longest or tokens // 4
    shortest = max(2, min(64, longest // 16))
    settings = StepSettings(SHAPES[name], tokens, longest, options.rounds, device, compiled, options.backend, shortest)
    options.show(bench_step(settings, _tell))


@verb
def report_command(options: BenchReportOptions) -> None:
    """Combine results on one page that begins with all targets and whether they were met.

    Example: hydragraph bench report kernels.json step.json --markdown results.md
    """
    from hydragraph.commands.bench.bench_table import BenchReport

    write_page([BenchReport.load(part) for part in options.parts], options.markdown, options.facts or ())
    print(options.markdown)


COMMANDS = {
    "kernels": kernels_command,
    "link": link_command,
    "step": step_command,
    "report": report_command,
}


def _tell(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr)

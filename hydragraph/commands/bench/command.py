"""`hydragraph bench`: measure kernels, strategy switches and training steps, and write a page of results."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hydragraph.commands.options import CommonOptions, argument, option, verb

if TYPE_CHECKING:
    from hydragraph.commands.bench.bench_table import BenchReport


class Size(str, Enum):  # noqa: UP042  typer reads the values
    SMALL = "small"
    FULL = "full"


_device_option = partial(option, "cpu or cuda; default: cuda if the machine has a GPU.")
_compiled_option = partial(
    option, "Also compare with torch.compile; default: on a GPU only.", "--compiled/--no-compiled"
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(CommonOptions):
    csv: Path | None = option("Also write the rows, with all digits, to this CSV file.")
    picture: Path | None = option("Also draw the results as bars in this PNG file.")
    json: Path | None = option("Also write the full report to this file, for hydragraph bench report.")
    markdown: Path | None = option("Also write a page with the targets and results to this file.")

    def show(self, report: BenchReport) -> None:
        from rich.console import Console

        from hydragraph.commands.bench.bench_table import target_table, to_csv, to_table

        console = Console(width=None if sys.stdout.isatty() else 150)
        console.print(to_table(report))
        for text in (*report.blocks, *report.notes):
            print(text)
        if report.targets:
            console.print(target_table(report.targets))
        if self.csv is not None:
            self.csv.write_text(to_csv(report), encoding="utf-8")
        if self.json is not None:
            report.save(self.json)
        if self.picture is not None:
            from hydragraph.commands.bench.bench_picture import write_picture

            write_picture(report, self.picture)
        if self.markdown is not None:
            _write_page([report], self.markdown, ())


@dataclass(frozen=True, kw_only=True)
class BenchKernelsOptions(BenchOptions):
    names: list[str] | None = argument(
        "Kernels: varlen_attention, slice_copy, adamw, linear_cross_entropy; default: all.", default=None
    )
    device: str | None = _device_option()
    size: Size | None = option("Default: full on a GPU, small on a CPU.")
    compiled: bool | None = _compiled_option()


@verb
def kernels_command(options: BenchKernelsOptions) -> None:
    """Time every kernel and its alternatives, over a sweep of sizes.

    Each implementation ("side") is checked before it is timed, and the sides are timed in turn. Percentages compare
    GB/s with one large copy and TFLOP/s with one large matrix product, measured in the same run. "dispatch" is the
    backend that hydragraph chooses.
    """
    import torch

    from hydragraph.commands.bench.device_ceiling import choose_device
    from hydragraph.commands.bench.kernel_bench import bench_kernels
    from hydragraph.commands.bench.kernel_cases import Sweep

    device = choose_device(options.device)
    cuda = device.type == "cuda"
    full = cuda if options.size is None else options.size is Size.FULL
    compiled = cuda if options.compiled is None else options.compiled
    sweep = Sweep(device, torch.bfloat16 if cuda else torch.float32, full, compiled)

    def keep(report: BenchReport) -> None:
        if options.json is not None:
            report.save(options.json)

    options.show(bench_kernels(options.names or (), sweep, _tell, keep))


@dataclass(frozen=True, kw_only=True)
class BenchLinkOptions(BenchOptions):
    source: str = option(
        "The strategy to switch from: a text, a YAML file, or home for no push.", "--from", default="home"
    )
    target: str = option(
        "The strategy to switch to: a text, a YAML file, or home for no pull.", "--to", default="<tp2,pp1>"
    )
    model: str = option("tiny, small, 1b, 7b, or a run's YAML file.", default="7b")
    dtype: str = option("Dtype of pulled weights: bfloat16 or float32.", default="bfloat16")
    cluster: Path | None = option("The YAML file of the devices to simulate; default: H200s, eight per node.")
    home: str = option('Each rank\'s share of the state: equal, or a text such as "3,3,1,0 copies=2".', default="equal")
    tokens: int = option("Tokens per simulated micro-batch.", default=4096, min=1)
    micro_batches: int = option("Number of micro-batches per simulated pipeline.", default=4, min=1)
    measure: bool | None = option(
        "Also measure on local CPU ranks; default: for tiny and small models only.", "--measure/--no-measure"
    )


@verb
def link_command(options: BenchLinkOptions) -> None:
    """Show the traffic of a strategy switch: the push of one step's gradients and the pull of the next step's weights.

    Strategies do not change the home layout of the state, so a switch from A to B pushes gradients from A and pulls
    weights to B. The bytes between each pair of ranks are exact. The seconds, and the percentage overlapped with
    computation, are simulated; --measure also measures them.
    """
    import torch

    from hydragraph.commands.bench.bench_models import SHAPES
    from hydragraph.commands.bench.link_report import LinkSettings, bench_link
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.home import Home

    model, dtype, measure = options.model, options.dtype, options.measure
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"--dtype {dtype}: use bfloat16 or float32")
    if measure is None:
        measure = model in SHAPES and SHAPES[model].hidden <= 256
    if measure and dtype != "float32":
        dtype = "float32"
        _tell("local CPU ranks compute in float32, so weights are pulled in float32 (--no-measure keeps bfloat16)")
    settings = LinkSettings(
        model,
        options.source,
        options.target,
        getattr(torch, dtype),
        None if options.cluster is None else Cluster.load(options.cluster),
        options.tokens,
        options.micro_batches,
        measure,
        home=Home.parse(options.home),
    )
    options.show(bench_link(settings, _tell))


@dataclass(frozen=True, kw_only=True)
class BenchStepOptions(BenchOptions):
    device: str | None = _device_option()
    model: str | None = option("tiny, small or 1b; default: 1b on a GPU, small on a CPU.")
    tokens: int | None = option("Tokens per mini-batch; default: 32,768 on a GPU, 1,024 on a CPU.", min=64)
    longest: int | None = option("Maximum tokens per sequence; default: a quarter of the mini-batch.", min=16)
    rounds: int = option("Number of measured steps per model, after two warm-up steps.", default=5, min=1)
    compiled: bool | None = _compiled_option()
    backend: str | None = option("The backend of hydragraph.compile, such as inductor or eager.")


@verb
def step_command(options: BenchStepOptions) -> None:
    """Compare one rank's tokens/s and MFU with those of the Hugging Face model, on sequences of varying length.

    The Hugging Face model runs in three ways: eagerly on padded batches, eagerly on packed batches with PyTorch's flash
    attention, and on packed batches with each layer and the loss compiled by torch.compile. All models train on the
    same sequences; losses and gradient norms are compared first.
    """
    from hydragraph.commands.bench.bench_models import SHAPES
    from hydragraph.commands.bench.device_ceiling import choose_device
    from hydragraph.commands.bench.step_bench import StepSettings, bench_step

    device = choose_device(options.device)
    cuda = device.type == "cuda"
    name = options.model or ("1b" if cuda else "small")
    if name not in SHAPES:
        raise ValueError(f"--model {name}: use one of {', '.join(SHAPES)}")
    tokens = options.tokens or (32768 if cuda else 1024)
    longest = options.longest or tokens // 4
    compiled = cuda if options.compiled is None else options.compiled
    shortest = max(2, min(64, longest // 16))
    settings = StepSettings(SHAPES[name], tokens, longest, options.rounds, device, compiled, options.backend, shortest)
    options.show(bench_step(settings, _tell))


@dataclass(frozen=True, kw_only=True)
class BenchReportOptions(CommonOptions):
    parts: list[Path] = argument("Reports that hydragraph bench wrote with --json.")
    markdown: Path = option("The page to write.", default=MISSING)
    facts: list[str] | None = option("A sentence for the top of the page.", "--fact")


@verb
def report_command(options: BenchReportOptions) -> None:
    """Combine results on one page that begins with all targets and whether they were met."""
    from hydragraph.commands.bench.bench_table import BenchReport

    _write_page([BenchReport.load(part) for part in options.parts], options.markdown, options.facts or ())
    print(options.markdown)


_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    (
        "kernels",
        kernels_command,
        "Example: hydragraph bench kernels adamw slice_copy --device cpu --csv kernels.csv --picture kernels.png",
    ),
    (
        "link",
        link_command,
        "Example: hydragraph bench link --from '2*<tp2,pp2>' --to '8*<tp1,pp1>' --model 7b; to also measure locally: "
        "hydragraph bench link --from '<tp2,pp1>' --to '<tp1,pp2>' --model small",
    ),
    ("step", step_command, "Example: hydragraph bench step --model small --tokens 1024 --compiled"),
    ("report", report_command, "Example: hydragraph bench report kernels.json step.json --markdown results.md"),
)


def bench_app(in_sentences: Callable[[Callable[..., None]], Callable[..., None]]) -> typer.Typer:
    """Return a typer app with the bench commands; `in_sentences` turns errors into a sentence and an exit code."""
    app = typer.Typer(
        help="Measure kernels, strategy switches and training steps; sizes are small on a CPU.",
        no_args_is_help=True,
    )
    for name, function, example in _COMMANDS:
        app.command(name, epilog=example)(in_sentences(function))
    return app


def _tell(what: str) -> None:
    print(f"bench: {what}", file=sys.stderr)


def _write_page(reports: Sequence[BenchReport], path: Path, facts: Sequence[str]) -> None:
    import torch

    from hydragraph.commands.bench.bench_table import to_markdown
    from hydragraph.commands.bench.device_ceiling import choose_device, device_name
    from hydragraph.version import __version__

    name = device_name(choose_device(None))
    versions = f"hydragraph {__version__}, PyTorch {torch.__version__}, {_triton()}, Python {sys.version.split()[0]}"
    heading = f"Benchmarks on {name}, {datetime.date.today():%Y-%m-%d}"
    path.write_text(to_markdown(reports, heading, (versions, *facts)), encoding="utf-8")


def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"Triton {version('triton')}"
    except PackageNotFoundError:
        return "no Triton"

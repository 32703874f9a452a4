"""Options and outputs of `hydragraph bench`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from hydragraph.commands.options import CommonOptions, argument, option

if TYPE_CHECKING:
    import torch

    from hydragraph.commands.bench.bench_table import BenchReport


class Size(str, Enum):  # noqa: UP042  typer reads the values
    SMALL = "small"
    FULL = "full"


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
            write_page([report], self.markdown, ())


@dataclass(frozen=True, kw_only=True)
class TimedOptions(BenchOptions):
    device: str | None = option("cpu or cuda; default: cuda if the machine has a GPU.")
    compiled: bool | None = option(
        "Also compare with torch.compile; default: on a GPU only.", "--compiled/--no-compiled"
    )

    def choose_device(self) -> tuple[torch.device, bool]:
        """Return the device to measure, and whether to compare with torch.compile."""
        from hydragraph.commands.bench.device_ceiling import choose_device

        device = choose_device(self.device)
        return device, device.type == "cuda" if self.compiled is None else self.compiled


@dataclass(frozen=True, kw_only=True)
class BenchKernelsOptions(TimedOptions):
    names: list[str] | None = argument(
        "Kernels: varlen_attention, slice_copy, adamw, linear_cross_entropy; default: all.", default=None
    )
    size: Size | None = option("Default: full on a GPU, small on a CPU.")


@dataclass(frozen=True, kw_only=True)
class BenchLinkOptions(BenchOptions):
    source: str = option(
        "The strategy to switch from, as text or a YAML file; home: measure no push.", "--from", default="home"
    )
    target: str = option(
        "The strategy to switch to, as text or a YAML file; home: measure no pull.", "--to", default="<tp2,pp1>"
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


@dataclass(frozen=True, kw_only=True)
class BenchStepOptions(TimedOptions):
    model: str | None = option("tiny, small or 1b; default: 1b on a GPU, small on a CPU.")
    tokens: int | None = option("Tokens per mini-batch; default: 32,768 on a GPU, 1,024 on a CPU.", min=64)
    longest: int | None = option("Maximum tokens per sequence; default: a quarter of the mini-batch.", min=16)
    rounds: int = option("Number of measured steps per model, after two warm-up steps.", default=5, min=1)
    backend: str | None = option("The backend of hydragraph.compile, such as inductor or eager.")


@dataclass(frozen=True, kw_only=True)
class BenchReportOptions(CommonOptions):
    parts: list[Path] = argument("Reports that hydragraph bench wrote with --json.")
    markdown: Path = option("The page to write.", default=MISSING)
    facts: list[str] | None = option("A sentence for the top of the page.", "--fact")


def write_page(reports: Sequence[BenchReport], path: Path, facts: Sequence[str]) -> None:
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

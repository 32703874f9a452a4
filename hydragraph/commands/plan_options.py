"""Options of `hydragraph plan`."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import get_annotations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydragraph.commands.options import (
    AsJson,
    ClusterFile,
    CommonOptions,
    CorrectionsFile,
    Efficiency,
    HealthFile,
    check_prices,
    check_read,
    check_written,
)
from hydragraph.spec.cluster import MOST_DEVICES
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.spec.training_workload import Workload

TOKENS = 100_000  # default tokens per mini-batch
METHODS = "auto|mixed|straggler|search|metis"


@dataclass(frozen=True, kw_only=True)
class EqualOptions(CommonOptions):
    PANEL = "Equal devices"

    devices: Annotated[int | None, typer.Option(min=1, max=MOST_DEVICES, help="Number of devices.")] = None
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "--strategies",
            help="Strategies to compare; default: strategies proposed for the data and improved on samples of it.",
        ),
    ] = None
    explain: Annotated[
        bool, typer.Option("--explain", help="List all candidates, with a breakdown of their times.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class UnevenOptions(CommonOptions):
    PANEL = "Devices that differ (--cluster)"

    cluster: ClusterFile = None
    model: Annotated[
        Path | None,
        typer.Option(
            help="A run's YAML file. Its model is captured without weights. Memory is predicted from compiled graphs; "
            "without a profile, time is predicted from FLOPs and a datasheet."
        ),
    ] = None
    efficiency: Efficiency = None
    health: HealthFile = None
    sequences: Annotated[
        int | None, typer.Option(min=1, help="Number of equal sequences per iteration, instead of --lengths.")
    ] = None
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence, with --sequences; default: data.max_length.")
    ] = None
    solver: Annotated[
        str | None,
        typer.Option(
            metavar="scip",
            help="With --method mixed and few devices: group devices by AutoHet's integer program, solved by SCIP (pip "
            "install 'hydragraph\\[exact]').",
        ),
    ] = None
    method: Annotated[
        str | None,
        typer.Option(
            metavar=METHODS,
            help="Search method: mixed (for different device types), straggler (for slow devices), search (for data "
            "parallelism whose degree differs between stages), metis (like search, but not exact: an improved version "
            "of Metis's memory-aware search), or auto (the default: mixed, straggler and search).",
        ),
    ] = None
    running: Annotated[
        str | None,
        typer.Option(
            help="The strategy that runs now, a text or a YAML file. Among plans that are nearly as fast as the best, "
            "the one that moves the least state is chosen."
        ),
    ] = None
    home: Annotated[
        str | None,
        typer.Option(
            help='Each rank\'s current share of the state, as in "3,3,1,0 copies=2"; the plan may move state. Default: '
            "with --running, the config's home; otherwise, equal shares."
        ),
    ] = None
    deadline: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds after which the command prints the best plan so far. Kinds of stages that are not compiled "
            "in time are excluded.",
        ),
    ] = None
    prices: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="TYPE=DOLLARS",
            help="Dollars per hour for each device of this type, as in h100-sxm=2.5, or 2.5 for all types. Devices "
            "with neither work nor state cost nothing. Repeatable.",
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="DOLLARS",
            help="Maximum dollars per hour: choose the nodes that train fastest within this budget. --cluster must "
            "list all nodes that can be rented. Needs --price.",
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option(help="Write the strategy to this YAML file, which hydragraph train reads.")
    ] = None
    report: Annotated[Path | None, typer.Option(help="Write an HTML file: the plan, its timeline, its rivals.")] = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions(EqualOptions, UnevenOptions):
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="A file that hydragraph profile wrote, or constants.json#name for one entry; with --cluster, one for "
            "each type of device."
        ),
    ] = None
    lengths: Annotated[
        Path | None,
        typer.Option(help="File with the length of each sequence, one per line; or a run's tokens.bin."),
    ] = None
    context: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of a sequence; longer ones are truncated.")
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Tokens per iteration; default: --model's data.tokens_per_step, or {TOKENS}."),
    ] = None
    iterations: Annotated[int, typer.Option(min=1, help="Number of mini-batches to draw from the lengths.")] = 4
    seed: Annotated[int, typer.Option(min=0, help="Random seed for drawing the mini-batches.")] = 0
    corrections: CorrectionsFile = None
    as_json: AsJson = False
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw a PNG file: the micro-batches of each pipeline or, with --cluster, the plan's nodes and devices."
        ),
    ] = None

    def check(self) -> None:
        if self.cluster is None:
            self.refuse(
                get_annotations(UnevenOptions),
                "is for devices that differ: also give --cluster with the file that lists them",
            )
            if None in (self.profile, self.lengths, self.devices, self.context):
                raise ValueError(
                    "plan needs options: for equal devices give --profile, --lengths, --devices and --context; for "
                    "devices that differ give --cluster, and --model or --profile"
                )
            if len(self.profile or ()) > 1:
                raise ValueError(
                    "several profiles need --cluster with a file of the devices: add it, or give only one --profile"
                )
            return
        self.refuse(
            get_annotations(EqualOptions),
            "is for equal devices: omit it, because --cluster lists the devices and the plan prints all rivals",
        )
        if self.model is None and not self.profile:
            raise ValueError(
                "--cluster needs --model with a run's config, or --profile with a file of hydragraph profile for each "
                "type of device, or both"
            )
        check_prices(self.profile, self.efficiency)
        if self.budget is not None and not self.prices:
            raise ValueError("--budget chooses devices by their price: also give --price")
        if self.budget is not None and (self.running is not None or self.home is not None):
            raise ValueError("--budget chooses devices for a new run: omit --running and --home")
        check_written("--output", self.output)
        also = ["cluster.yaml", "health.yaml"] * (self.budget is not None)
        also += ["profile.json"] * (len(self.profile or ()) > 1)
        if self.output is not None:
            if self.output.suffix not in (".yaml", ".yml"):
                raise ValueError(f"--output {self.output}: name a file that ends in .yaml")
            for name in also:
                check_read({**vars(self), "output": self.output.with_name(f"{self.output.stem}-{name}")})

    def workload(self, config: TrainConfig | None) -> Workload:
        """Return the workload for devices that differ; the run's config supplies missing options.

        Raises:
            ValueError: the options are incomplete or contradictory.
        """
        from hydragraph.spec.training_workload import Workload, full_lengths
        from hydragraph.train.plan_input import read_lengths

        tokens = self.tokens or (config.data.tokens_per_step if config else None)
        longest = config.data.max_length if config else None
        if self.lengths is not None:
            if self.sequences or self.length:
                raise ValueError("--lengths draws mini-batches: omit --sequences and --length")
            limit = self.context or longest
            data = [min(n, limit or n) for n in read_lengths(self.lengths)]

            from hydragraph.report.candidate_comparison import mini_batches  # imports numba

            return Workload(lengths=mini_batches(data, tokens or TOKENS, self.iterations, self.seed))
        if self.context:
            raise ValueError("--context truncates the sequences of --lengths: for equal sequences give --length")
        if self.sequences and self.tokens:
            raise ValueError("--sequences and --tokens both set the size of an iteration: give one of them")
        length = self.length or longest
        if length is None or not (self.sequences or tokens):
            raise ValueError(
                "the workload is missing: give --sequences 128 --length 2048, or --lengths with a file of lengths, or "
                "--model with a run's config"
            )
        if self.sequences:
            return Workload(self.sequences, length)
        step = full_lengths(tokens or 0, length)
        return Workload(len(step), length) if step[-1] == length else Workload(lengths=[step])

"""Options of `hydragraph plan`."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import get_annotations
from pathlib import Path
from typing import TYPE_CHECKING

from hydragraph.commands.options import (
    CommonOptions,
    check_prices,
    check_read,
    check_written,
    cluster_option,
    corrections_option,
    efficiency_option,
    flag,
    health_option,
    json_option,
    option,
)
from hydragraph.spec.cluster import MOST_DEVICES
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.spec.training_workload import Workload

TOKENS = 100_000
METHODS = "auto|mixed|straggler|search|metis"


@dataclass(frozen=True, kw_only=True)
class EqualOptions(CommonOptions):
    PANEL = "Equal devices"

    devices: int | None = option("Number of devices.", min=1, max=MOST_DEVICES)
    strategies: list[str] | None = option(
        "Strategies to compare; default: strategies proposed for the data and improved on samples of it.",
        "--strategy",
        "--strategies",
    )
    explain: bool = flag("List all candidates, with a breakdown of their times.")


@dataclass(frozen=True, kw_only=True)
class UnevenOptions(CommonOptions):
    PANEL = "Devices that differ (--cluster)"

    cluster: Path | None = cluster_option()
    model: Path | None = option(
        "A run's YAML file. Its model is captured without weights. Memory is predicted from compiled graphs; "
        "without a profile, time is predicted from FLOPs and a datasheet."
    )
    efficiency: float | None = efficiency_option()
    health: Path | None = health_option()
    sequences: int | None = option("Number of equal sequences per iteration, instead of --lengths.", min=1)
    length: int | None = option("Tokens per sequence, with --sequences; default: data.max_length.", min=1)
    solver: str | None = option(
        "With --method mixed and few devices: group devices by AutoHet's integer program, solved by SCIP (pip "
        "install 'hydragraph\\[exact]').",
        metavar="scip",
    )
    method: str | None = option(
        "Search method: mixed (for different device types), straggler (for slow devices), search (for data "
        "parallelism whose degree differs between stages), metis (like search, but not exact: an improved version "
        "of Metis's memory-aware search), or auto (the default: mixed, straggler and search).",
        metavar=METHODS,
    )
    running: str | None = option(
        "The strategy that runs now, as text or a YAML file. Among plans that are nearly as fast as the best, "
        "the one that moves the least state is chosen."
    )
    home: str | None = option(
        'Each rank\'s current share of the state, as in "3,3,1,0 copies=2"; the plan may move state. Default: '
        "with --running, the config's home; otherwise, equal shares."
    )
    deadline: float | None = option(
        "Seconds after which the command prints the best plan so far. Kinds of stages that are not compiled "
        "in time are excluded.",
        min=0,
    )
    prices: list[str] | None = option(
        "Dollars per hour for each device of this type, as in h100-sxm=2.5, or 2.5 for all types. Devices "
        "with neither work nor state cost nothing. Repeatable.",
        "--price",
        metavar="TYPE=DOLLARS",
    )
    budget: float | None = option(
        "Maximum dollars per hour: choose the nodes that train fastest within this budget. --cluster must "
        "list all nodes that can be rented. Needs --price.",
        metavar="DOLLARS",
    )
    output: Path | None = option("Write the strategy to this YAML file, which hydragraph train reads.")
    report: Path | None = option("Write an HTML file: the plan, its timeline, its rivals.")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(EqualOptions, UnevenOptions):
    profile: list[str] | None = option(
        "A file that hydragraph profile wrote, or constants.json#name for one entry; with --cluster, one for "
        "each type of device."
    )
    lengths: Path | None = option("File with the length of each sequence, one per line; or a run's tokens.bin.")
    context: int | None = option("Maximum tokens of a sequence; longer ones are truncated.", min=1)
    tokens: int | None = option(f"Tokens per iteration; default: --model's data.tokens_per_step, or {TOKENS}.", min=1)
    iterations: int = option("Number of mini-batches to draw from the lengths.", default=4, min=1)
    seed: int = option("Random seed for drawing the mini-batches.", default=0, min=0)
    corrections: Path | None = corrections_option()
    as_json: bool = json_option()
    picture: Path | None = option(
        "Draw a PNG file: the micro-batches of each pipeline or, with --cluster, the plan's nodes and devices."
    )

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
            ValueError: options are missing or contradictory.
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

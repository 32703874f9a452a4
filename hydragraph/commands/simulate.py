"""`hydragraph simulate`: predict the times of strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from hydragraph.commands.options import (
    ConfigOptions,
    PricedOptions,
    StrategyOptions,
    check_counts,
    check_prices,
    check_strategies,
    default_devices_text,
    devices_option,
    efficiency_option,
    flag,
    health_option,
    on_planned_devices,
    option,
    read_counts,
    verb,
)
from hydragraph.commands.progress import Say, progress
from hydragraph.commands.text_table import new_table
from hydragraph.report.number_text import console, counts_text, seconds_text
from hydragraph.spec.training_workload import check_sequences
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.report.simulation_price import PricedStrategy
    from hydragraph.spec.assignment import Assignment
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.strategy import Strategy
    from hydragraph.train.plan_input import CostFiles


@dataclass(frozen=True, kw_only=True)
class StepOptions(ConfigOptions, PricedOptions, StrategyOptions):
    """Options of a simulated step; contradictory options raise a ValueError."""

    devices: int | None = devices_option()
    micro_batches: str | None = option(
        "Number of micro-batches per pipeline, such as 4,2, or one number for all. Default: the micro-batches "
        "that a run would form from data.tokens_per_step."
    )
    tokens: int | None = option("Tokens per sequence; default: data.max_length.", min=1)
    micro_batch: int | None = option("Number of sequences per micro-batch; with --micro-batches, default: 1.", min=1)
    sequences: int | None = option("Number of sequences per step, instead of --micro-batches.", min=1)
    lengths: Path | None = option(
        "File of sequence lengths (one number per line, or a tokens.bin): simulate a mini-batch that is drawn "
        "from them and assigned to pipelines as in a run, instead of equal micro-batches."
    )
    efficiency: float | None = efficiency_option()

    def __post_init__(self) -> None:
        if self.lengths is not None and (self.micro_batches or self.sequences or self.tokens or self.micro_batch):
            raise ValueError(
                "--lengths draws a mini-batch: omit --micro-batches, --micro-batch, --sequences and --tokens"
            )
        if self.micro_batches is not None:
            check_counts(self.micro_batches)
            if self.sequences is not None:
                raise ValueError("--micro-batches and --sequences both set the size of a step: give only one of them")
        check_sequences(self.sequences or 0)
        if self.sequences is not None and self.sequences % (self.micro_batch or 1):
            raise ValueError(
                f"--sequences {self.sequences} cannot be split into micro-batches of {self.micro_batch}: give a "
                "multiple of --micro-batch"
            )
        if self.cluster is not None and self.devices is not None:
            raise ValueError("--cluster lists the devices, and --devices asks for H200s: give only one of them")
        check_prices(self.profile, self.efficiency)

    def read(self, config: TrainConfig) -> StepInputs:
        """Read all files and texts, without importing PyTorch."""
        from hydragraph.spec.cluster import Cluster
        from hydragraph.spec.default_cluster import default_cluster
        from hydragraph.train.plan_input import CostFiles

        cluster = Cluster.load(self.cluster) if self.cluster else default_cluster(self.devices or config.ranks)
        ranks = len(cluster.devices)
        # A run plans with these costs only if it chooses strategies and devices or times are given.
        known = config.plan.choose and (self.cluster is not None or self.profile is not None)
        config = self.apply(config, ranks)
        check_strategies(config.strategies, config.model, ranks)
        config.home.check(ranks)
        files = CostFiles.read(self.profile, self.corrections, self.lengths)
        return StepInputs(self, config, cluster, files, known)


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a simulated step; `known` is whether a run would plan with these costs."""

    step: StepOptions
    config: TrainConfig
    cluster: Cluster
    files: CostFiles
    known: bool

    def costs(self, say: Say) -> tuple[tuple[Strategy, ...], Costs]:
        from hydragraph.commands.captured_model import strategies_and_costs

        return strategies_and_costs(self.config, self.cluster, self.files, self.step.efficiency, say)[:2]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(StepOptions):
    health: Path | None = health_option()
    changes: list[str] | None = option(
        'Also simulate with one change, such as "device 3 x2.57" or "between_nodes x0.5".', "--what-if"
    )
    critical: bool = flag("Print the best strategy's critical path.", "--critical-path")
    trace: Path | None = option("Write the best strategy's timeline to this file.")
    picture: Path | None = option("Draw every rank's timeline to this PNG file.")


@verb
def simulate_command(options: SimulateOptions) -> None:
    """Predict strategies' times by simulating all ranks' programs; the fastest strategy is listed first.

    Computation time comes from the profile or, without one, from FLOPs and a datasheet. Communication time comes from
    exact bytes; transfers share ports and network cards. "busy" is the fraction of the iteration in which a rank
    computes, including tensor-parallel traffic. "exposed" is the mean time that ranks wait for weights (pull),
    gradients (push) and activations (p2p).

    Example: hydragraph simulate examples/demo.yaml --devices 4 --picture simulated.png --trace simulated.json, where
    the picture compares the best strategies, and https://ui.perfetto.dev opens the trace. For your own devices:
    --cluster cluster.yaml, a file that hg.Cluster.save wrote.
    """
    from hydragraph.cost.what_if import slowed, what_if
    from hydragraph.spec.health import Health
    from hydragraph.spec.home_text import owners_text

    config = options.load()
    options = on_planned_devices(options, config)
    rates = None if options.health is None else Health.load(options.health)
    inputs = options.read(config)
    # Reject wrong changes before the slow import of PyTorch.
    for change in options.changes or ():
        slowed(inputs.cluster, change)
    with progress("importing PyTorch") as say:
        strategies, costs = inputs.costs(say)
        if rates is not None:
            costs = costs.changed(health=rates)
        changes = {change: what_if(costs, change) for change in options.changes or ()}
        priced = simulated(inputs, strategies, costs, say)
    best = priced[0]
    print(costs.source_of(*strategies))
    if options.cluster is None and options.profile is None:
        print(default_devices_text(costs.ranks, config))
    _print_table(priced, costs.ranks)
    for shown in priced:
        # With `home: auto`, owners depend on the strategy.
        owned = costs.of_strategies(shown.strategy)
        text = owners_text(owned.home, [bucket.name for bucket in costs.buckets], costs.ranks)
        print(f"state of {shown.strategy.name}: {text}")
    for change, changed in changes.items():
        _print_change(priced, changed, change)
    if options.critical:
        print(best.timeline.critical_path)
    if options.trace is not None:
        best.timeline.save_trace(options.trace)
        print(f"wrote the timeline of {best.strategy.name} to {options.trace}: open it at https://ui.perfetto.dev")
    if options.picture is not None:
        from hydragraph.report.simulation_picture import write_timelines

        write_timelines(priced, options.picture)


def simulated(inputs: StepInputs, strategies: Sequence[Strategy], costs: Costs, say: Say) -> list[PricedStrategy]:
    """Simulate one step of each strategy; return the fastest first."""
    from hydragraph.report.simulation_price import price

    priced = []
    for number, strategy in enumerate(strategies, start=1):
        say(f"simulating {strategy.name} ({number} of {len(strategies)})")
        priced.append(price(costs, strategy, _assigned(inputs, costs, strategy)))
    return sorted(priced, key=lambda each: -each.tokens_per_s)


def _assigned(inputs: StepInputs, costs: Costs, strategy: Strategy) -> Assignment:
    """Return equal micro-batches if the user gave their number or size; otherwise, those of a run."""
    from hydragraph.commands.captured_model import run_assignment, step_lengths
    from hydragraph.report.simulation_price import share
    from hydragraph.spec.assignment import Assignment
    from hydragraph.spec.training_workload import full_lengths

    step = inputs.step
    config = inputs.config
    if inputs.files.lengths is not None:
        return run_assignment(config, costs, strategy, step_lengths(config, inputs.files.lengths), inputs.known)
    # Options determine whether micro-batches are equal or a run's.
    length = step.tokens or config.data.max_length
    lengths = full_lengths(config.data.tokens_per_step, length)
    if step.sequences is not None:
        lengths = [length] * step.sequences
    size = step.micro_batch or 1
    if step.micro_batches is not None:
        counts = read_counts(step.micro_batches, len(strategy.pipelines))
    elif step.micro_batch is not None:
        # Round up: 10 sequences in micro-batches of 4 give 3.
        counts = share(costs, strategy, length, -(-lengths.count(length) // size), size)
    else:
        strategy.check(costs.outline.layers, costs.ranks, costs.sizes.heads)
        return run_assignment(config, costs, strategy, lengths, inputs.known)
    return Assignment.even(counts, length, size)


def _print_change(priced: Sequence[PricedStrategy], changed: Costs, change: str) -> None:
    from hydragraph.report.simulation_price import price

    table = new_table(f"what if {change}", ("strategy", "iteration", "then", "change"))
    for before in priced:
        after = price(changed, before.strategy, before.assignment)
        more = f"{after.seconds / before.seconds - 1:+.1%}"
        table.add_row(escape(before.strategy.name), seconds_text(before.seconds), seconds_text(after.seconds), more)
    console().print(table)


def _print_table(priced: Sequence[PricedStrategy], devices: int) -> None:
    from hydragraph.ir.instruction import Stream

    copies = any(shown.strategy.offloads for shown in priced)
    streams = (Stream.PULL, Stream.PUSH, Stream.P2P, *(Stream.OFFLOAD,) * copies)
    exposed = (f"exposed {stream.value}" for stream in streams)
    headings = ("strategy", "micro-batches", "iteration", "tokens/s", *exposed, "ranks busy")
    table = new_table(
        f"simulated on {devices} device{'s' * (devices != 1)}, the best first",
        headings,
        left=("strategy", "ranks busy"),
    )
    for shown in priced:
        waits = (seconds_text(shown.exposed_s(stream)) for stream in streams)
        numbers = (seconds_text(shown.seconds), f"{shown.tokens_per_s:,.0f}", *waits, _busy_text(shown.busy()))
        table.add_row(escape(shown.strategy.name), counts_text(shown.assignment.counts), *numbers)
    console().print(table)
    tokens = {shown.tokens for shown in priced}
    if len(tokens) > 1:
        print("note: the strategies train on different numbers of tokens, so compare tokens/s, not seconds")


def _busy_text(busy: Sequence[float]) -> str:
    from hydragraph.ir.shared_programs_text import runs_text

    # Print consecutive ranks with equal percentages together.
    groups = groupby(enumerate(busy), lambda item: f"{item[1]:.0%}")
    return ", ".join(f"{runs_text([rank for rank, _ in group])} {text}" for text, group in groups)

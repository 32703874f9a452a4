"""`hydragraph simulate`: what strategies are expected to take on a cluster, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from hydragraph.commands.launch_process import quieten
from hydragraph.commands.options import (
    Config,
    CorrectionsFile,
    Debug,
    HomeText,
    LogLevel,
    Set,
    Strategies,
    check_counts,
    chosen_home,
    chosen_strategies,
    read_counts,
)
from hydragraph.report.number_text import console, counts_text, seconds_text
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.report.simulation_price import PricedStrategy
    from hydragraph.spec.assignment import Assignment
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.home import Home
    from hydragraph.spec.strategy import Strategy

EXAMPLE = (
    "Example: hydragraph simulate examples/demo.yaml --devices 4 --picture simulated.png --trace simulated.json, where "
    "the picture compares the best strategies, and https://ui.perfetto.dev opens the trace. For devices of your own: "
    "--cluster cluster.yaml, as hg.Cluster.save writes it."
)


@dataclass(frozen=True)
class Step:
    """Data of a simulated step; without any, the config's tokens in sequences of its maximum length.

    Attributes:
        micro_batches: micro-batches of each pipeline, such as "4,2".
        sequences: sequences of the step, instead of `micro_batches`.
        micro_batch: sequences of a micro-batch.
        tokens: tokens of a sequence.
        lengths: file of the lengths to draw a mini-batch from, instead of the others.

    Raises:
        ValueError: two of them contradict each other.
    """

    micro_batches: str | None = None
    sequences: int | None = None
    micro_batch: int = 1
    tokens: int | None = None
    lengths: Path | None = None

    def __post_init__(self) -> None:
        if self.lengths is not None and (self.micro_batches or self.sequences or self.tokens or self.micro_batch > 1):
            raise ValueError(
                "--lengths draws micro-batches; leave out --micro-batches, --micro-batch, --sequences and --tokens"
            )
        if self.micro_batches is not None:
            check_counts(self.micro_batches)
            if self.sequences is not None:
                raise ValueError("--micro-batches and --sequences both say how much a step trains on: give one of them")
        if self.sequences is not None and self.sequences % self.micro_batch:
            raise ValueError(
                f"--sequences {self.sequences} cannot be cut into micro-batches of {self.micro_batch}: give a multiple "
                "of --micro-batch"
            )


def simulate_command(
    config: Config,
    cluster: Annotated[
        Path | None, typer.Option(help="The YAML file of the devices and links; it has one device per rank.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Instead, so many H200s, eight in a node; default: the config's ranks.")
    ] = None,
    strategies: Strategies = None,
    home: HomeText = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            help="Micro-batches of each pipeline, such as 4,2; one number for all. Default: a step's tokens "
            "(data.tokens_per_step), each micro-batch assigned to the pipeline that would finish it first."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each sequence; default: data.max_length.")
    ] = None,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences of each micro-batch.")] = 1,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences of a step, instead of the micro-batches of each pipeline."),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Instead of equal micro-batches: a mini-batch drawn from these sequence lengths (one number per line, "
            "or a tokens.bin), assigned as a run would."
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="A file that hydragraph profile wrote; default: floating-point operations.")
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Without a profile: the part of the FLOP/s that computation reaches; default: a roofline."),
    ] = None,
    corrections: CorrectionsFile = None,
    health: Annotated[
        Path | None,
        typer.Option(help="A YAML file of ranks that are slow or lost, as in `3: 2.57` and `5: .inf` (hg.Health)."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", help='Also simulate with one number changed: "device 3 x2.57", "between_nodes x0.5".'
        ),
    ] = None,
    critical: Annotated[
        bool, typer.Option("--critical-path", help="Tell what the best strategy's end waited for.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the best strategy's timeline to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw what every rank does to this PNG file.")] = None,
    overrides: Set = None,
    log_level: LogLevel = None,
    debug: Debug = False,
) -> None:
    """Price the programs of all ranks under every strategy by event simulation; the best strategy comes first.

    Computation is priced by the profile, or by floating-point operations, and traffic by the exact bytes of every
    link; transfers share ports and network cards. Busy is the part of
    the iteration in which ranks compute, tensor-parallel traffic included; exposed is how long their computation waits
    for weights (pull), gradients (push) and activations (p2p), on average over ranks, as a run's metrics count it.
    """
    from hydragraph.spec.health import Health
    from hydragraph.spec.home_text import owners_text

    settings = TrainConfig.load(config, overrides or ())
    where = chosen_cluster(cluster, devices, settings.ranks)
    texts = chosen_strategies(strategies, settings.strategies, len(where.devices))
    step = Step(micro_batches, sequences, micro_batch, tokens, lengths)
    rates = None if health is None else Health.load(health)
    parsed, costs = strategies_and_costs(
        settings, where, texts, profile, efficiency, chosen_home(home, settings.home), corrections
    )
    if rates is not None:
        costs = costs.changed(health=rates)
    priced = _priced(settings, parsed, costs, step)
    print(costs.source)
    _print_table(priced, where)
    for shown, _ in priced:
        owned = costs.of_strategies(shown.strategy)
        text = owners_text(owned.home, [bucket.name for bucket in costs.buckets], costs.ranks)
        print(f"state of {shown.strategy.name}: {text}")
    for change in changes or ():
        _print_change(priced, costs, change)
    if critical:
        print(priced[0][0].timeline.critical_path)
    if trace is not None:
        priced[0][0].timeline.save_trace(trace)
        print(f"{trace}: the timeline of {priced[0][0].strategy.name}; https://ui.perfetto.dev opens it")
    if picture is not None:
        from hydragraph.report.simulation_picture import write_timelines

        write_timelines([shown for shown, _ in priced], picture)


def chosen_cluster(path: Path | None, devices: int | None, ranks: int) -> Cluster:
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.default_cluster import default_cluster

    if path is not None and devices is not None:
        raise ValueError("--cluster names the devices and --devices counts standard ones: give one of them")
    return default_cluster(devices or ranks) if path is None else Cluster.load(path)


def strategies_and_costs(
    config: TrainConfig,
    cluster: Cluster,
    texts: Sequence[str],
    profile: str | None,
    efficiency: float | None,
    home: Home,
    corrections: Path | None,
) -> tuple[tuple[Strategy, ...], Costs]:
    """Return the strategies and what prices them."""
    import torch

    from hydragraph.cost.costs import Costs
    from hydragraph.cost.datasheet import datasheet
    from hydragraph.frontend.capture import capture
    from hydragraph.train.config_checks import read_strategies
    from hydragraph.train.model import captured_loss, skeleton
    from hydragraph.train.plan_input import read_corrections, read_profile

    if profile is not None and efficiency is not None:
        raise ValueError("--profile has measured seconds and --efficiency prices a datasheet: give one of them")
    quieten()
    model = skeleton(config.model, config.data.vocab_size)
    strategies = read_strategies(texts, model, len(cluster.devices))
    known = read_corrections(corrections)
    pushed = getattr(torch, config.push_dtype).itemsize
    if profile is not None:
        return strategies, Costs(read_profile(profile), cluster, home=home, corrections=known, push_itemsize=pushed)
    screen = Console(stderr=True)
    with screen.status("capturing the model"):
        program = capture(model, dtype=getattr(torch, config.dtype), **captured_loss(config))
        degrees = sorted({stage.tp for s in strategies for p in s.pipelines for stage in p.stages})
        priced = datasheet(program, cluster, efficiency, degrees)
        return strategies, Costs(priced, cluster, home=home, corrections=known, push_itemsize=pushed)


def _priced(
    config: TrainConfig,
    strategies: Sequence[Strategy],
    costs: Costs,
    step: Step,
) -> list[tuple[PricedStrategy, Assignment]]:
    """Return the strategies, the one with the most tokens per second first, and what each ran."""
    from hydragraph.report.simulation_price import price

    screen = Console(stderr=True)
    with Progress(console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task("simulating", total=len(strategies))
        priced = []
        for strategy in strategies:
            bar.update(task, advance=1, description=escape(f"simulating {strategy.name}"))
            assignment = assigned(config, costs, strategy, step)
            priced.append((price(costs, strategy, assignment), assignment))
    return sorted(priced, key=lambda pair: -pair[0].tokens_per_s)


def assigned(config: TrainConfig, costs: Costs, strategy: Strategy, step: Step) -> Assignment:
    """Return what a strategy runs: equal micro-batches, or a mini-batch drawn from lengths as a run would assign it."""
    from hydragraph.report.simulation_price import share
    from hydragraph.spec.assignment import Assignment

    if step.lengths is not None:
        from hydragraph.planner.assignment.assign_mini_batch import assign_pipelines
        from hydragraph.report.candidate_comparison import mini_batches
        from hydragraph.train.plan_input import read_lengths

        data = [min(n, config.data.max_length) for n in read_lengths(step.lengths) if n]
        (batch,) = mini_batches(data, config.data.tokens_per_step, 1, 0)
        return assign_pipelines(costs.pipelines(strategy), batch)
    length = step.tokens or config.data.max_length
    if step.micro_batches is not None:
        counts = read_counts(step.micro_batches, len(strategy.pipelines))
    else:
        number = -(-config.data.tokens_per_step // (length * step.micro_batch))
        if step.sequences is not None:
            number = step.sequences // step.micro_batch
        counts = share(costs, strategy, length, number, step.micro_batch)
    return Assignment.even(counts, length, step.micro_batch)


def _print_change(priced: Sequence[tuple[PricedStrategy, Assignment]], costs: Costs, change: str) -> None:
    """Print what one changed number does to each strategy, the assignment being the same."""
    from hydragraph.cost.what_if import what_if
    from hydragraph.report.simulation_price import price

    changed = what_if(costs, change)
    table = Table(title=f"what if {escape(change)}", title_justify="left")
    table.add_column("strategy", overflow="fold")
    for heading in ("iteration", "then", "change"):
        table.add_column(heading, justify="right", overflow="fold")
    for before, assignment in priced:
        after = price(changed, before.strategy, assignment)
        more = f"{after.seconds / before.seconds - 1:+.1%}"
        table.add_row(escape(before.strategy.name), seconds_text(before.seconds), seconds_text(after.seconds), more)
    console().print(table)


def _print_table(priced: Sequence[tuple[PricedStrategy, Assignment]], cluster: Cluster) -> None:
    """Print a row per strategy."""
    from hydragraph.ir.instruction import Stream

    table = Table(title=f"simulated on {len(cluster.devices)} devices, the best first", title_justify="left")
    exposed = (Stream.PULL, Stream.PUSH, Stream.P2P)
    headings = ("micro-batches", "iteration", "tokens/s", *(f"exposed {stream.value}" for stream in exposed))
    table.add_column("strategy", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("ranks busy", overflow="fold")
    for shown, _ in priced:
        counts = counts_text(shown.micro_batches)
        rate = f"{shown.tokens_per_s:,.0f}"
        waits = (seconds_text(shown.exposed_s(stream)) for stream in exposed)
        table.add_row(
            escape(shown.strategy.name), counts, seconds_text(shown.seconds), rate, *waits, _busy_text(shown.busy())
        )
    console().print(table)
    tokens = {shown.tokens for shown, _ in priced}
    if len(tokens) > 1:
        print("note: strategies run different numbers of tokens here, so compare tokens/s, not seconds")


def _busy_text(busy: Sequence[float]) -> str:
    """Say how busy ranks are, neighbours that are alike together: "0-3 81%, 4 62%"."""
    parts = []
    for text, group in groupby(enumerate(busy), lambda item: f"{item[1]:.0%}"):
        ranks = [rank for rank, _ in group]
        parts.append(f"{ranks[0]}-{ranks[-1]} {text}" if len(ranks) > 1 else f"{ranks[0]} {text}")
    return ", ".join(parts)

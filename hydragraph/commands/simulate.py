"""`hydragraph simulate`: what strategies are expected to take on a cluster, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from hydragraph.commands.options import Config, Debug, Set, Strategies, chosen_strategies, read_counts
from hydragraph.commands.process import quieten
from hydragraph.commands.text import console, counts_text, seconds_text
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.commands.simulate_price import Priced
    from hydragraph.spec.cluster import Cluster

EXAMPLE = (
    "Example: hydragraph simulate examples/demo.yaml --devices 4 --picture simulated.png --trace simulated.json, where "
    "the picture compares the best strategies, and https://ui.perfetto.dev opens the trace. For devices of your own: "
    "--cluster cluster.yaml, as hg.Cluster.save writes it."
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
    micro_batches: Annotated[
        str | None,
        typer.Option(
            help="Of each pipeline, as in 4,2; one number is for all. Default: a step's tokens (data.tokens_per_step), "
            "each micro-batch going to the pipeline that ends it first."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one micro-batch, taken as one sequence; default: data.max_length.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write the best strategy's timeline to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw what every rank does to this PNG file.")] = None,
    overrides: Set = None,
    debug: Debug = False,
) -> None:
    """Price the programs of all ranks under every strategy by event simulation; the best strategy comes first.

    Computation is priced by floating-point operations, traffic by the exact bytes of every link. Busy is the part of
    the iteration in which ranks compute, tensor-parallel traffic included; exposed is how long their computation waits
    for weights (pull), gradients (push) and activations (p2p), on average over ranks, as a run's metrics count it.
    Whether a strategy fits into memory is not asked here.
    """
    settings = TrainConfig.load(config, overrides or ())
    where = _cluster(cluster, devices, settings.ranks)
    given = chosen_strategies(strategies, settings.strategies)
    found = _priced(settings, where, given, micro_batches, tokens or settings.data.max_length)
    _print_table(found, where)
    if trace is not None:
        _write_trace(found[0], trace)
    if picture is not None:
        from hydragraph.commands.simulate_picture import write_timelines

        write_timelines(found, picture)


def _cluster(path: Path | None, devices: int | None, ranks: int) -> Cluster:
    from hydragraph.bench.link import default_cluster
    from hydragraph.spec.cluster import Cluster

    if path is not None and devices is not None:
        raise ValueError("--cluster names the devices and --devices counts standard ones: give one of them")
    return default_cluster(devices or ranks) if path is None else Cluster.load(path)


def _priced(
    config: TrainConfig, cluster: Cluster, texts: Sequence[str], micro_batches: str | None, tokens: int
) -> list[Priced]:
    """Return the strategies, the one with the most tokens per second first."""
    import torch

    from hydragraph.commands.simulate_price import price, share
    from hydragraph.frontend.capture import capture
    from hydragraph.train.loop import read_strategies
    from hydragraph.train.model import skeleton

    quieten()
    model = skeleton(config.model, config.data.vocab_size)
    strategies = read_strategies(texts, model, len(cluster.devices))
    screen = Console(stderr=True)
    with Progress(console=screen, disable=not screen.is_terminal, transient=True) as bar:
        task = bar.add_task("capturing the model", total=1 + len(strategies))
        program = capture(model, dtype=getattr(torch, config.dtype))
        found, in_all = [], -(-config.data.tokens_per_step // tokens)
        for strategy in strategies:
            bar.update(task, advance=1, description=escape(f"simulating {strategy.name}"))
            if micro_batches is None:
                counts = share(program, strategy, cluster, tokens, in_all)
            else:
                counts = read_counts(micro_batches, len(strategy.pipelines))
            found.append(price(program, strategy, cluster, tokens, counts))
    return sorted(found, key=lambda each: -each.tokens_per_s)


def _print_table(found: Sequence[Priced], cluster: Cluster) -> None:
    """Print a row per strategy."""
    from hydragraph.ir.instruction import Stream

    table = Table(title=f"simulated on {len(cluster.devices)} devices, the best first", title_justify="left")
    exposed = (Stream.PULL, Stream.PUSH, Stream.P2P)
    headings = ("micro-batches", "iteration", "tokens/s", *(f"exposed {stream.value}" for stream in exposed))
    table.add_column("strategy", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("ranks busy", overflow="fold")
    for each in found:
        counts, rate = counts_text(each.micro_batches), f"{each.tokens_per_s:,.0f}"
        waits = (seconds_text(each.exposed_s(stream)) for stream in exposed)
        table.add_row(
            escape(each.strategy.name), counts, seconds_text(each.seconds), rate, *waits, _busy_text(each.busy())
        )
    console().print(table)
    tokens = {each.tokens for each in found}
    if len(tokens) > 1:
        print("note: strategies run different numbers of tokens here, so compare tokens/s, not seconds")


def _busy_text(busy: Sequence[float]) -> str:
    """Say how busy ranks are, neighbours that are alike together: "0-3 81%, 4 62%"."""
    parts = []
    for text, group in groupby(enumerate(busy), lambda item: f"{item[1]:.0%}"):
        ranks = [rank for rank, _ in group]
        parts.append(f"{ranks[0]}-{ranks[-1]} {text}" if len(ranks) > 1 else f"{ranks[0]} {text}")
    return ", ".join(parts)


def _write_trace(priced: Priced, path: Path) -> None:
    """Write a timeline in the form of a run's trace."""
    from hydragraph.ir.text import instruction_text
    from hydragraph.runtime.trace import Span, write_trace

    spans = (
        [
            Span(0, s.instruction.stream.value, " ".join(instruction_text(s.instruction).split()), s.start_s, s.end_s)
            for s in rank
            if s.seconds > 0
        ]
        for rank in priced.timeline.ranks
    )
    write_trace(spans, path)
    print(f"{path}: the timeline of {priced.strategy.name}; https://ui.perfetto.dev opens it")

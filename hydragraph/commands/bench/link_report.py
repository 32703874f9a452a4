"""The report of `bench link`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from hydragraph.cluster.launch import launch
from hydragraph.commands.bench.bench_models import meta_model
from hydragraph.commands.bench.bench_options import BenchLinkOptions
from hydragraph.commands.bench.bench_table import BenchReport, Cell, PictureBar
from hydragraph.commands.bench.link_measure import measure_rank, over_ranks
from hydragraph.commands.bench.link_overlap import HOME, Leg, Overlap, simulated
from hydragraph.cost.link_bytes import Direction, traffic
from hydragraph.engine.candidate_strategies import home_on
from hydragraph.frontend.capture import capture
from hydragraph.ir.home_layout import HomeLayouts
from hydragraph.ir.program import Program
from hydragraph.passes.weight_layouts import layouts
from hydragraph.spec.cluster import Cluster
from hydragraph.spec.default_cluster import default_cluster
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import Strategy

COLUMNS = (
    *("link", "how", "MB between ranks", "MB kept local", "most MB into or out of a rank"),
    *("ms alone", "ms exposed", "ms of the step", "% overlapped"),
)
MATRIX_RANKS = 8
MEASURED_RANKS = 4
MEASURED_TOKENS = 512
ROUNDS = 5


def bench_link(options: BenchLinkOptions, tell: Callable[[str], None] = lambda what: None) -> BenchReport:
    """Report bytes and seconds of a push from one strategy and a pull to another.

    Raises:
        ValueError: a strategy does not fit the model or cluster, or `source` and `target` are both "home".
    """
    if options.source == options.target == HOME:
        raise ValueError("--from home --to home has no traffic: name a strategy, such as --to '<tp2,pp1>'")
    cluster = None if options.cluster is None else Cluster.load(options.cluster)
    home = Home.parse(options.home)
    tell("capturing the model")
    program = capture(meta_model(options.model), dtype=getattr(torch, options.dtype))
    ways = _strategies(options, program)
    strategies = [strategy for _, strategy in ways]
    ranks = 1 + max(device for strategy in strategies for device in strategy.devices)
    for strategy in strategies:
        strategy.check(program.layers, ranks, program.heads)
    cluster = cluster or default_cluster(ranks)
    _check_ranks(cluster, ranks, options.measure)
    home.check(ranks, [bucket.name for bucket in program.buckets])
    nodes = [device.node for device in cluster.devices]
    home = home_on(program, strategies, home, nodes)
    homes = HomeLayouts(home.on(nodes), ranks).by_name(program.buckets)
    legs = [Leg(way, used, traffic(program, layouts(program, used, homes), way)) for way, used in ways]
    rows: list[tuple[Cell, ...]] = []
    bars: list[PictureBar] = []
    for leg in legs:
        tell(f"simulating {leg.name}")
        prediction = simulated(program, leg, cluster, options.tokens, options.micro_batches, home)
        rows.append(_row(leg, "simulated", leg.traffic.total, prediction))
        bars += [
            PictureBar(leg.name, "alone", 1e3 * prediction.alone_s),
            PictureBar(leg.name, "exposed", 1e3 * prediction.exposed_s),
        ]
    notes = list(_notes(options, program, cluster, ranks))
    if options.measure:
        tell(f"measuring on {ranks} local ranks")
        rows += _measured(options.model, home, legs, ranks)
        notes.append(
            f"Measured on {ranks} local ranks over gloo in fp32 with {MEASURED_TOKENS} tokens: medians of "
            f"{ROUNDS} steps, averaged over ranks. Computation and messages share the CPU cores."
        )
    blocks = tuple(_matrix(leg, ranks) for leg in legs if 1 < ranks <= MATRIX_RANKS)
    count = sum(b.size for b in program.buckets)
    size = f"{count / 1e9:.3g} B" if count >= 1e8 else f"{count / 1e6:.3g} M"
    title = f"Link, {options.model}, {size} parameters, {ranks} ranks"
    return BenchReport(title, COLUMNS, tuple(rows), tuple(notes), blocks, (), tuple(bars), "ms (simulated)")


def _strategies(options: BenchLinkOptions, program: Program) -> list[tuple[Direction, Strategy]]:
    ends: tuple[tuple[Direction, str], ...] = (("push", options.source), ("pull", options.target))
    return [(d, Strategy.read(text, program.layers)) for d, text in ends if text != HOME]


def _check_ranks(cluster: Cluster, ranks: int, measure: bool | None) -> None:
    if len(cluster.devices) != ranks:
        raise ValueError(
            f"--cluster has {len(cluster.devices)} devices, but the strategies have {ranks} ranks: give one device per "
            "rank"
        )
    if measure and ranks > MEASURED_RANKS:
        raise ValueError(f"--measure runs up to {MEASURED_RANKS} local ranks, not {ranks}: use --no-measure")


def _row(leg: Leg, how: str, total: int, overlap: Overlap) -> tuple[Cell, ...]:
    sizes = (total / 1e6, leg.traffic.local / 1e6, leg.traffic.most / 1e6)
    times = (1e3 * overlap.alone_s, 1e3 * overlap.exposed_s, 1e3 * overlap.step_s)
    return (leg.name, how, *sizes, *times, overlap.percent)


def _measured(model: str, home: Home, legs: Sequence[Leg], ranks: int) -> list[tuple[Cell, ...]]:
    strategies = tuple(leg.strategy for leg in legs)
    args = (model, strategies, MEASURED_TOKENS, ROUNDS, home)
    if ranks == 1:
        per_rank = [measure_rank(*args)]
    else:
        per_rank = launch(measure_rank, ranks, *args, timeout=timedelta(minutes=5))
    rows = []
    for i, leg in enumerate(legs):
        spread = over_ranks([rank[i][leg.direction] for rank in per_rank])
        rows.append(_row(leg, "measured", spread.sent, spread.overlap))
    return rows


def _notes(options: BenchLinkOptions, program: Program, cluster: Cluster, ranks: int) -> tuple[str, ...]:
    name = str(program.dtype).removeprefix("torch.")
    device = cluster.devices[0]
    inner = cluster.node(cluster.node_of(0)).inner
    what = f"{ranks} devices of {device.flops_per_s / 1e12:.3g} TFLOP/s, {inner.bytes_per_s / 1e9:g} GB/s"
    return (
        f"The bytes are exact. Weights are pulled in {name}, and gradients are pushed in fp32. Elements that a rank "
        "both owns and uses are copied locally.",
        f"Simulated: {what} within a node; {options.micro_batches} micro-batches of {options.tokens:,} tokens per "
        'pipeline. "alone" is the time without computation, "exposed" is the time added to the step, and "overlapped" '
        "is 1 - exposed / alone. Computation times come from a datasheet. Streams share ports and network cards.",
    )


def _matrix(leg: Leg, ranks: int) -> str:
    lines = [f"{leg.name}: MB from rank (row) to rank (column)", "     " + "".join(f"{r:>9}" for r in range(ranks))]
    for source in range(ranks):
        cells = (leg.traffic.pairs.get((source, target), 0) / 1e6 for target in range(ranks))
        lines.append(f"{source:>5}" + "".join(f"{cell:>9.3g}" if cell else f"{'.':>9}" for cell in cells))
    return "\n".join(lines)

"""`hydragraph check`: memory and seconds of a run, predicted without weights, data or devices."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hydragraph.commands.options import Config, CorrectionsFile, Debug, LogLevel, Set, Strategies, chosen_strategies
from hydragraph.report.number_text import bytes_text, console, seconds_text
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.ir.program import Program
    from hydragraph.report.memory_fit import MemoryFit
    from hydragraph.spec.assignment import Assignment
    from hydragraph.spec.strategy import Strategy

EXAMPLE = (
    "Example: hydragraph check examples/demo.yaml --memory 2e9, or --cluster cluster.yaml for your own devices. "
    "With --profile profile.json, seconds come from measurements."
)


def check_command(
    config: Config,
    strategies: Strategies = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The YAML file of the devices and links; default: H200s, one per rank.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=1, help="Memory of each rank in bytes, such as 16e9, instead of --cluster.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="Sequence lengths to draw a step from; default: sequences of data.max_length, the worst case."
        ),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="A file that hydragraph profile wrote, to predict seconds.")
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(help="Without a profile: the part of the FLOP/s that computation reaches; default: a roofline."),
    ] = None,
    corrections: CorrectionsFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    overrides: Set = None,
    log_level: LogLevel = None,
    debug: Debug = False,
) -> None:
    """Predict for each strategy whether a run fits into memory, what takes most of it, and the seconds of a step.

    The command refuses settings, files, models, strategies and optimizers that training would refuse, and reports
    missing data.

    Peak memory is found by walking every rank's program with the sizes of its compiled graphs and of the optimizer's
    state; advice is checked in the same way. MFU is the model's operations, without recomputation, relative to what the
    devices could compute in that time. To check a GPU run on a machine without GPUs, add --set device=cuda. The exit
    code is 1 if a strategy does not fit.
    """
    from hydragraph.report.memory_fit import advice, fit
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.home_text import owners_text
    from hydragraph.train.config_checks import check_settings
    from hydragraph.train.model_flops import step_flops

    if cluster is not None and memory is not None:
        raise ValueError("--cluster and --memory both set the memory of devices: give one of them")
    if profile is not None and efficiency is not None:
        raise ValueError("--profile has measured seconds and --efficiency prices a datasheet: give one of them")
    settings = TrainConfig.load(config, overrides or ())
    ranks = settings.ranks if cluster is None else len(Cluster.load(cluster).devices)
    texts = chosen_strategies(strategies, settings.strategies, ranks)
    check_settings(replace(settings, strategies=texts), ranks)
    _look_at_data(settings)
    parsed, costs, program = _costs(settings, texts, cluster, memory, profile, efficiency, corrections)
    peak = math.fsum(device.flops_per_s for device in costs.cluster.devices)
    comparable = profile is None or cluster is not None  # a profile may be of other devices than the default ones
    screen = Console(stderr=True)
    fits = []
    for strategy in parsed:
        with screen.status(escape(f"checking {strategy.name}")):
            assignment = _step(settings, strategy, lengths)
            fitting = fit(costs, strategy, assignment)
            flops = step_flops(program, [n for pipeline in assignment.tokens for batch in pipeline for n in batch])
            mfu = flops / (peak * fitting.seconds) if comparable else None
            fits.append((fitting, mfu, advice(costs, fitting, assignment)))
    if as_json:
        records = [{**fitting.as_dict(), "mfu": mfu, "change_first": what} for fitting, mfu, what in fits]
        print(json.dumps({"source": costs.source, "strategies": records}, indent=1))
    else:
        print(costs.source)
        if settings.objective is not None:
            print("a step scores its answers first: a forward pass, about a third more, which the seconds leave out")
        print(f"state: {owners_text(costs.home, [bucket.name for bucket in costs.buckets], costs.ranks)}")
        _print(fits)
        for fitting, *_ in fits:
            console().print(_parts(fitting))
    if not all(fitting.fits for fitting, *_ in fits):
        raise typer.Exit(1)


def _look_at_data(config: TrainConfig) -> None:
    """Print problems with the data; this is not an error, because the data may be on another machine."""
    from hydragraph.train.data import check_data, data_remarks

    try:
        check_data(config)
        for sentence in data_remarks((*config.data.sources, *config.data.evaluation.values())):
            print(f"data: {sentence}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"data: training here would end with: {error}", file=sys.stderr)


def _costs(
    config: TrainConfig,
    texts: tuple[str, ...],
    cluster: Path | None,
    memory: float | None,
    profile: str | None,
    efficiency: float | None,
    corrections: Path | None,
) -> tuple[tuple[Strategy, ...], Costs, Program]:
    """Return the strategies, their costs from the compiled graphs, and the model."""
    import torch

    from hydragraph.commands.captured_model import captured
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.datasheet import datasheet
    from hydragraph.cost.rank_memory import CompiledBlocks
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.default_cluster import default_cluster
    from hydragraph.train.config_checks import read_strategies
    from hydragraph.train.optimizer import state_bytes
    from hydragraph.train.plan_input import read_corrections, read_profile

    where = default_cluster(config.ranks) if cluster is None else Cluster.load(cluster)
    if memory is not None:
        where = replace(where, devices=tuple(replace(d, memory_bytes=int(memory)) for d in where.devices))
    with Console(stderr=True).status("capturing the model"):
        model, program, variants = captured(config)
        strategies = read_strategies(texts, model, len(where.devices))
    device = torch.device(config.device or "cpu")
    blocks = CompiledBlocks(program, variants.get)
    named = {stage.tp for s in strategies for p in s.pipelines for stage in p.stages}
    most = max(Counter(device.node for device in where.devices).values())
    doubled = {tp << k for tp in named for k in range(most.bit_length()) if tp << k <= most}  # advice may double them
    degrees = sorted(named | set(filter(program.allows, doubled)))
    priced = datasheet(program, where, efficiency, degrees) if profile is None else read_profile(profile)
    costs = Costs(
        priced,
        where,
        home=config.home,
        blocks=blocks,
        state_bytes=state_bytes(config.optimizer, program.dtype, device),
        corrections=read_corrections(corrections),
        push_itemsize=getattr(torch, config.push_dtype).itemsize,
    )
    return strategies, costs.of_strategies(*strategies, tokens=config.data.max_length), program


def _step(config: TrainConfig, strategy: Strategy, lengths: Path | None) -> Assignment:
    """Return the assignment of one step, as a run without a profile makes it."""
    from hydragraph.planner.quick_plan import assign

    longest = config.data.max_length
    tokens = config.data.tokens_per_step
    if lengths is None:
        return assign(strategy, [longest] * -(-tokens // longest))
    from hydragraph.report.candidate_comparison import mini_batches
    from hydragraph.train.plan_input import read_lengths

    data = [min(n, longest) for n in read_lengths(lengths) if n]
    return assign(strategy, mini_batches(data, tokens, 1, 0)[0])


def _parts(fitting: MemoryFit) -> Table:
    """Return the table of every rank's peak by kind; neighbouring ranks with equal values share a row."""
    from dataclasses import fields

    from hydragraph.cost.rank_memory import Memory
    from hydragraph.report.memory_fit import WORDS

    names = [field.name for field in fields(Memory)]
    table = Table(title=f"{escape(fitting.strategy.name)}: peak of every rank", title_justify="left")
    table.add_column("ranks")
    for heading in ("peak", *(WORDS[name] for name in names)):
        table.add_column(heading, justify="right", overflow="fold")
    for memory, group in groupby(enumerate(fitting.memory), lambda pair: pair[1]):
        ranks = [rank for rank, _ in group]
        who = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
        table.add_row(who, bytes_text(memory.total), *(bytes_text(getattr(memory, name)) for name in names))
    return table


def _print(fits: list[tuple[MemoryFit, float | None, str]]) -> None:
    table = Table(title="will it fit", title_justify="left")
    table.add_column("strategy", overflow="fold")
    for heading in ("", "peak", "of", "rank", "mostly", "a step takes", "MFU", "change first"):
        table.add_column(
            heading, justify="right" if heading in ("peak", "of", "rank", "MFU") else "left", overflow="fold"
        )
    for fitting, mfu, what in fits:
        rank = fitting.tightest
        sizes = (bytes_text(fitting.memory[rank].total), bytes_text(fitting.limits[rank]), str(rank))
        state = "fits" if fitting.fits else "DOES NOT FIT"
        used = "" if mfu is None else f"{mfu:.1%}"
        took = seconds_text(fitting.seconds)
        table.add_row(escape(fitting.strategy.name), state, *sizes, fitting.largest, took, used, escape(what))
    console().print(table)

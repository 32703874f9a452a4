"""`hydragraph check`: predict a run's memory and seconds per step."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from hydragraph.commands.options import (
    ConfigOptions,
    PricedOptions,
    check_memory,
    check_prices,
    check_strategies,
    default_devices_text,
    efficiency_option,
    json_option,
    on_planned_devices,
    option,
    strategies_option,
    verb,
    with_strategies,
)
from hydragraph.commands.progress import progress
from hydragraph.commands.text_table import new_table
from hydragraph.report.number_text import bytes_text, console, seconds_text
from hydragraph.spec.cluster import MOST_DEVICES
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.report.memory_fit import MemoryFit
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ConfigOptions, PricedOptions):
    strategies: list[str] | None = strategies_option()
    arch: str | None = option("GPU architecture, instead of --cluster: sm_80 (A100), sm_90 (H100) or sm_100 (B200).")
    devices: int | None = option(
        "Number of GPUs, instead of --cluster; default: the config's ranks.", min=1, max=MOST_DEVICES
    )
    memory: float | None = option("Memory of each rank in bytes, such as 16e9, instead of --cluster.")
    lengths: Path | None = option(
        "File of sequence lengths from which a step is drawn; default: the worst case, in which all "
        "sequences have data.max_length tokens."
    )
    efficiency: float | None = efficiency_option()
    as_json: bool = json_option()

    def prices(self, config: TrainConfig) -> bool:
        told = (self.cluster, self.arch, self.devices, self.profile, self.efficiency, self.corrections)
        return config.device != "cpu" or any(option is not None for option in told)


@verb
def check_command(options: CheckOptions) -> None:
    """Predict whether each strategy fits into memory, what uses most of the memory, and the step time.

    The command rejects settings, files, models, strategies and optimizers that training would reject, and reports
    missing data. Without --cluster and plan.cluster, each rank is an H200. With `device: cpu`, ranks share this
    machine's memory equally, and no step time is predicted.

    Peak memory, including that of "change first", is computed by stepping through every rank's program with the sizes
    of its compiled graphs and optimizer state. MFU is the model's FLOP/s, without recomputation and gradients of frozen
    weights, divided by the devices' peak. With --arch, or if the config does not set `device`, the run is assumed to
    use GPUs. --arch also predicts kernel launches' share of the computation time, and the number of tokens below which
    it exceeds half. The exit code is 1 if a strategy exceeds the memory, or if the data would make training on this
    machine fail.

    Example: hydragraph check examples/demo.yaml --memory 2e9, or --cluster cluster.yaml for your own devices. With
    --profile profile.json, seconds are predicted from measurements.
    """
    from hydragraph.train.plan_input import CostFiles, read_costs

    check_memory("--memory", options.memory)
    check_prices(options.profile, options.efficiency)
    if options.arch is not None and options.profile is not None:
        raise ValueError("--profile uses measured seconds and --arch uses a datasheet: give only one of them")
    launches = options.arch is not None and options.efficiency is None
    config = options.load() if options.arch is None else replace(options.load(), device="cuda")
    options = on_planned_devices(options, config)
    if config.plan.cluster is None or options.cluster != Path(config.plan.cluster):
        config = replace(config, plan=replace(config.plan, cluster=None, health=None))
    known = config.plan.choose and (options.cluster is not None or options.profile is not None)
    files = CostFiles.read(options.profile, options.corrections, options.lengths)
    cluster = _cluster(options, config)
    ranks = len(cluster.devices)
    config = with_strategies(config, options.strategies, ranks)
    check_strategies(config.strategies, config.model, ranks)
    config.home.check(ranks)

    priced = options.prices(config)
    comparable = priced and (options.profile is None or options.cluster is not None)
    with progress("importing PyTorch") as say:
        from hydragraph.commands.captured_model import run_assignment, step_lengths, strategies_and_costs
        from hydragraph.cost.published_errors import MEMORY
        from hydragraph.report.memory_fit import advice, fit
        from hydragraph.spec.home_text import owners_text
        from hydragraph.train.config_checks import check_settings
        from hydragraph.train.model_flops import step_flops

        if config.plan.cluster is not None:
            read_costs(config.plan, config.ranks)
        check_settings(replace(config, device=config.device or "cuda"), ranks)
        trainable = _look_at_data(config)
        cluster = _with_memory(options, config, cluster)
        found = strategies_and_costs(config, cluster, files, options.efficiency, say, doubled=True)
        strategies, costs, program = found
        costs = costs.of_strategies(*strategies, tokens=config.data.max_length)
        lengths = step_lengths(config, files.lengths)
        peak = math.fsum(device.flops_per_s for device in cluster.devices)
        fits = []
        for number, strategy in enumerate(strategies, start=1):
            say(f"checking {strategy.name} ({number} of {len(strategies)})")
            assignment = run_assignment(config, costs, strategy, lengths, known)
            fitting = fit(costs, strategy, assignment)
            flops = step_flops(program, [n for n in assignment.lengths if n])
            mfu = flops / (peak * fitting.seconds) if comparable else None
            fits.append((fitting, mfu, advice(costs, fitting, assignment, may_stream=not config.deterministic)))
    source = f"{costs.source_of(*strategies)}; {MEMORY}"
    if options.as_json:
        unknown = {} if priced else {"seconds": None}
        records = []
        for fitting, mfu, what in fits:
            records.append({**fitting.as_dict(), **unknown, "mfu": mfu, "change_first": what})
            if launches:
                records[-1]["launches"] = _launch_share(costs, fitting.strategy, config.data.max_length)
        print(json.dumps({"source": source, "strategies": records}, indent=1))
    else:
        print(source if priced else _UNKNOWN)
        if options.cluster is None and options.arch is None and options.profile is None and priced:
            print(default_devices_text(ranks, config))
        if config.objective is not None:
            print(
                "each step begins with a forward pass that scores the answers: add about a third to the predicted "
                "seconds, which do not include it"
            )
        print(f"state: {owners_text(costs.home, [bucket.name for bucket in costs.buckets], ranks)}")
        console().print(_fit_table(fits, priced))
        for fitting, *_ in fits:
            if launches:
                print(_launches(costs, fitting.strategy, config.data.max_length))
            console().print(_memory_table(fitting))
    if not (trainable and all(fitting.fits for fitting, *_ in fits)):
        raise typer.Exit(1)


def _cluster(options: CheckOptions, config: TrainConfig) -> Cluster:
    from hydragraph.kernels.gpu_arch import arch_of
    from hydragraph.spec.cluster import Cluster, Device
    from hydragraph.spec.default_cluster import default_cluster

    if options.cluster is not None:
        for option in ("memory", "arch", "devices"):
            if getattr(options, option) is not None:
                raise ValueError(f"--cluster and --{option} both describe the devices: give one of them")
        return Cluster.load(options.cluster)
    ranks = options.devices or config.ranks
    if options.arch is None:
        return default_cluster(ranks)
    gpu = arch_of(options.arch)
    device = Device(gpu.flops_per_s, gpu.memory_bytes, gpu.memory_bytes_per_s)
    return default_cluster(ranks, device, gpu.link_bytes_per_s)


def _with_memory(options: CheckOptions, config: TrainConfig, cluster: Cluster) -> Cluster:
    if options.memory is not None:
        memory_bytes = int(options.memory)
    elif options.prices(config):
        return cluster
    else:
        from hydragraph.runtime.profile_measurement import USABLE, host_memory

        memory_bytes = int(USABLE * host_memory() / len(cluster.devices))
    return replace(cluster, devices=tuple(replace(device, memory_bytes=memory_bytes) for device in cluster.devices))


def _launch_share(costs: Costs, strategy: Strategy, tokens: int) -> float:
    stages = [stage for pipeline in costs.pipelines(strategy) for stage in pipeline.parts]
    return max(sum(stage.seconds([0])) / sum(stage.seconds([tokens])) for stage in stages)


def _launches(costs: Costs, strategy: Strategy, longest: int) -> str:
    bound = next(tokens for tokens in (1 << k for k in range(30)) if _launch_share(costs, strategy, tokens) < 0.5)
    return (
        f"{strategy.name}: kernel launches are predicted to take {_launch_share(costs, strategy, longest):.1%} of the "
        f"computation time for micro-batches of {longest:,} tokens, and more than half for fewer than about {bound:,} "
        "tokens"
    )


_UNKNOWN = (
    "with 'device: cpu', the step time on this machine is unknown: measure with hydragraph profile and pass --profile, "
    "or predict the step time on GPUs with --arch or --cluster"
)


def _look_at_data(config: TrainConfig) -> bool:
    from hydragraph.train.data import check_data, data_remarks

    try:
        check_data(config)
        for sentence in data_remarks(config):
            print(f"data: {sentence}", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"data: training on this machine would fail: {error}", file=sys.stderr)
        return False
    return True


def _memory_table(fitting: MemoryFit) -> Table:
    from hydragraph.cost.rank_memory import Memory
    from hydragraph.ir.shared_programs_text import runs_text
    from hydragraph.report.memory_fit import WORDS

    offloads = fitting.strategy.offloads
    names = [field.name for field in fields(Memory) if offloads or field.name != "host"]
    headings = ("ranks", "peak", *(WORDS[name] for name in names))
    table = new_table(f"{fitting.strategy.name}: peak memory of every rank", headings, left=("ranks",))
    for memory, group in groupby(enumerate(fitting.memory), lambda pair: pair[1]):
        who = runs_text([rank for rank, _ in group])
        table.add_row(who, bytes_text(memory.total), *(bytes_text(getattr(memory, name)) for name in names))
    return table


def _fit_table(fits: Sequence[tuple[MemoryFit, float | None, str]], priced: bool) -> Table:
    left = ("strategy", "", "mostly", "a step takes", "change first")
    headings = ("strategy", "", "peak", "of", "rank", "mostly", "a step takes", "MFU", "change first")
    table = new_table("will it fit", headings, left)
    for fitting, mfu, what in fits:
        rank = fitting.tightest
        sizes = (bytes_text(fitting.memory[rank].total), bytes_text(fitting.limits[rank]), str(rank))
        state = "fits" if fitting.fits else "DOES NOT FIT"
        used = "" if mfu is None else f"{mfu:.1%}"
        took = seconds_text(fitting.seconds) if priced else "unknown"
        table.add_row(escape(fitting.strategy.name), state, *sizes, fitting.largest, took, used, escape(what))
    return table

"""`hydragraph report`: show a simulation, plan or run in one HTML file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hydragraph.commands.options import (
    PricedOptions,
    StrategyOptions,
    argument,
    check_written,
    devices_option,
    on_planned_devices,
    option,
    set_option,
    verb,
)
from hydragraph.commands.progress import progress
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.report.facts import ReportContents


@dataclass(frozen=True, kw_only=True)
class ReportOptions(PricedOptions, StrategyOptions):
    source: Path = argument("A run's folder, a run's YAML file, or a plan's JSON file.")
    output: Path | None = option(
        "The HTML file; default: report.html in the run's folder, or the source's name with .html."
    )
    devices: int | None = devices_option()
    overrides: list[str] | None = set_option()


_SIMULATED = ("devices", "strategies", "home", "overrides")
_PRICED = ("cluster", "profile", "corrections")


@verb
def report_command(options: ReportOptions) -> None:
    """Write one HTML file with timelines, memory, traffic, and a comparison of strategies.

    The report of a config simulates its strategies. The report of a plan explains why rivals are worse. The report of a
    run shows losses, speed, lost, slow and new ranks and, if traced, predicted and measured times.

    Examples: hydragraph report examples/demo.yaml; hydragraph report runs/demo; hydragraph report plan.json, which
    hydragraph plan --cluster cluster.yaml --json wrote.
    """
    source = options.source
    if not source.exists():
        raise ValueError(f"{source} does not exist: name a run's YAML file, a run's folder, or a plan's JSON file")
    path = options.output or (source / "report.html" if source.is_dir() else source.with_suffix(".html"))
    check_written("--output", path)
    if source.is_dir():
        options.refuse(_SIMULATED, "is for simulating a config: omit it")
        report = _of_run(options)
    elif source.suffix == ".json":
        options.refuse(_SIMULATED + _PRICED, "does not affect a finished plan: omit it")
        report = _of_plan(source)
    else:
        report = _of_config(options)
    from hydragraph.report.page import write_report

    write_report(report, path)
    print(f"wrote {path} ({path.stat().st_size / 1e6:.2g} MB): open it in a browser")


def _of_config(options: ReportOptions) -> ReportContents:
    from hydragraph.commands.simulate import StepOptions, simulated

    step_options = {name: getattr(options, name) for name in _SIMULATED + _PRICED}
    step = StepOptions(config=options.source, **step_options)
    config = step.load()
    inputs = on_planned_devices(step, config).read(config)

    from hydragraph.report.simulation_report import simulation_report

    with progress("importing PyTorch") as say:
        strategies, costs = inputs.costs(say)
        priced = simulated(inputs, strategies, costs, say)
    return simulation_report(options.source.name, costs, priced)


def _of_plan(source: Path) -> ReportContents:
    from hydragraph.report.plan_report import plan_report

    try:
        return plan_report(source.name, json.loads(source.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _of_run(options: ReportOptions) -> ReportContents:
    from hydragraph.commands.compare import run_costs, run_inputs
    from hydragraph.cost.trace_file import read_trace
    from hydragraph.report.run_report import run_report
    from hydragraph.train.run_folder import RunFolder
    from hydragraph.train.step_metrics import read_metrics
    from hydragraph.train.stragglers.run_events import read_events

    folder = RunFolder(options.source)
    name = folder.path.name
    metrics = read_metrics(folder.metrics)
    if not metrics or not folder.config.exists():
        raise ValueError(f"{folder.path} contains no steps of a run: pass the output folder of hydragraph train")
    events = read_events(folder.events)
    if not folder.trace.exists():
        options.refuse(_PRICED, "is for a traced run, and this run has no trace: omit it")
        return run_report(name, metrics, None, events)
    trace = read_trace(folder.trace)
    config = TrainConfig.load(folder.config)
    try:
        inputs = run_inputs(config, options)
        costs = run_costs(config, len(trace.ranks), *inputs)
        return run_report(name, metrics, (costs, trace), events)
    except ValueError as error:
        if any(getattr(options, option) is not None for option in _PRICED):
            raise
        print(f"the trace cannot be simulated, so the report omits it: {error}", file=sys.stderr)
        return run_report(name, metrics, None, events)

"""`hydragraph report`: what a simulation, a plan or a run has to say, as one HTML file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydragraph.commands.options import (
    CorrectionsFile,
    Debug,
    HomeText,
    LogLevel,
    Set,
    Strategies,
    check_written,
    chosen_home,
    chosen_strategies,
)
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.report.facts import Report

EXAMPLE = (
    "Examples: hydragraph report examples/demo.yaml simulates the config's strategies; hydragraph report runs/demo "
    "shows a run, with timelines where it was trained with --trace; hydragraph report plan.json shows what hydragraph "
    "plan --cluster cluster.yaml --json wrote."
)


def report_command(
    source: Annotated[Path, typer.Argument(help="A run's folder, a run's YAML file, or a plan's JSON file.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The HTML file; default: report.html in the run's folder, or the file's name with .html."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The YAML file of devices and links; it has one device per rank.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Instead, so many H200s, eight in a node; default: the config's ranks.")
    ] = None,
    strategies: Strategies = None,
    home: HomeText = None,
    profile: Annotated[
        str | None, typer.Option(help="A file that hydragraph profile wrote; default: floating-point operations.")
    ] = None,
    corrections: CorrectionsFile = None,
    overrides: Set = None,
    log_level: LogLevel = None,
    debug: Debug = False,
) -> None:
    """Write one HTML file: timelines, memory, traffic, strategies and why the losers lost.

    For a config, the report simulates its strategies. For a plan, it lists the rivals and why they lost. For a run, it
    shows losses, speed and changes of ranks, and compares prediction and measurement if the run was traced. The file
    needs no network and no other file.
    """
    from hydragraph.report.page import write_report

    if not source.exists():
        raise ValueError(f"{source} does not exist: name a run's YAML file, a run's folder, or a plan's JSON file")
    path = output or (source / "report.html" if source.is_dir() else source.with_suffix(".html"))
    check_written("--output", path)
    only_simulated = {"--devices": devices, "--strategy": strategies, "--home": home, "--set": overrides}
    if source.is_dir():
        _refuse(only_simulated, "is for a config that is simulated: leave it out")
        report = _of_run(source, profile, cluster, corrections)
    elif source.suffix == ".json":
        priced = {"--cluster": cluster, "--profile": profile, "--corrections": corrections}
        _refuse({**only_simulated, **priced}, "does not affect a plan that was already made: leave it out")
        report = _of_plan(source)
    else:
        report = _of_config(source, cluster, devices, strategies, home, profile, corrections, overrides)
    write_report(report, path)
    print(f"{path}: {path.stat().st_size / 1e6:.2g} MB, for a browser")


def _of_config(
    source: Path,
    cluster: Path | None,
    devices: int | None,
    named: Sequence[str] | None,
    home: str | None,
    profile: str | None,
    corrections: Path | None,
    overrides: Sequence[str] | None,
) -> Report:
    """Simulate the strategies of a config."""
    from hydragraph.commands.simulate import Step, assigned, chosen_cluster, strategies_and_costs
    from hydragraph.report.simulation_report import Simulated, simulation_report

    config = TrainConfig.load(source, overrides or ())
    where = chosen_cluster(cluster, devices, config.ranks)
    texts = chosen_strategies(named, config.strategies, len(where.devices))
    owners = chosen_home(home, config.home)
    strategies, costs = strategies_and_costs(config, where, texts, profile, None, owners, corrections)
    found = []
    for strategy in strategies:
        assignment = assigned(config, costs, strategy, Step())
        found.append(Simulated(strategy, assignment, costs.simulate(strategy, assignment)))
    return simulation_report(source.name, costs, found)


def _of_plan(source: Path) -> Report:
    from hydragraph.report.plan_report import plan_report

    try:
        record = json.loads(source.read_text(encoding="utf-8"))
        return plan_report(source.name, record)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _of_run(source: Path, profile: str | None, cluster: Path | None, corrections: Path | None) -> Report:
    from hydragraph.commands.compare import run_costs
    from hydragraph.cost.trace_file import read_trace
    from hydragraph.report.run_report import run_report
    from hydragraph.train.run_folder import RunFolder
    from hydragraph.train.step_metrics import read_metrics
    from hydragraph.train.stragglers.run_events import read_events

    folder = RunFolder(source)
    metrics = read_metrics(folder.metrics)
    if not metrics or not folder.config.exists():
        raise ValueError(f"{source} holds no steps of a run: name the folder that hydragraph train has written")
    events = read_events(folder.happenings)
    if not folder.trace.exists():
        _refuse(
            {"--profile": profile, "--cluster": cluster, "--corrections": corrections}, "prices a trace: there is none"
        )
        return run_report(source.name, metrics, None, events)
    trace = read_trace(folder.trace)
    costs = run_costs(TrainConfig.load(folder.config), len(trace.ranks), profile, cluster, corrections)
    return run_report(source.name, metrics, (costs, trace), events)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} {why}")

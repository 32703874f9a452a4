"""`hydragraph compare`: the trace of a real run beside its simulation, and where the cost model is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hydragraph.commands.options import CorrectionsFile, Debug, LogLevel
from hydragraph.report.number_text import console, seconds_text
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.cost.measured_profile import Profile
    from hydragraph.report.measured_beside_predicted import Comparison, Row
    from hydragraph.spec.cluster import Cluster

EXAMPLE = (
    "Example: hydragraph profile config.yaml --output profile.json, hydragraph train config.yaml --trace, then "
    "hydragraph compare runs/demo --profile profile.json. It writes runs/demo/corrections.json, which simulate, check "
    "and plan take as --corrections."
)


def compare_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run that was trained with --trace, such as runs/demo.")],
    profile: Annotated[
        str | None,
        typer.Option(help="A file that hydragraph profile wrote; default: the config's plan.profile, or a datasheet."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="The YAML file of the devices and links; default: the profile's own.")
    ] = None,
    corrections: CorrectionsFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    log_level: LogLevel = None,
    debug: Debug = False,
) -> None:
    """Compare the traced steps of a run with their simulation, by kind of instruction and by rank.

    Every second of a rank belongs to one kind. A wait counts for the other ranks until they have sent, and for
    the transfer afterwards. The first step of each strategy is left out, because it also compiles and connects.
    """
    from hydragraph.cost.trace_file import read_trace
    from hydragraph.report.measured_beside_predicted import compare
    from hydragraph.train.run_folder import RunFolder

    folder = RunFolder(run)
    if not folder.config.exists():
        raise ValueError(f"{run} is not a run: name the folder that hydragraph train --trace has written")
    if not folder.trace.exists():
        raise ValueError(f"{folder.trace} does not exist: train with hydragraph train --trace")
    settings = TrainConfig.load(folder.config)
    trace = read_trace(folder.trace)
    found = compare(run_costs(settings, len(trace.ranks), profile, cluster, corrections), trace)
    found.corrections.save(folder.corrections)
    if as_json:
        print(json.dumps(found.as_dict(), indent=1))
    else:
        _print(found, folder.corrections)


def run_costs(
    config: TrainConfig, ranks: int, profile: str | None, cluster: Path | None, corrections: Path | None
) -> Costs:
    """Return what prices a run: by the profile that is named here or in its config, or else by datasheet."""
    import torch

    from hydragraph.cost.costs import Costs
    from hydragraph.spec.cluster import Cluster
    from hydragraph.spec.default_cluster import default_cluster
    from hydragraph.train.plan_input import read_corrections, read_profile

    before = read_corrections(corrections)
    pushed = getattr(torch, config.push_dtype).itemsize
    named = profile or (str(config.plan.profile) if config.plan.profile is not None else None)
    if named is not None:
        measured = read_profile(named)
        where = measured.cluster(ranks) if cluster is None else Cluster.load(cluster)
        return Costs(measured, where, home=config.home, corrections=before, push_itemsize=pushed)
    where = default_cluster(ranks) if cluster is None else Cluster.load(cluster)
    return Costs(_datasheet(config, where), where, home=config.home, corrections=before, push_itemsize=pushed)


def _datasheet(config: TrainConfig, where: Cluster) -> Profile:
    """Return the costs of the run's model by the devices' datasheet."""
    import torch

    from hydragraph.commands.launch_process import quieten
    from hydragraph.cost.datasheet import datasheet
    from hydragraph.frontend.capture import capture
    from hydragraph.train.model import captured_loss, skeleton

    quieten()
    model = skeleton(config.model, config.data.vocab_size)
    return datasheet(capture(model, dtype=getattr(torch, config.dtype), **captured_loss(config)), where)


def _print(found: Comparison, corrections: Path) -> None:
    print(found.source)
    left = f", steps {', '.join(map(str, found.warming))} left out" if found.warming else ""
    table = Table(title=f"a step, median{left}", title_justify="left")
    table.add_column("strategy", overflow="fold")
    for heading in ("steps", "measured", "predicted", "measured / predicted"):
        table.add_column(heading, justify="right")
    for text, count, measured, predicted in found.strategies:
        numbers = (str(count), seconds_text(measured), seconds_text(predicted), _ratio(measured, predicted))
        table.add_row(escape(text), *numbers)
    console().print(table)
    console().print(_kinds(found))
    print(f"wrong most: {found.sentence}")
    print(f"{corrections}: {found.corrections}")


def _kinds(found: Comparison) -> Table:
    """Return a row per kind that anybody spent time on, and one for every rank below it."""
    table = Table(title=f"where the time of {len(found.steps)} steps went, all ranks and each", title_justify="left")
    table.add_column("kind")
    for heading in ("rank", "measured", "predicted", "measured / predicted", "difference"):
        table.add_column(heading, justify="right")
    for together in found.kinds:
        rows = [row for row in found.rows if row.kind is together.kind]
        if together.measured or together.predicted:
            _add(table, together)
            for row in rows if len(rows) > 1 else ():
                _add(table, row)
    return table


def _add(table: Table, row: Row) -> None:
    name = "" if row.rank is not None else row.kind.value
    sign = "-" if row.difference < 0 else "+"
    table.add_row(
        name,
        "all" if row.rank is None else str(row.rank),
        seconds_text(row.measured),
        seconds_text(row.predicted),
        _ratio(row.measured, row.predicted),
        sign + seconds_text(abs(row.difference)),
    )


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.2f}" if predicted > 0 else "-"

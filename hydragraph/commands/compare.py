"""`hydragraph compare`: compare a run's trace with its simulation."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from hydragraph.commands.options import PricedOptions, argument, json_option, verb
from hydragraph.commands.text_table import new_table
from hydragraph.report.number_text import console, seconds_text
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.cost.costs import Costs
    from hydragraph.report.measured_beside_predicted import ComparedSeconds, RunComparison
    from hydragraph.spec.cluster import Cluster
    from hydragraph.train.plan_input import CostFiles


@dataclass(frozen=True, kw_only=True)
class CompareOptions(PricedOptions):
    run: Path = argument("The folder of a run that was trained with --trace, such as runs/demo.")
    as_json: bool = json_option()


@verb
def compare_command(options: CompareOptions) -> None:
    """Compare a run's traced steps with their simulation, by kind of instruction and by rank.

    A wait for a message counts as waiting for ranks until the message is sent, and as transfer afterwards. Each
    strategy's first step is excluded, because it includes compilation. --profile and --cluster default to the config's
    plan.profile and plan.cluster. The devices are the cluster's, else the profile's, else H200s.

    Example: hydragraph profile config.yaml --output profile.json, hydragraph train config.yaml --trace, then hydragraph
    compare runs/demo --profile profile.json. The last command writes runs/demo/corrections.json: pass it to simulate,
    check and plan as --corrections.
    """
    from hydragraph.train.run_folder import RunFolder

    folder = RunFolder(options.run)
    if not folder.config.exists():
        raise ValueError(f"{folder.path} is not a run: pass the output folder of hydragraph train --trace")
    if not folder.trace.exists():
        raise ValueError(f"{folder.trace} does not exist: train with hydragraph train --trace")
    config = TrainConfig.load(folder.config)
    inputs = run_inputs(config, options)

    from hydragraph.cost.trace_file import read_trace
    from hydragraph.report.measured_beside_predicted import compare

    trace = read_trace(folder.trace)
    costs = run_costs(config, len(trace.ranks), *inputs)
    comparison = compare(costs, trace)
    comparison.corrections.save(folder.corrections)
    if options.as_json:
        print(json.dumps(comparison.as_dict(), indent=1))
    else:
        _print(comparison, folder.corrections)


def run_inputs(config: TrainConfig, options: PricedOptions) -> tuple[CostFiles, Cluster | None]:
    from hydragraph.spec.cluster import Cluster
    from hydragraph.train.plan_input import CostFiles

    listed = options.cluster or config.plan.cluster
    files = CostFiles.read(options.profile or config.plan.profile, options.corrections)
    return files, None if listed is None else Cluster.load(listed)


def run_costs(config: TrainConfig, ranks: int, files: CostFiles, cluster: Cluster | None) -> Costs:
    from hydragraph.commands.captured_model import captured, costs_of_run
    from hydragraph.cost.datasheet import datasheet
    from hydragraph.engine.recovery import home_for
    from hydragraph.spec.default_cluster import default_cluster

    config = replace(config, home=home_for(config.home, range(ranks)))
    measured = files.profile
    if measured is not None:
        cluster = cluster or measured.cluster(ranks)
    else:
        cluster = cluster or default_cluster(ranks)
        measured = datasheet(captured(config)[1], cluster)
    return costs_of_run(config, measured, cluster, files.corrections)


def _print(found: RunComparison, corrections: Path) -> None:
    print(found.source)
    left = f", excluding steps {', '.join(map(str, found.warming))}" if found.warming else ""
    headings = ("strategy", "steps", "measured", "predicted", "measured / predicted")
    table = new_table(f"median time of a step{left}", headings)
    for text, count, measured, predicted in found.strategies:
        numbers = (str(count), seconds_text(measured), seconds_text(predicted), _ratio(measured, predicted))
        table.add_row(escape(text), *numbers)
    console().print(table)
    console().print(_kinds(found))
    print(f"largest error: {found.sentence}")
    print(f"{corrections}: {found.corrections}")


def _kinds(found: RunComparison) -> Table:
    headings = ("kind", "rank", "measured", "predicted", "measured / predicted", "difference")
    title = f"total time by kind over {len(found.steps)} steps, for all ranks together and for each rank"
    table = new_table(title, headings, left=("kind",))
    for together in found.kinds:
        rows = [row for row in found.rows if row.kind is together.kind]
        if together.measured or together.predicted:
            _add(table, together)
            for row in rows if len(rows) > 1 else ():
                _add(table, row)
    return table


def _add(table: Table, row: ComparedSeconds) -> None:
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

"""`hydragraph plan`: which strategies suit the data, or which devices do what, without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hydragraph.commands.options import Debug, HomeText, LogLevel
from hydragraph.commands.plan_devices import TOKENS, Work, read_costs, read_running, to_record, write_strategies
from hydragraph.train.config import TrainConfig

EXAMPLE = (
    "Examples. Devices that differ: hydragraph plan --cluster cluster.yaml --model run.yaml --picture plan.png --output "
    "plan.yaml, where cluster.yaml has types: and nodes: (docs/planner.md), and run.yaml is what hydragraph train "
    "takes; rather than a datasheet, --profile h100.json --profile l4.json, each from hydragraph profile --type NAME; "
    "where some are slow today, --health health.yaml with {3: 2.57, 5: inf}.  Equal devices: hydragraph plan --profile "
    "profile.json --lengths lengths.txt --devices 64 --context 32768 "
    "--explain --picture plan.png, where profile.json is from hydragraph profile and lengths.txt has one number per "
    "line. To try a strategy of your own: --strategy '<tp8,pp2> + 6*<tp8,pp1>'."
)
METHODS = "auto|mixed|straggler|search"
_EQUAL = "Equal devices"
_UNEVEN = "Devices that differ (--cluster)"


def plan_command(
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="What hydragraph profile wrote, or constants.json#name of one of its entries; with --cluster one for "
            "every type of device."
        ),
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="Tokens of each sequence, one number per line; or a run's tokens.bin.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest sequence; longer ones count as cut.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Per iteration; default: --model's data.tokens_per_step, or {TOKENS}.")
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Mini-batches to draw from the lengths.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw and the search.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw a PNG file: one iteration's pipelines x micro-batches, or with --cluster its nodes and devices."
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many devices there are.", rich_help_panel=_EQUAL)
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "--strategies",
            help="Compare these; default: proposals improved on samples of the data.",
            rich_help_panel=_EQUAL,
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="All candidates, and what their seconds go to.", rich_help_panel=_EQUAL)
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(help="The YAML file of types, nodes and links; a rank per device.", rich_help_panel=_UNEVEN),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A run's YAML file: its model is captured without weights, its memory is that of compiled graphs, and "
            "without a profile its floating-point operations are priced by datasheet.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            help="Without a profile: the part of the FLOP/s that computation reaches (0.45).", rich_help_panel=_UNEVEN
        ),
    ] = None,
    health: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file of how many times as long ranks take today: {3: 2.57, 5: inf}; inf: lost.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Equal sequences in an iteration, instead of --lengths.", rich_help_panel=_UNEVEN),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each; default: --model's data.max_length.", rich_help_panel=_UNEVEN),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar=METHODS,
            help="Which differences count: types (mixed), rates (straggler), data parallelism by stage (search), or "
            "all at once (auto, the default).",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    running: Annotated[
        str | None,
        typer.Option(
            help="The strategy that runs now, a text or a YAML file: of plans that are nearly as good, the one that "
            "moves least state is taken.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    home: HomeText = None,
    deadline: Annotated[
        float | None,
        typer.Option(min=0, help="After so many seconds take the best plan so far.", rich_help_panel=_UNEVEN),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the strategy to this YAML file, which hydragraph train takes.", rich_help_panel=_UNEVEN),
    ] = None,
    log_level: LogLevel = None,
    debug: Debug = False,
) -> None:
    """Show which strategies suit the data or the devices and what they take, without running anything.

    Equal devices (--devices): candidates are proposed from the lengths, and mini-batches drawn from these are planned
    with each; the table says how long an iteration takes against the best homogeneous strategy, and why a candidate
    lost.

    Devices that differ by type, by memory, or because some are slow today (--cluster): one plan says which of them form
    which pipelines and stages, with how many layers, which share of the data and of the state, how far it is from what
    no plan beats, and what its rivals lost by. In order: write the cluster file; measure a profile on each type, or go
    by datasheet; plan; look at the picture; train with the strategy that --output wrote.
    """
    equal = {"--devices": devices, "--strategy": strategies, "--explain": explain}
    uneven = {
        "--model": model,
        "--efficiency": efficiency,
        "--health": health,
        "--sequences": sequences,
        "--length": length,
        "--method": method,
        "--running": running,
        "--home": home,
        "--deadline": deadline,
        "--output": output,
    }
    if cluster is None:
        _refuse(uneven, "is for devices that differ: give --cluster with the file that says which there are, too")
        _need({"--profile": profile, "--lengths": lengths, "--devices": devices, "--context": context})
        assert profile is not None, "it was asked for"
        assert lengths is not None, "it was asked for"
        if len(profile) > 1:
            raise ValueError("--profile: give one, or --cluster with the file that says which types of devices there are")
        _plan_equal(
            profile[0],
            lengths,
            devices or 0,
            context or 0,
            tokens or TOKENS,
            strategies or (),
            iterations,
            seed,
            explain,
            as_json,
            picture,
        )
        return
    _refuse(equal, "is for equal devices: leave it out, as --cluster says which devices there are and every rival is told")
    work = Work(sequences, length, lengths, tokens, context, iterations, seed)
    _plan_uneven(
        cluster, model, profile or (), work, health, efficiency, method, running, home, deadline, output, as_json, picture
    )


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value not in (None, False):
            raise ValueError(f"{name} {why}")


def _need(given: Mapping[str, object]) -> None:
    missing = [name for name, value in given.items() if not value]
    if missing:
        raise ValueError(
            f"missing {', '.join(missing)}: equal devices need --profile, --lengths, --devices and --context; devices "
            "that differ need --cluster with --model or --profile"
        )


def _plan_equal(
    profile: str,
    lengths: Path,
    devices: int,
    context: int,
    tokens: int,
    strategies: Sequence[str],
    iterations: int,
    seed: int,
    all_candidates: bool,
    as_json: bool,
    picture: Path | None,
) -> None:
    from hydragraph.planner.explain import explain  # needs numba and scipy, which others do without
    from hydragraph.planner.explain_text import to_record, to_text
    from hydragraph.train.plan_input import read_candidates, read_lengths, read_profile
    from hydragraph.train.plan_picture import write_plan_picture

    own = read_candidates(strategies)
    constants = read_profile(profile)
    data = read_lengths(lengths)
    report = explain(constants, data, devices, context, tokens, strategies=own, iterations=iterations, seed=seed)
    print(json.dumps(to_record(report), indent=1) if as_json else to_text(report, all_candidates), end="\n" * as_json)
    if picture is not None:
        write_plan_picture(report.example, picture)


def _plan_uneven(
    cluster: Path,
    model: Path | None,
    profiles: Sequence[str],
    work: Work,
    health: Path | None,
    efficiency: float | None,
    method: str | None,
    running: str | None,
    home: str | None,
    deadline: float | None,
    output: Path | None,
    as_json: bool,
    picture: Path | None,
) -> None:
    from hydragraph.planner.uneven.planning import plan
    from hydragraph.spec.cluster import Cluster
    from hydragraph.train.device_picture import write_device_picture

    for name, path in (("--output", output), ("--picture", picture)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{name} {path}: the folder {path.parent} does not exist: make it, or name another")
    where = Cluster.load(cluster)
    config = None if model is None else TrainConfig.load(model)
    workload = work.read(config)
    screen = Console(stderr=True)
    with screen.status("reading") as status:
        say = lambda what: status.update(escape(what))  # noqa: E731
        costs, source = read_costs(where, config, profiles, health, efficiency, home, say)
        before = None if running is None else read_running(running, costs)
        say("searching")
        found = plan(costs, workload, method or "auto", before, deadline, work.seed)  # type: ignore[arg-type]
    written = [] if output is None else [write_strategies(found, output)]
    if picture is not None:
        write_device_picture(found, costs, picture)
        written.append(f"{picture}: nodes and their devices, by pipeline")
    if as_json:
        print(json.dumps(to_record(found, source), indent=1))
        return
    print("\n".join([source, found.explain(), *written]))

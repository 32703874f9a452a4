"""`hydragraph plan`: which strategies suit the data, or which devices do what, without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hydragraph.commands.options import CorrectionsFile, Debug, LogLevel
from hydragraph.commands.plan_devices import TOKENS, Asked, Work, plan_devices

EXAMPLE = (
    "Devices that differ: hydragraph plan --cluster cluster.yaml --model run.yaml --picture plan.png --output "
    "plan.yaml, where cluster.yaml has types: and nodes: (docs/planner.md shows one), and run.yaml is what hydragraph "
    "train takes. Rather than a datasheet: --profile h100.json --profile l4.json, each from hydragraph profile --type "
    "NAME. Where some are slow today: --health health.yaml with {3: 2.57, 5: inf}. "
    "Equal devices: hydragraph plan --profile profile.json --lengths lengths.txt --devices 64 --context 32768 "
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
    corrections: CorrectionsFile = None,
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
    solver: Annotated[
        str | None,
        typer.Option(
            metavar="scip",
            help="With --method mixed: group devices as AutoHet published it, by SCIP (pip install "
            "'hydragraph\\[exact]'); few devices only.",
            rich_help_panel=_UNEVEN,
        ),
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
    home: Annotated[
        str | None,
        typer.Option(
            help='Who owns the state now, as in "3,3,1,0 copies=2", from which the plan moves it; default: equal '
            "shares, or with --running those of --model.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="After so many seconds of the whole command take the best plan so far; kinds of stages that there was "
            "no time to compile are left out.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the strategy to this YAML file, which hydragraph train takes.", rich_help_panel=_UNEVEN
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write an HTML file: the plan, its timeline, and its rivals.", rich_help_panel=_UNEVEN),
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
        "--solver": solver,
        "--running": running,
        "--home": home,
        "--deadline": deadline,
        "--output": output,
        "--report": report,
    }
    if cluster is None:
        _refuse(uneven, "is for devices that differ: give --cluster with the file that says which there are, too")
        if profile is None or lengths is None or devices is None or context is None:
            raise ValueError(
                "equal devices need all of --profile, --lengths, --devices and --context; devices that differ need "
                "--cluster, and --model or --profile"
            )
        draw = _Draw(lengths, context, tokens or TOKENS, iterations, seed)
        _plan_equal(profile, devices, draw, strategies or (), corrections, picture, explain, as_json)
        return
    _refuse(equal, "is for equal devices: leave it out; --cluster says which there are, and all rivals are told")
    work = Work(sequences, length, lengths, tokens, context, iterations, seed)
    asked = Asked(
        cluster,
        work,
        profile or (),
        model=model,
        efficiency=efficiency,
        health=health,
        method=method,
        solver=solver,
        running=running,
        home=home,
        deadline=deadline,
        output=output,
        picture=picture,
        corrections=corrections,
        report=report,
    )
    plan_devices(asked, as_json)


@dataclass(frozen=True)
class _Draw:
    """How sample mini-batches are drawn: a file of lengths, the longest and all tokens of one, how many, and a seed."""

    lengths: Path
    context: int
    tokens: int
    iterations: int
    seed: int


def _plan_equal(
    profiles: Sequence[str],
    devices: int,
    draw: _Draw,
    strategies: Sequence[str],
    corrections: Path | None,
    picture: Path | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Plan sample mini-batches on equal devices with every candidate, and print what each takes."""
    from hydragraph.cost.corrections import corrected
    from hydragraph.report.candidate_comparison import explain  # needs numba and scipy, which others do without
    from hydragraph.report.candidate_comparison_text import to_record, to_text
    from hydragraph.report.plan_picture import write_plan_picture
    from hydragraph.train.plan_input import read_candidates, read_corrections, read_lengths, read_profile

    if len(profiles) > 1:
        raise ValueError("--profile: give one, or --cluster with the file that says which types of devices there are")
    own = read_candidates(strategies)
    constants = read_profile(profiles[0])
    known = read_corrections(corrections)
    if known is not None:
        constants = corrected(constants, known)
    found = explain(
        constants,
        read_lengths(draw.lengths),
        devices,
        draw.context,
        draw.tokens,
        strategies=own,
        iterations=draw.iterations,
        seed=draw.seed,
    )
    print(json.dumps(to_record(found), indent=1) if as_json else to_text(found, everything), end="\n" * as_json)
    if picture is not None:
        write_plan_picture(found.example, picture)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} {why}")

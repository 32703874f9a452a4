"""`hydragraph plan`: strategies for the data, or a plan for devices that differ, without running anything."""

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
    "plan.yaml, where cluster.yaml has types: and nodes: (docs/planner.md shows one), and run.yaml is a config of "
    "hydragraph train. With measurements instead of a datasheet: --profile h100.json --profile l4.json, each from "
    "hydragraph profile --type NAME. If some are slow: --health health.yaml with {3: 2.57, 5: inf}. "
    "Equal devices: hydragraph plan --profile profile.json --lengths lengths.txt --devices 64 --context 32768 "
    "--explain --picture plan.png, where profile.json is from hydragraph profile and lengths.txt has one number per "
    "line. To try a strategy of your own: --strategy '<tp8,pp2> + 6*<tp8,pp1>'."
)
METHODS = "auto|mixed|straggler|search|metis"
_EQUAL = "Equal devices"
_UNEVEN = "Devices that differ (--cluster)"


def plan_command(
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="A file that hydragraph profile wrote, or constants.json#name for one entry; with --cluster, one for "
            "each type of device."
        ),
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(help="Tokens of each sequence, one number per line; or a run's tokens.bin.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest sequence; longer ones are cut.")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Tokens per iteration; default: --model's data.tokens_per_step, or {TOKENS}."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Mini-batches to draw from the lengths.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed that draws the mini-batches.")] = 0,
    corrections: CorrectionsFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Draw a PNG file: one iteration's pipelines x micro-batches, or with --cluster its nodes and devices."
        ),
    ] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Number of devices.", rich_help_panel=_EQUAL)] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "--strategies",
            help="Strategies to compare; default: proposals, improved on samples of the data.",
            rich_help_panel=_EQUAL,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="List all candidates with the parts of their seconds.", rich_help_panel=_EQUAL),
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="The YAML file of types, nodes and links; it has one device per rank.", rich_help_panel=_UNEVEN
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="A run's YAML file. Its model is captured without weights, memory comes from compiled graphs, and "
            "without a profile, seconds come from floating-point operations and a datasheet.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            help="Without a profile: the part of the FLOP/s that computation reaches; default: a roofline.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    health: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file of ranks that are slow, by their slowdown, or lost (inf): {3: 2.57, 5: inf}.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of equal sequences per iteration, instead of --lengths.", rich_help_panel=_UNEVEN
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of each of the --sequences; default: --model's data.max_length.",
            rich_help_panel=_UNEVEN,
        ),
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
            help="Search for differences of types (mixed), of speed (straggler), for data parallelism by stage "
            "(search; metis: by improved Metis's own memory-aware order), or for all of them (auto, the default).",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    running: Annotated[
        str | None,
        typer.Option(
            help="The strategy that runs now, a text or a YAML file. Among plans that are nearly as good, the one that "
            "moves the least state is chosen.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    home: Annotated[
        str | None,
        typer.Option(
            help='The present shares of the state by rank, from which the plan moves it, as in "3,3,1,0 copies=2"; '
            "default: equal shares, or with --running those of --model.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds for the whole command, which then prints the best plan so far. Kinds of stages that are not "
            "compiled in time are left out.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    prices: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            metavar="TYPE=DOLLARS",
            help="Price of an hour of a device of this type, as in h100-sxm=2.5, or 2.5 for all types. Devices without "
            "work cost nothing. Repeatable.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="DOLLARS",
            help="Dollars per hour: plan for the nodes that train fastest and together cost no more. The cluster lists "
            "all nodes that can be rented. Needs --price.",
            rich_help_panel=_UNEVEN,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the strategy to this YAML file, which hydragraph train reads.", rich_help_panel=_UNEVEN
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write an HTML file: the plan, its timeline, and its rivals.", rich_help_panel=_UNEVEN),
    ] = None,
    log_level: LogLevel = None,
    debug: Debug = False,
) -> None:
    """Propose strategies for your data or your devices, with the seconds they take, without running anything.

    Equal devices (--devices): candidates come from the sequence lengths. Each plans mini-batches drawn from these
    lengths. A table compares the seconds of an iteration with those of the best homogeneous strategy, and says why
    candidates are slower.

    Devices that differ in type, memory or current speed (--cluster): the plan assigns devices to pipelines and stages,
    with their layers and their shares of the data and of the state. It is printed with a lower bound and with its
    rivals. First write the cluster file and, unless a datasheet will do, measure a profile on each type. Then plan,
    look at the picture, and train with the strategy that --output wrote.
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
        "--price": prices,
        "--budget": budget,
        "--output": output,
        "--report": report,
    }
    if cluster is None:
        _refuse(uneven, "is for devices that differ: also give --cluster with the file that lists them")
        if profile is None or lengths is None or devices is None or context is None:
            raise ValueError(
                "plan for equal devices with --profile, --lengths, --devices and --context, or for devices that differ "
                "with --cluster, and --model or --profile"
            )
        draw = _Draw(lengths, context, tokens or TOKENS, iterations, seed)
        _plan_equal(profile, devices, draw, strategies or (), corrections, picture, explain, as_json)
        return
    _refuse(equal, "is for equal devices: leave it out; --cluster lists the devices, and all rivals are printed")
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
        prices=tuple(prices or ()),
        budget=budget,
    )
    plan_devices(asked, as_json)


@dataclass(frozen=True)
class _Draw:
    """Sample mini-batches: the file of lengths, longest sequence, tokens of each, their number, and the seed."""

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
    """Plan sample mini-batches on equal devices with every candidate, and print the seconds of each."""
    from hydragraph.cost.corrections import corrected
    from hydragraph.report.candidate_comparison import (
        explain,
    )  # imports numba and scipy, which other commands do not need
    from hydragraph.report.candidate_comparison_text import to_record, to_text
    from hydragraph.report.plan_picture import write_plan_picture
    from hydragraph.train.plan_input import read_candidates, read_corrections, read_lengths, read_profile

    if len(profiles) > 1:
        raise ValueError("--profile: give only one, or add --cluster with the file that lists the types of devices")
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

"""`hydragraph plan`: which strategies suit the data, without running anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hydragraph.commands.options import CorrectionsFile, Debug, LogLevel

EXAMPLE = (
    "Example: hydragraph plan --profile profile.json --lengths lengths.txt --devices 64 --context 32768 "
    "--explain --picture plan.png, where profile.json is from hydragraph profile and lengths.txt has one number per "
    "line. To try a strategy of your own: --strategy '<tp8,pp2> + 6*<tp8,pp1>'."
)


def plan_command(
    profile: Annotated[
        str, typer.Option(help="What hydragraph profile wrote, or constants.json#name of one of its entries.")
    ],
    lengths: Annotated[Path, typer.Option(help="Tokens of each sequence, one number per line; or a run's tokens.bin.")],
    devices: Annotated[int, typer.Option(min=1, help="How many devices there are.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of the longest sequence; longer ones count as cut.")],
    tokens: Annotated[int, typer.Option(min=1, help="Per iteration.")] = 100_000,
    strategies: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy", "--strategies", help="Compare these; default: proposals improved on samples of the data."
        ),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Mini-batches to draw from the lengths.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw and the search.")] = 0,
    corrections: CorrectionsFile = None,
    explain: Annotated[bool, typer.Option("--explain", help="All candidates, and what their seconds go to.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw one iteration's pipelines x micro-batches to this PNG file.")
    ] = None,
    log_level: LogLevel = None,
    debug: Debug = False,
) -> None:
    """Show which strategies suit the data and what they are expected to take, without running anything.

    Candidates are proposed from the lengths, and mini-batches drawn from these are planned with each; the table says
    how long an iteration takes against the best homogeneous strategy, and why a candidate lost.
    """
    from hydragraph.cost.corrections import Corrections, corrected
    from hydragraph.planner.explain import explain as explained  # needs numba and scipy, which others do without
    from hydragraph.planner.explain_text import to_record, to_text
    from hydragraph.train.plan_input import read_candidates, read_lengths, read_profile
    from hydragraph.train.plan_picture import write_plan_picture

    own = read_candidates(strategies or ())
    constants = read_profile(profile)
    if corrections is not None:
        constants = corrected(constants, Corrections.load(corrections))
    data = read_lengths(lengths)
    report = explained(constants, data, devices, context, tokens, strategies=own, iterations=iterations, seed=seed)
    print(json.dumps(to_record(report), indent=1) if as_json else to_text(report, explain), end="\n" * as_json)
    if picture is not None:
        write_plan_picture(report.example, picture)

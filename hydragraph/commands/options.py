"""Options that several verbs share, and how they are parsed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hydragraph.log import LEVELS
from hydragraph.spec.home import Home

Config = Annotated[Path, typer.Argument(help="The run's YAML file, such as examples/demo.yaml.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="section.field=value replaces a field of the config.")]
Strategies = Annotated[
    list[str] | None, typer.Option("--strategy", help="Instead of the config's strategies: a text or a YAML file.")
]
HomeText = Annotated[
    str | None,
    typer.Option(
        "--home",
        help='Instead of the config\'s: the share of the state by rank, as in "3,3,1,0 copies=2"; equal: equal shares; '
        "stages: the ranks that compute a block; auto: those that exchange least.",
    ),
]
CorrectionsFile = Annotated[
    Path | None,
    typer.Option(
        "--corrections",
        help="A file that hydragraph compare wrote, such as runs/demo/corrections.json, to correct seconds.",
    ),
]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="|".join(LEVELS),
        help="Say on stderr what goes on, rank by rank: captures, compilations, plans, checkpoints, ... (info), and "
        "what every step does (debug).",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


def read_counts(text: str, pipelines: int) -> list[int]:
    """Read the numbers of micro-batches of all pipelines: "4,2", or one number for all.

    Raises:
        ValueError: the text is not numbers, all are 0, or their count is not the number of pipelines.
    """
    counts = check_counts(text)
    if len(counts) not in (1, pipelines):
        raise ValueError(
            f"--micro-batches {text!r}: give one number, or one for each of the {pipelines} pipelines: 4,2"
        )
    return counts * (pipelines if len(counts) == 1 else 1)


def check_counts(text: str) -> list[int]:
    """Read numbers of micro-batches before the number of pipelines is known.

    Raises:
        ValueError: the text is not numbers, or all are 0.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--micro-batches {text!r}: give one number, or one for each pipeline: 4,2")
    counts = [int(part) for part in parts]
    if not any(counts):
        raise ValueError(
            f"--micro-batches {text!r}: no pipeline would compute; give at least one pipeline a micro-batch"
        )
    return counts


def check_written(option: str, path: Path | None) -> None:
    """Check that a file can be written where an option names one, before the work that fills it.

    Raises:
        ValueError: naming the option, where its folder does not exist, or it is a folder itself.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist: make it, or name another")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory: name the file to write")


def chosen_home(text: str | None, configured: Home) -> Home:
    """Return the home that was given, or else the config's.

    Raises:
        ValueError: showing the piece of the text that is wrong.
    """
    return configured if text is None else Home.parse(text)


def chosen_strategies(
    named: Sequence[str] | None, configured: Sequence[str], ranks: int | None = None
) -> tuple[str, ...]:
    """Return the strategies that were given, or else the config's.

    Args:
        named: strategies of the command line.
        configured: strategies of the config.
        ranks: number of ranks, to replace the config's "auto" by plain data parallelism; None: "auto" is refused.

    Raises:
        ValueError: these are "auto", which only training plans.
    """
    texts = tuple(named or configured)
    if "auto" not in texts:
        return texts
    if ranks is None or named:
        raise ValueError("strategies: auto is planned when training starts, not here: name some by --strategy")
    typer.echo(
        "strategies: auto is planned when training starts; plain data parallelism takes its place here (--strategy "
        "names others)",
        err=True,
    )
    return (f"{ranks}*<tp1,pp1>",)

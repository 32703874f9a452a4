"""Options that verbs share, and the decorator of verbs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import typer

from hydragraph.log import LEVELS
from hydragraph.spec.home import Home
from hydragraph.train.config import TrainConfig

Config = Annotated[Path, typer.Argument(help="The run's YAML file, such as examples/demo.yaml.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="section.field=value replaces a field of the config.")]
Strategies = Annotated[
    list[str] | None, typer.Option("--strategy", help="Strategy that replaces the config's: a text or a YAML file.")
]
HomeText = Annotated[
    str | None,
    typer.Option(
        "--home",
        help='Replaces the config\'s home: the share of the state by rank, as in "3,3,1,0 copies=2"; equal: equal '
        "shares; stages: the ranks that compute a block; auto: those that exchange least.",
    ),
]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="The YAML file of devices and links; it has one device per rank.")
]
DeviceCount = Annotated[
    int | None,
    typer.Option(
        "--devices", min=1, help="Number of H200s, eight per node, instead of --cluster; default: the config's ranks."
    ),
]
HealthFile = Annotated[
    Path | None,
    typer.Option("--health", help="A YAML file of slow ranks, by their slowdown, and lost ones: {3: 2.57, 5: inf}."),
]
ProfileFile = Annotated[
    str | None, typer.Option("--profile", help="A file that hydragraph profile wrote; default: a datasheet.")
]
Efficiency = Annotated[
    float | None,
    typer.Option(help="Without a profile: the fraction of the FLOP/s that computation reaches; default: a roofline."),
]
CorrectionsFile = Annotated[
    Path | None,
    typer.Option("--corrections", help="A file that hydragraph compare wrote, such as runs/demo/corrections.json."),
]
MicroBatches = Annotated[str, typer.Option(help="Micro-batches of each pipeline, such as 4,2; or one number for all.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="|".join(LEVELS),
        help="Log on stderr, rank by rank: captures, plans, checkpoints, ... (info), every step (debug).",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]

Options = TypeVar("Options", bound="CommonOptions")


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every verb.

    A subclass adds a field for each option or argument, annotated as typer reads it. `PANEL` is the heading of the
    fields of a class in the help.
    """

    PANEL: ClassVar[str | None] = None

    log_level: LogLevel = None
    debug: Debug = False

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise a ValueError for the first given field."""
        hints = get_type_hints(type(self), include_extras=True)
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) is not False:
                declared = hints[name].__metadata__[0].default  # the option's explicit name
                raise ValueError(f"{declared if isinstance(declared, str) else f'--{name}'} {why}")


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(CommonOptions):
    """Options of verbs that read a run's config."""

    config: Config
    overrides: Set = None

    def load(self) -> TrainConfig:
        """Read the config."""
        return TrainConfig.load(self.config, self.overrides or ())


def verb(function: Callable[[Options], None]) -> Callable[..., None]:
    """Return a function for typer, with a keyword for each field of the dataclass that `function` takes."""
    options: type[Options] = next(iter(get_type_hints(function).values()))
    hints = get_type_hints(options, include_extras=True)
    parameters = []
    for cls in options.__mro__:  # own options first in the help
        for field in fields(options):
            if field.name in inspect.get_annotations(cls):
                kind, info = get_args(hints[field.name])
                info = copy(info)
                info.rich_help_panel = cls.__dict__.get("PANEL")
                parameter = inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY)
                parameter = parameter.replace(annotation=Annotated[kind, info])  # type: ignore[valid-type]
                if field.default is not MISSING:
                    parameter = parameter.replace(default=field.default)
                parameters.append(parameter)

    @wraps(function)
    def command(**given: Any) -> None:
        function(options(**given))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def read_counts(text: str, pipelines: int) -> list[int]:
    """Read the micro-batches of pipelines, such as "4,2" or one number for all, or raise a ValueError."""
    counts = check_counts(text)
    if len(counts) not in (1, pipelines):
        raise ValueError(
            f"--micro-batches {text!r}: give one number, or one for each of the {pipelines} pipelines: 4,2"
        )
    return counts * (pipelines if len(counts) == 1 else 1)


def check_counts(text: str) -> list[int]:
    """Read micro-batches of any number of pipelines."""
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
    """Raise a ValueError if an option's file cannot be written."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: the folder {path.parent} does not exist: make it, or name another")
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory: name the file to write")


def default_devices_text(ranks: int, config: TrainConfig) -> str:
    """Describe the default devices."""
    instead = ", not for this machine (device: cpu)" if config.device == "cpu" else ""
    return f"for {ranks} H200{'s' * (ranks != 1)}, as --cluster names no others{instead}"


def check_prices(profile: object, efficiency: float | None) -> None:
    """Raise a ValueError if both are given."""
    if profile and efficiency is not None:
        raise ValueError("--profile has measured seconds and --efficiency prices a datasheet: give one of them")


def chosen_home(text: str | None, configured: Home) -> Home:
    """Return the given home, or the config's."""
    return configured if text is None else Home.parse(text)


def chosen_strategies(
    named: Sequence[str] | None, configured: Sequence[str], ranks: int | None = None
) -> tuple[str, ...]:
    """Return the strategies of the command line, or those of the config if the command line has none.

    Args:
        ranks: to replace the config's "auto" by plain data parallelism.

    Raises:
        ValueError: they are "auto", which only training plans.
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

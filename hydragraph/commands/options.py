"""Options that commands share, and the decorator `verb` of commands."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import typer

from hydragraph.log import LEVELS
from hydragraph.spec.cluster import MOST_DEVICES
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import strategies_of
from hydragraph.spec.training_workload import check_sequences
from hydragraph.train.config import ModelConfig, TrainConfig
from hydragraph.train.config_overrides import given_plan

Config = Annotated[Path, typer.Argument(help="The run's YAML file, such as examples/demo.yaml.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Replace a field of the config: section.field=value.")]
Strategies = Annotated[
    list[str] | None, typer.Option("--strategy", help="Strategy to use instead of the config's: a text or a YAML file.")
]
HomeText = Annotated[
    str | None,
    typer.Option(
        "--home",
        help="Owners of the state, instead of the config's home: equal (equal shares), stages (the ranks that compute "
        'each block), auto (the owners with the least traffic), or each rank\'s share, as in "3,3,1,0 copies=2".',
    ),
]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="YAML file of the devices and links, with one device per rank.")
]
DeviceCount = Annotated[
    int | None,
    typer.Option(
        "--devices",
        min=1,
        max=MOST_DEVICES,
        help="Number of H200s, eight per node, instead of --cluster; default: the config's ranks.",
    ),
]
HealthFile = Annotated[
    Path | None,
    typer.Option(
        "--health", help="YAML file with the slowdown of each slow rank, such as {3: 2.57, 5: inf}; inf means lost."
    ),
]
ProfileFile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="A file that hydragraph profile wrote; default: the config's plan.profile if the devices are "
        "the config's, else a datasheet.",
    ),
]
Efficiency = Annotated[
    float | None,
    typer.Option(
        help="Without a profile: assume that computation reaches this fraction of the peak FLOP/s, instead of using "
        "a roofline model."
    ),
]
CorrectionsFile = Annotated[
    Path | None,
    typer.Option("--corrections", help="A file that hydragraph compare wrote, such as runs/demo/corrections.json."),
]
MicroBatches = Annotated[
    str, typer.Option(help="Number of micro-batches per pipeline, such as 4,2, or one number for all.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
LogLevel = Annotated[
    str | None,
    typer.Option(
        "--log-level",
        metavar="|".join(LEVELS),
        help="Log every rank's events to stderr: info shows captures, plans, checkpoints, ...; debug also shows steps.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]

Options = TypeVar("Options", bound="CommonOptions")


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every command.

    A subclass adds a field for each option or argument, annotated for typer. `PANEL` is the heading of its fields in
    the help.
    """

    PANEL: ClassVar[str | None] = None

    log_level: LogLevel = None
    debug: Debug = False

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise a ValueError for the first of these fields that the user has set."""
        hints = get_type_hints(type(self), include_extras=True)
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) is not False:
                declared = hints[name].__metadata__[0].default
                raise ValueError(f"{declared if isinstance(declared, str) else f'--{name}'} {why}")


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(CommonOptions):
    config: Config
    overrides: Set = None

    def load(self) -> TrainConfig:
        return TrainConfig.load(self.config, self.overrides or ())


def verb(function: Callable[[Options], None]) -> Callable[..., None]:
    """Convert a function of an options object to a typer function with one keyword per field."""
    options: type[Options] = next(iter(get_type_hints(function).values()))
    hints = get_type_hints(options, include_extras=True)
    parameters = []
    for cls in options.__mro__:  # the help lists the class's own options first
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
    """Parse the number of micro-batches per pipeline: "4,2", or one number for all."""
    counts = check_counts(text)
    if len(counts) not in (1, pipelines):
        raise ValueError(
            f"--micro-batches {text!r} has {len(counts)} numbers, but the number of pipelines is {pipelines}: "
            "give one number for all pipelines, or one for each"
        )
    return counts * (pipelines if len(counts) == 1 else 1)


def check_counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"--micro-batches {text!r}: give one number, or one for each pipeline, such as 4,2")
    counts = [int(part) for part in parts]
    check_sequences(sum(counts))
    if not any(counts):
        raise ValueError(
            f"--micro-batches {text!r}: no pipeline would compute: give at least one pipeline a micro-batch"
        )
    return counts


def check_memory(option: str, value: float | None) -> None:
    if value is not None and not 1e5 <= value < math.inf:
        raise ValueError(f"{option} {value:g}: give bytes, such as 80e9")


def check_written(option: str, path: Path | None) -> None:
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(
            f"{option} {path} is in the folder {path.parent}, which does not exist: create it, or name another"
        )
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory: name the file to write")


_OUTPUTS = ("output", "out", "picture", "trace", "csv", "json", "markdown", "report")


def check_read(given: Mapping[str, Any]) -> None:
    for output in _OUTPUTS:
        path = given.get(output)
        if not isinstance(path, Path) or not path.is_file():
            continue
        for name, value in given.items():
            for other in value if isinstance(value, list | tuple) else (value,):
                if name not in (output, "running") and isinstance(other, str | Path) and _same(path, other):
                    option = "output" if output == "out" else output
                    raise ValueError(f"--{option} {path} would replace a file that the command reads: name another")


def _same(path: Path, other: str | Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def default_devices_text(ranks: int, config: TrainConfig) -> str:
    instead = ", not for this machine (device: cpu)" if config.device == "cpu" else ""
    return f"predicted for {ranks} H200{'s' * (ranks != 1)}{instead}, because --cluster is not given"


def check_prices(profile: object, efficiency: float | None) -> None:
    if profile and efficiency is not None:
        raise ValueError("--profile uses measured seconds and --efficiency uses a datasheet: give only one of them")
    if efficiency is not None and not 0 < efficiency <= 1:
        raise ValueError(f"--efficiency {efficiency:g}: give a fraction above 0 and at most 1")


def on_planned_devices(options: Options, config: TrainConfig) -> Options:
    """Return options with the cluster and profile of the config's `plan`, unless the command line sets them."""

    def has(*names: str) -> bool:
        return any(getattr(options, name, None) is not None for name in names)

    if has("cluster", "devices", "arch", "memory"):
        return options
    cluster = None if config.plan.cluster is None else Path(config.plan.cluster)
    profile = getattr(options, "profile", None) if has("profile", "efficiency") else config.plan.profile
    return replace(options, cluster=cluster, profile=profile)  # type: ignore[call-arg]


def chosen_home(text: str | None, configured: Home) -> Home:
    return configured if text is None else Home.parse(text)


def chosen_strategies(
    named: Sequence[str] | None, configured: Sequence[str], ranks: int | None = None
) -> tuple[str, ...]:
    """Return the command line's strategies; if it has none, return the config's.

    Args:
        ranks: replace "auto" in a config by data parallelism over this number of ranks; None: reject "auto".

    Raises:
        ValueError: the strategies are "auto", and `ranks` is None or `named` is given.
    """
    texts = tuple(named or configured)
    if "auto" not in texts:
        return texts
    if ranks is None or named:
        raise ValueError("'strategies: auto' is resolved only when training starts: pass strategies with --strategy")
    typer.echo(
        "'strategies: auto' is resolved only when training starts: this command uses plain data parallelism instead "
        "(pass other strategies with --strategy)",
        err=True,
    )
    return (f"{ranks}*<tp1,pp1>",)


def with_strategies(config: TrainConfig, named: Sequence[str] | None, ranks: int | None = None) -> TrainConfig:
    """Return the config with `chosen_strategies` and without re-planning, which may need "auto"."""
    strategies = chosen_strategies(named, config.strategies, ranks)
    elastic = replace(config.elastic, replan=None, dry_run=False)
    return replace(config, strategies=strategies, plan=given_plan(config), elastic=elastic)


def check_strategies(texts: Sequence[str], model: ModelConfig, ranks: int) -> None:
    """If the model's config states the number of layers, check strategies."""
    layers, heads = (stated_size(model, name) for name in ("num_hidden_layers", "num_attention_heads"))
    if layers is not None:
        strategies_of(texts, layers, ranks, () if heads is None else (heads,))


def stated_size(model: ModelConfig, name: str) -> int | None:
    sizes = dict(model.config or {})
    if model.directory is not None and model.architecture is None:
        with suppress(OSError, ValueError, TypeError):  # reported later
            sizes = json.loads(Path(model.directory, "config.json").read_text(encoding="utf-8")) | sizes
    size = sizes.get(name)
    return size if isinstance(size, int) and size > 0 else None

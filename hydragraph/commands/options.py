"""Options that commands share, and the decorator `verb`."""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import typer

from hydragraph.log import LEVELS
from hydragraph.spec.cluster import MOST_DEVICES
from hydragraph.spec.home import Home
from hydragraph.spec.strategy import strategies_of
from hydragraph.spec.training_workload import check_sequences
from hydragraph.train.config import ModelConfig, TrainConfig
from hydragraph.train.config_overrides import given_plan

Options = TypeVar("Options", bound="CommonOptions")


def option(help: str, *names: str, default: Any = None, **settings: Any) -> Any:
    """Return a dataclass field for an option.

    Args:
        names: by default, the field's name, as in --micro-batches.
        settings: other arguments of `typer.Option`.
    """
    return field(default=default, metadata={"names": names, "info": partial(typer.Option, help=help, **settings)})


def argument(help: str, default: Any = MISSING, **settings: Any) -> Any:
    """Return a dataclass field for a positional argument; `settings` are other arguments of `typer.Argument`."""
    return field(default=default, metadata={"info": partial(typer.Argument, help=help, **settings)})


flag = partial(option, default=False)
set_option = partial(option, "Replace a field of the config: section.field=value.", "--set")
strategies_option = partial(option, "Strategy to use instead of the config's, as text or a YAML file.", "--strategy")
cluster_option = partial(option, "YAML file of the devices and links, with one device per rank.")
devices_option = partial(
    option,
    "Number of H200s, eight per node, instead of --cluster; default: the config's ranks.",
    min=1,
    max=MOST_DEVICES,
)
health_option = partial(
    option, "YAML file with the slowdown of each slow rank, such as {3: 2.57, 5: inf}; inf means lost."
)
efficiency_option = partial(
    option,
    "Without a profile: assume that computation reaches this fraction of the peak FLOP/s, instead of using "
    "a roofline model.",
)
corrections_option = partial(option, "A file that hydragraph compare wrote, such as runs/demo/corrections.json.")
micro_batches_option = partial(option, "Number of micro-batches per pipeline, such as 4,2, or one number for all.")
json_option = partial(flag, "Print JSON instead of text.", "--json")


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every command; subclasses add others, with `PANEL` as heading in the help."""

    PANEL: ClassVar[str | None] = None

    log_level: str | None = option(
        "Log every rank's events to stderr: info shows captures, plans, checkpoints, ...; debug also shows steps.",
        metavar="|".join(LEVELS),
    )
    debug: bool = flag("Show tracebacks.")

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise a ValueError for the first of `names` that the user set."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in names and value is not None and value is not False:
                raise ValueError(f"{_names(each)[0]} {why}")


@dataclass(frozen=True, kw_only=True)
class ConfigOptions(CommonOptions):
    config: Path = argument("The run's YAML file, such as examples/demo.yaml.")
    overrides: list[str] | None = set_option()

    def load(self) -> TrainConfig:
        return TrainConfig.load(self.config, self.overrides or ())


@dataclass(frozen=True, kw_only=True)
class PricedOptions(CommonOptions):
    """Options that name the files for computing costs."""

    cluster: Path | None = cluster_option()
    profile: str | None = option(
        "A file that hydragraph profile wrote; default: the config's plan.profile if the devices are "
        "the config's, else a datasheet."
    )
    corrections: Path | None = corrections_option()


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(CommonOptions):
    strategies: list[str] | None = strategies_option()
    home: str | None = option(
        "Owners of the state, instead of the config's home: equal (equal shares), stages (the ranks that compute "
        'each block), auto (the owners with the least traffic), or each rank\'s share, as in "3,3,1,0 copies=2".'
    )

    def apply(self, config: TrainConfig, ranks: int | None = None) -> TrainConfig:
        """Return the config with these strategies and this home; `ranks` as in `chosen_strategies`."""
        config = with_strategies(config, self.strategies, ranks)
        return config if self.home is None else replace(config, home=Home.parse(self.home))


def _names(declared: Field[Any]) -> Sequence[str]:
    return declared.metadata["names"] or (f"--{declared.name.replace('_', '-')}",)


def verb(function: Callable[[Options], None]) -> Callable[..., None]:
    """Convert a function of an options object to a typer function with one keyword per field."""
    options: type[Options] = next(iter(get_type_hints(function).values()))
    hints = get_type_hints(options)
    parameters = []
    # The help lists the class's own options first
    for cls in options.__mro__:
        for each in fields(options):
            if each.name in inspect.get_annotations(cls):
                names = _names(each) if "names" in each.metadata else ()
                default = ... if each.default is MISSING else each.default
                info = each.metadata["info"](default, *names, rich_help_panel=cls.__dict__.get("PANEL"))
                kind = inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(each.name, kind, default=info, annotation=hints[each.name]))

    @wraps(function)
    def command(**given: Any) -> None:
        function(options(**given))

    command.__signature__ = inspect.Signature(parameters)  # pyrefly: ignore[missing-attribute]  # not in typeshed
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def read_counts(text: str, pipelines: int) -> list[int]:
    """Parse micro-batches per pipeline: "4,2", or one number for all."""
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
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: you do not have permission to write this file: name another")


_OUTPUTS = ("output", "out", "picture", "trace", "csv", "json", "markdown", "report")


def check_read(given: Mapping[str, Any]) -> None:
    # Writing to a file that is also read would destroy it.
    for output in _OUTPUTS:
        path = given.get(output)
        if not isinstance(path, Path) or not path.is_file():
            continue
        for name, value in given.items():
            for other in value if isinstance(value, (list, tuple)) else (value,):
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

    # The plan's profile describes only the plan's devices.
    if has("cluster", "devices", "arch", "memory"):
        return options
    cluster = None if config.plan.cluster is None else Path(config.plan.cluster)
    profile = getattr(options, "profile", None) if has("profile", "efficiency") else config.plan.profile
    return replace(options, cluster=cluster, profile=profile)


def chosen_strategies(
    named: Sequence[str] | None, configured: Sequence[str], ranks: int | None = None
) -> tuple[str, ...]:
    """Return the command line's strategies or, by default, the config's.

    Args:
        ranks: number of ranks of the data parallelism that replaces a config's "auto"; None: reject "auto".

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
    """Return the config with `chosen_strategies`, without replanning, which may require "auto"."""
    strategies = chosen_strategies(named, config.strategies, ranks)
    elastic = replace(config.elastic, replan=None, dry_run=False)
    return replace(config, strategies=strategies, plan=given_plan(config), elastic=elastic)


def check_strategies(texts: Sequence[str], model: ModelConfig, ranks: int) -> None:
    """Check strategies if the model's config states the number of layers."""
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

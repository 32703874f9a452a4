"""Config of `hydragraph train`: an existing file, or a new one for data and a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hydragraph.commands.launch_process import leads
from hydragraph.commands.options import check_written
from hydragraph.data.atomic_write import write_whole
from hydragraph.spec.record import parse_yaml, read_text
from hydragraph.train.available_devices import devices_here
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.train.starter_config import InspectedPaths

SUFFIXES = (".yaml", ".yml")
# Maximum bytes of a config whose name has no YAML suffix
_LARGEST = 100_000
_STREAMS = (Path("/dev"), Path("/dev/fd"))


def config_of(paths: Sequence[Path], to: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Return the config of a run.

    Args:
        paths: a config, or data and at most one model.
        to: file for a new config, which rank 0 writes if it does not exist.
        overrides: as for `TrainConfig.load`; not written to the file.

    Raises:
        ValueError: `paths` is invalid, or `to` exists with other contents.
    """
    configs = [path for path in paths if _is_config(path)]
    if not configs:
        return _written(paths, to, overrides)
    if len(paths) > 1:
        raise ValueError(f"{configs[0]} is a config: pass only this config, or only data and a model")
    return TrainConfig.load(configs[0], overrides)


def _is_config(path: Path) -> bool:
    if path.suffix in SUFFIXES:
        return True
    if path.is_file() and path.parent not in _STREAMS:
        return _holds_config(path)
    # A stream such as /dev/stdin can be read only once.
    return path.exists() and not path.is_dir()


def _holds_config(path: Path) -> bool:
    if path.stat().st_size > _LARGEST:
        return False
    try:
        text = path.read_text(encoding="utf-8")
        record = parse_yaml(text) if "model" in text and "data" in text else None
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and all(isinstance(record.get(name), dict) for name in ("model", "data"))


def _written(paths: Sequence[Path], to: Path, overrides: Sequence[str]) -> TrainConfig:
    from hydragraph.train.starter_config import look

    inspected = look(paths)
    if not inspected.data:
        raise ValueError(f"{inspected.model} is a model: also pass the files or folders of data to train it on")
    check_written("--to", to)
    # Validate before writing: a failed command leaves no file.
    text = first_config(inspected, to)
    config = TrainConfig.parse(text, overrides)
    existing = read_text(to, "choose another file with --to") if to.is_file() else None
    if existing not in (None, text):
        raise ValueError(
            f"{to} exists and differs from the config for {' '.join(map(str, paths))}: run hydragraph train {to}, or "
            "choose another file with --to"
        )
    if leads() and existing is None:
        write_whole(to, text)
        new = (
            "" if inspected.model is not None else " (no model was given, so a new model of 10 M parameters is trained)"
        )
        typer.echo(
            f"wrote the config of this run{new}; to change the config, edit {to} and run hydragraph train {to}",
            err=True,
        )
    return config


def first_config(found: InspectedPaths, to: Path) -> str:
    from hydragraph.train.starter_config import starter

    return starter(found, devices_here().cuda, f"runs/{to.stem}")

"""`hydragraph init`: write a first config for data, model and devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydragraph.commands.config_or_data import first_config
from hydragraph.commands.options import CommonOptions, argument, check_written, flag, option, verb
from hydragraph.train.available_devices import devices_here


@dataclass(frozen=True, kw_only=True)
class InitOptions(CommonOptions):
    paths: list[Path] | None = argument(
        "Data (files or folders of text, chat .jsonl, tables), a Hugging Face directory, or both.", default=None
    )
    to: Path = option("The file to write.", default=Path("hydragraph.yaml"))
    overwrite: bool = flag("Replace an existing file.")


@verb
def init_command(options: InitOptions) -> None:
    """Write a commented config for your data, your model and this machine's devices.

    Example: hydragraph init chats.jsonl models/Qwen2.5-0.5B; then hydragraph check hydragraph.yaml and hydragraph train
    hydragraph.yaml.
    """
    to = options.to
    if to.exists() and (to.is_dir() or not options.overwrite):
        fix = "name a file with --to" if to.is_dir() else "replace it with --overwrite, or name another file with --to"
        raise ValueError(f"{to} already exists: {fix}")
    check_written("--to", to)
    from hydragraph.data.atomic_write import write_whole
    from hydragraph.train.config import TrainConfig
    from hydragraph.train.data import data_remarks
    from hydragraph.train.starter_config import look

    inspected = look(options.paths or [])
    write_whole(to, first_config(inspected, to))
    config = TrainConfig.load(to)
    if inspected.data:
        for sentence in data_remarks(config):
            print(sentence)
    elif inspected.model is not None:
        print(f"before you train, list your data in the field data.paths of {to}")
    print(
        f"{to} is for {devices_here().text}; hydragraph train measures these devices and plans for them "
        "('strategies: auto')"
    )
    print(f"next: hydragraph check {to} predicts memory and seconds per step; hydragraph train {to} trains")

"""`hydragraph train`: train a model, and again from the last checkpoint where a rank fails."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hydragraph.commands.options import Config, Debug, Set
from hydragraph.commands.process import launched, on_ranks, quieten, restarted, running_s
from hydragraph.train.config import TrainConfig

if TYPE_CHECKING:
    from hydragraph.train.folder import Begin
    from hydragraph.train.loop import Outcome


def train_command(
    config: Config,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last complete checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run that the folder holds.")] = False,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Write when each rank ran each instruction of the first steps, for Perfetto."),
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Continue by itself from the last checkpoint when a rank fails, so many times. Under torchrun give "
            "torchrun the same number, as it starts the processes.",
        ),
    ] = 0,
    overrides: Set = None,
    debug: Debug = False,
) -> None:
    """Train a model; metrics, checkpoints, a picture and the final model go into the run folder."""
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it: give one of them")
    settings = TrainConfig.load(config, overrides or ())
    begin: Begin = "resume" if resume else "overwrite" if overwrite else "new"
    outcome = _train(settings, begin, trace, max_restarts)
    if outcome.history:
        _print_outcome(outcome)


def _train(config: TrainConfig, begin: Begin, trace: bool, restarts: int) -> Outcome:
    """Train on all ranks, again from the last checkpoint where one fails and that may be."""
    from hydragraph.train.folder import RunFolder

    folder, since = RunFolder(Path(config.output)), time.time()
    if 0 < restarted() <= restarts:  # torchrun has started us anew
        begin = folder.again(begin, since - running_s(os.getppid()))
    elif not launched():
        folder.check(config, begin)  # before processes are started
        folder.refuse_shared()
    while True:
        try:
            return on_ranks(config.ranks, train_rank, config, begin, trace)
        except (ValueError, OSError, ImportError, FloatingPointError):
            raise  # it would fail again
        except Exception as error:
            if restarts == 0 or launched() or config.ranks == 1:
                raise
            restarts, begin = restarts - 1, folder.again(begin, since)
            last = folder.last()
            where = "the start" if last is None else str(last.path)
            print(f"hydragraph: {error}; continuing from {where}", file=sys.stderr)


def train_rank(config: TrainConfig, begin: Begin, trace: bool) -> Outcome:
    """Train on this rank."""
    from hydragraph import api
    from hydragraph.train.loop import train
    from hydragraph.train.screen import Screen

    quieten()
    with Screen(Console(stderr=True)) as screen:
        return train(config, begin, api.compile, screen, trace)


def _print_outcome(outcome: Outcome) -> None:
    first, last = outcome.history[0], outcome.history[-1]
    sentence = f"loss {first.loss:.4f} -> {last.loss:.4f} in {last.step} steps; everything is in {outcome.folder.path}"
    Console(stderr=True).print(sentence, markup=False, highlight=False, soft_wrap=True)

"""The command line: the only place that prints, and that looks at how this process was started."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hydragraph import api
from hydragraph.errors import RankFailure
from hydragraph.frontend.capture import capture
from hydragraph.ir.text import to_text
from hydragraph.passes.pipeline import PASSES
from hydragraph.runtime.launch import join, launch
from hydragraph.train.config import TrainConfig
from hydragraph.train.data import mini_batches
from hydragraph.train.folder import Begin, RunFolder
from hydragraph.train.loop import Outcome, read_strategies, shared_tokens, train
from hydragraph.train.model import build_model, skeleton
from hydragraph.train.optimizer import optimizer_factory
from hydragraph.train.screen import Screen
from hydragraph.verify import Row, verify

T = TypeVar("T")

# A mistake of the user's, which can be corrected, and a run that did not end well.
_MISTAKE, _FAILED = 2, 1

app = typer.Typer(
    help="Train one PyTorch model on many uneven devices.", no_args_is_help=True, pretty_exceptions_enable=False
)

_Config = Annotated[Path, typer.Argument(help="The run's YAML file, such as examples/demo.yaml.")]
_Set = Annotated[list[str] | None, typer.Option("--set", help="section.field=value replaces a field of the config.")]
_Strategies = Annotated[
    list[str] | None, typer.Option("--strategy", help="Instead of the config's strategies: a text or a YAML file.")
]
_Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.command("train")
def train_command(
    config: _Config,
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
    overrides: _Set = None,
    debug: _Debug = False,
) -> None:
    """Train a model; metrics, checkpoints, a picture and the final model go into the run folder."""
    with _sentences(debug):
        if resume and overwrite:
            raise ValueError("--resume continues a run and --overwrite replaces it: give one of them")
        settings = TrainConfig.load(config, overrides or ())
        begin: Begin = "resume" if resume else "overwrite" if overwrite else "new"
        outcome = _train(settings, begin, trace, max_restarts)
        if outcome.history:
            _print_outcome(outcome)


@app.command("verify")
def verify_command(
    config: _Config,
    strategies: _Strategies = None,
    overrides: _Set = None,
    debug: _Debug = False,
) -> None:
    """Compare every strategy's loss and gradients with one device, on the CPU; the exit code is 1 beyond tolerance."""
    with _sentences(debug):
        settings = TrainConfig.load(config, overrides or ())
        settings = replace(settings, strategies=tuple(strategies or settings.strategies), device="cpu", dtype="float32")
        rows = _on_ranks(settings.ranks, _verify_rank, settings)
        if rows:
            _print_rows(rows)
        if not all(row.passed for row in rows):
            raise typer.Exit(_FAILED)


@app.command("show")
def show_command(
    config: Annotated[Path | None, typer.Argument(help="The run's YAML file, such as examples/demo.yaml.")] = None,
    strategies: _Strategies = None,
    micro_batches: Annotated[str, typer.Option(help="Of each pipeline, as in 4,2; one number is for all.")] = "2",
    rank: Annotated[int | None, typer.Option(help="Show this rank's program only.")] = None,
    passes: Annotated[bool, typer.Option("--passes", help="List the passes that make rank programs.")] = False,
    overrides: _Set = None,
    debug: _Debug = False,
) -> None:
    """Print the model's program and, with --strategy, the verified program of every rank."""
    with _sentences(debug):
        if passes:
            _print_passes()
        elif config is not None:
            _show(TrainConfig.load(config, overrides or ()), tuple(strategies or ()), micro_batches, rank)
        else:
            raise ValueError("show needs the YAML file of a run, or --passes")


def main() -> None:
    """Run the command line; the entry point of `hydragraph`."""
    app()


def _train(config: TrainConfig, begin: Begin, trace: bool, restarts: int) -> Outcome:
    """Train on all ranks, again from the last checkpoint where one fails and that may be."""
    folder = RunFolder(Path(config.output))
    if 0 < int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) <= restarts:  # torchrun has started us anew
        begin = folder.again()
    while True:
        try:
            return _on_ranks(config.ranks, _train_rank, config, begin, trace)
        except (ValueError, OSError, ImportError, FloatingPointError):
            raise  # it would fail again
        except Exception as error:
            if restarts == 0 or _launched() or config.ranks == 1:
                raise
            restarts, begin = restarts - 1, folder.again()
            last = folder.last()
            where = "the start" if last is None else str(last.path)
            print(f"hydragraph: {error}; continuing from {where}", file=sys.stderr)


def _train_rank(config: TrainConfig, begin: Begin, trace: bool) -> Outcome:
    """Train on this rank."""
    _quieten()
    with Screen(Console(stderr=True)) as screen:
        return train(config, begin, api.compile, screen, trace)


def _verify_rank(config: TrainConfig) -> list[Row]:
    """Verify on this rank."""
    _quieten()
    with Screen(Console(stderr=True)) as screen:
        world = join("cpu")
        tokens = shared_tokens(config, world, screen)
        model = build_model(config.model, tokens.file.vocabulary, tokens.file.end_of_text, config.seed)
        strategies = read_strategies(config.strategies, model, world.ranks)
        factory = optimizer_factory(config.optimizer, model)
        executor = api.compile(model, strategies[0], optimizer=factory, device="cpu")
        rows = verify(model, executor, strategies, next(mini_batches(config, tokens.file)), world.rank)
        executor.close()
        return rows


def _quieten() -> None:
    """Keep what torch and transformers say to their own developers, and their progress bars, off the terminal."""
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)  # torch.export's own code
    transformers_logging.disable_progress_bar()


def _on_ranks(ranks: int, function: Callable[..., T], *args: object) -> T:
    """Run a function on the ranks that a launcher has started, or on new local ones; return this or rank 0's result."""
    if ranks == 1 or _launched():
        return function(*args)
    return launch(function, ranks, *args)[0]


def _launched() -> bool:
    """Say whether torchrun, or a launcher like it, has started this process as one of several."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def _show(config: TrainConfig, strategies: Sequence[str], micro_batches: str, rank: int | None) -> None:
    """Print a program, or those of the ranks."""
    _quieten()
    model = skeleton(config.model, config.data.vocab_size)
    program = capture(model, dtype=getattr(torch, config.dtype))
    if not strategies:
        print(program)
        return
    for strategy in read_strategies(strategies, model, config.ranks):
        counts = _counts(micro_batches, len(strategy.pipelines))
        programs = api.lower(program, strategy, micro_batches=counts, ranks=config.ranks)
        programs.verify()
        if rank is not None and not 0 <= rank < len(programs):
            raise ValueError(f"--rank {rank}: there are ranks 0 to {len(programs) - 1}")
        for i, each in enumerate(programs):
            if rank in (None, i):
                print(to_text(each), end="\n\n")
        print(f"# {strategy}: the programs of {len(programs)} ranks are complete, agree and come to their end")


def _counts(text: str, pipelines: int) -> list[int]:
    """Read the numbers of micro-batches of all pipelines."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or len(parts) not in (1, pipelines):
        raise ValueError(
            f"--micro-batches {text!r}: give one number, or one for each of the {pipelines} pipelines: 4,2"
        )
    return [int(part) for part in parts] * (pipelines if len(parts) == 1 else 1)


def _print_passes() -> None:
    for number, (name, function) in enumerate(PASSES, start=1):
        meaning = (function.__doc__ or "").strip().split("\n")[0]
        print(f"{number}. {name:<12}{meaning}")


def _print_outcome(outcome: Outcome) -> None:
    first, last = outcome.history[0], outcome.history[-1]
    sentence = f"loss {first.loss:.4f} -> {last.loss:.4f} in {last.step} steps; everything is in {outcome.folder.path}"
    Console(stderr=True).print(sentence, markup=False, highlight=False, soft_wrap=True)


def _print_rows(rows: Sequence[Row]) -> None:
    """Print a table of the comparison with one device."""
    table = Table(title="against one device (gradient error / tolerance: at most 1)", title_justify="left")
    for heading in ("strategy", "loss", "relative error", "worst gradient", "error / tolerance", ""):
        table.add_column(heading, overflow="fold")
    for row in rows:
        verdict = "ok" if row.passed else "WRONG"
        numbers = (f"{row.loss:.6f}", f"{row.loss_error:.1e}", row.parameter, f"{row.ratio:.3f}")
        table.add_row(escape(row.strategy), *numbers, verdict)
    Console().print(table)


@contextmanager
def _sentences(debug: bool) -> Iterator[None]:
    """Turn errors into one sentence and an exit code, keeping tracebacks for --debug."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        _complain("stopped", debug)
        raise typer.Exit(130) from None  # 128 + SIGINT, as shells have it
    except (ValueError, OSError, ImportError) as error:
        _complain(str(error), debug)
        raise typer.Exit(_MISTAKE) from None
    except (FloatingPointError, RankFailure, TimeoutError) as error:
        _complain(str(error), debug)
        raise typer.Exit(_FAILED) from None
    except Exception as error:
        _complain(f"{type(error).__name__}: {error} (a bug; --debug shows where)", debug)
        raise typer.Exit(_FAILED) from None


def _complain(sentence: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    where = f"rank {os.environ['RANK']}: " if _launched() else ""
    print(f"hydragraph: {where}{sentence}", file=sys.stderr)


if __name__ == "__main__":
    main()

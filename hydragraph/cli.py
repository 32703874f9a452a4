"""The command line: the only place that prints, and that looks at how this process was started."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from hydragraph import api
from hydragraph.cost.profile import Kind, Profile, Scheme
from hydragraph.errors import RankFailure
from hydragraph.frontend.capture import capture
from hydragraph.frontend.initialise import initial_buffers
from hydragraph.ir.program import Program
from hydragraph.ir.text import to_text
from hydragraph.passes.pipeline import PASSES
from hydragraph.runtime.executor import hidden_size
from hydragraph.runtime.groups import Groups
from hydragraph.runtime.launch import join, launch
from hydragraph.runtime.measure import Settings, Subject, measure
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


@app.command(
    "profile",
    epilog="Example: hydragraph profile examples/demo.yaml --schemes tp1pp1,tp2pp1,tp2pp2 --out profile.json, then "
    "hg.Profile.load('profile.json'). Under torchrun it measures the ranks that torchrun has started.",
)
def profile_command(
    config: _Config,
    schemes: Annotated[
        str | None,
        typer.Option(help="Such as tp1pp1,tp2pp1,tp2pp4; default: all that fit the ranks. Only tp ranks must exist."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The JSON file to write.")] = Path("profile.json"),
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Measure stages with sequence parallelism, too.")
    ] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Measure stages that recompute, too.")] = False,
    longest: Annotated[
        int | None, typer.Option(min=64, help="Tokens of the longest micro-batch; longer ones show attention better.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of every measurement; the median counts.")] = 5,
    overrides: _Set = None,
    debug: _Debug = False,
) -> None:
    """Measure what micro-batches cost on this machine under each scheme; planners read the file.

    Every distinct block of the model is timed once per kind of stage and micro-batch; stages are added up from them.
    """
    with _sentences(debug):
        settings = TrainConfig.load(config, overrides or ())
        if not out.parent.is_dir():
            raise ValueError(f"--out {out}: the folder {out.parent} does not exist: make it, or name another")
        wanted = None if schemes is None else _read_schemes(schemes)
        flags = (sequence_parallel, recompute)
        profile, ranks = _on_ranks(settings.ranks, _profile_rank, settings, wanted, flags, longest, repeats)
        if int(os.environ.get("RANK", "0")) == 0:
            profile.save(out)
            _print_profile(profile, ranks, out)
        if not profile.schemes:
            raise typer.Exit(_FAILED)


@app.command(
    "plan",
    epilog="Example: hydragraph plan --profile profile.json --lengths lengths.txt --devices 64 --context 32768 "
    "--explain --picture plan.png, where profile.json is from hydragraph profile and lengths.txt has one number per "
    "line. To try a strategy of your own: --strategy '<tp8,pp2> + 6*<tp8,pp1>'.",
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
        typer.Option("--strategy", "--strategies", help="Compare these; default: proposed and homogeneous ones."),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Mini-batches to draw from the lengths.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw and the search.")] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="All candidates, and what their seconds go to.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw one iteration's pipelines x micro-batches to this PNG file.")
    ] = None,
    debug: _Debug = False,
) -> None:
    """Show which strategies suit the data and what they are expected to take, without running anything.

    Candidates are proposed from the lengths, and mini-batches drawn from these are planned with each; the table says
    how long an iteration takes against the best homogeneous strategy, and why a candidate lost.
    """
    from hydragraph.planner.explain import explain as explained  # needs numba and scipy, which others do without
    from hydragraph.planner.explain_text import to_record, to_text
    from hydragraph.train.plan_input import read_candidates, read_lengths, read_profile
    from hydragraph.train.plan_picture import write_plan_picture

    with _sentences(debug):
        own = read_candidates(strategies or ())
        constants, data = read_profile(profile), read_lengths(lengths)
        report = explained(constants, data, devices, context, tokens, strategies=own, iterations=iterations, seed=seed)
        print(json.dumps(to_record(report), indent=1) if as_json else to_text(report, explain), end="\n" * as_json)
        if picture is not None:
            write_plan_picture(report.example, picture)


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


def _read_schemes(text: str) -> tuple[Scheme, ...]:
    """Read tp1pp1,tp2pp4."""
    found = [re.fullmatch(r"tp([1-9]\d*)pp([1-9]\d*)", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ValueError(f"--schemes {text!r}: write schemes as in tp1pp1,tp2pp4")
    return tuple(dict.fromkeys((int(match[1]), int(match[2])) for match in found if match))


def _every_scheme(program: Program, ranks: int) -> tuple[Scheme, ...]:
    """Return all schemes of a model that so many ranks can run."""
    degrees = [tp for tp in range(1, ranks + 1) if all(heads % tp == 0 for heads in program.heads)]
    return tuple((tp, pp) for tp in degrees for pp in range(1, min(ranks // tp, program.layers) + 1))


def _profile_rank(
    config: TrainConfig,
    schemes: tuple[Scheme, ...] | None,
    flags: tuple[bool, bool],
    longest: int | None,
    repeats: int,
) -> tuple[Profile, int]:
    """Measure on this rank; return the profile and how many ranks there are."""
    _quieten()
    world = join(config.device)
    model = skeleton(config.model, config.data.vocab_size)
    program = capture(model, dtype=getattr(torch, config.dtype))
    given = [s for p in read_strategies(config.strategies, model, world.ranks) for q in p.pipelines for s in q.stages]
    wanted = schemes or _every_scheme(program, world.ranks)
    kinds = [Kind(s.tp, s.sequence_parallel, s.recompute) for s in given]
    for tp in dict.fromkeys(tp for tp, _ in wanted):
        parallel = [False, True] if flags[0] and tp > 1 else [False]
        kinds += [Kind(tp, sp, again) for sp in parallel for again in ([False, True] if flags[1] else [False])]
    tokens = longest or max(config.data.max_length, 4 * hidden_size(program), 1024)
    settings = Settings(wanted, tuple(kinds), tokens, repeats)
    sizes = model.config
    vocabulary, positions = int(sizes.vocab_size), getattr(sizes, "max_position_embeddings", None)  # type: ignore
    subject = Subject(program, initial_buffers(model), vocabulary, positions)
    console = Console(stderr=True)
    with Progress(console=console, disable=world.rank != 0 or not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=None)
        groups = Groups(world, timedelta(minutes=10))
        found = measure(
            subject,
            settings,
            groups,
            lambda done, total, what: bar.update(task, completed=done, total=total, description=f"measuring {what}"),
        )
        groups.close()
    return found, world.ranks


def _print_profile(profile: Profile, ranks: int, path: Path) -> None:
    """Print a table of the constants, and what its reader has to know."""
    table = Table(title=escape(profile.name), title_justify="left")
    headings = ("scheme", "a ns/tok\u00b2", "b \u00b5s/tok", "c ms", "residual", "MaxLen", "UtilLen")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "scheme" else "right")
    for scheme, k in profile.schemes.items():
        limit = profile.max_len(scheme, max(ranks, scheme[0] * scheme[1]))
        numbers = (f"{1e9 * k.a:.4g}", f"{1e6 * k.b:.4g}", f"{1e3 * k.c:.4g}", f"{profile.residuals[scheme]:.1%}")
        table.add_row(f"<tp{scheme[0]},pp{scheme[1]}>", *numbers, f"{limit:,}", f"{profile.util_len(scheme):,}")
    console = Console()
    console.print(table)
    for tp, pp in profile.failed:
        print(f"FAILED <tp{tp},pp{pp}>: {profile.failed[tp, pp]}")
    for kind, why in profile.unfit.items():
        print(f"FAILED stages of kind {kind.text}: {why}")
    if profile.link is not None:
        link = profile.link
        print(f"link between ranks 0 and 1: {link.bytes_per_s / 1e9:.3g} GB/s, latency {1e6 * link.latency_s:.3g} us")
    for note in profile.notes:
        print(f"note: {note}")
    print(f"{path}: load it with hg.Profile.load")


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

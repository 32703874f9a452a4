"""Command line, which reports each error as one sentence and an exit code.

Commands import their modules when they run, so that `--help` is fast.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hydragraph import log
from hydragraph.cluster.processes.compute_threads import spinning
from hydragraph.cluster.processes.launcher_environment import check_environment
from hydragraph.commands import (
    chaos,
    check,
    compare,
    compile,
    devices,
    export,
    init,
    plan,
    plan_devices,
    profile,
    report,
    show,
    simulate,
    train,
    verify,
)
from hydragraph.commands.bench.command import COMMANDS as BENCH_COMMANDS
from hydragraph.commands.launch_process import launched
from hydragraph.commands.options import check_read, check_written
from hydragraph.errors import CallbackFailure, EndedElsewhere, RankFailure, StillCompiling, Unreachable
from hydragraph.version import __version__

# Exit codes for users' mistakes and failed runs.
_MISTAKE, _FAILED = 2, 1

_COMMANDS: dict[str, Callable[..., None]] = {
    "train": train.train_command,
    "chaos": chaos.chaos_command,
    "check": check.check_command,
    "verify": verify.verify_command,
    "show": show.show_command,
    "compile": compile.compile_command,
    "simulate": simulate.simulate_command,
    "compare": compare.compare_command,
    "report": report.report_command,
    "profile": profile.profile_command,
    "devices": devices.devices_command,
    "plan": plan.plan_command,
    "export": export.export_command,
    "init": init.init_command,
}


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hydragraph {__version__}")
        raise typer.Exit


def main(began: float | None = None) -> None:
    """Run the command line; a command's deadline counts from `began`."""
    # Before anything imports PyTorch
    os.environ.update(spinning(os.environ))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    plan_devices.began = began
    try:
        app()
    except OSError as error:
        _complain(_said(error), debug=False)
        sys.exit(_FAILED)
    finally:
        plan_devices.began = None


def _app() -> typer.Typer:
    typer_app = typer.Typer(
        help="Train one PyTorch model on many uneven devices.", no_args_is_help=True, pretty_exceptions_enable=False
    )
    typer_app.callback()(_options)
    _add(typer_app, _COMMANDS)
    bench = typer.Typer(
        help="Measure kernels, strategy switches and training steps; sizes are small on a CPU.", no_args_is_help=True
    )
    _add(bench, BENCH_COMMANDS)
    typer_app.add_typer(bench, name="bench")
    return typer_app


def _add(typer_app: typer.Typer, commands: Mapping[str, Callable[..., None]]) -> None:
    """Add commands with their docstrings as help texts."""
    for name, function in commands.items():
        # The help shows "Example: ..." after the options.
        text, heading, example = (inspect.getdoc(function) or "").partition("\n\nExample")
        epilog = " ".join(f"{heading}{example}".split())
        typer_app.command(name, help=text, epilog=epilog)(_in_sentences(function))


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one PyTorch model on many uneven devices."""


def _in_sentences(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def run(**given: Any) -> None:
        with _sentences(given["debug"], given.get("log_level")):
            check_environment(os.environ)
            _check_picture(given.get("picture"))
            for name in _FILES:
                if isinstance(given.get(name), Path):
                    check_written(f"--{name}", given[name])
            check_read(given)
            function(**given)

    return run


# Options that name output files, which are written last: check their paths first.
_FILES = ("picture", "trace", "csv", "json", "markdown", "report")


def _check_picture(path: Path | None) -> None:
    if path is None:
        return
    if find_spec("matplotlib") is None:
        raise ImportError("--picture needs matplotlib: pip install matplotlib, or omit --picture")
    if path.suffix.lower() != ".png":
        raise ValueError(f"--picture {path}: only PNG files can be written: use {path.with_suffix('.png')}")


@contextmanager
def _sentences(debug: bool, log_level: str | None = None) -> Iterator[None]:
    """Turn an error into a sentence and an exit code; with --debug, also print the traceback."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # Without --log-level, only the model check logs INFO.
    logging.getLogger("hydragraph.frontend.check").setLevel(logging.INFO if log_level is None else logging.NOTSET)
    try:
        if log_level is not None:
            log.show(log_level)
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        _complain("stopped", debug)
        # 128 + SIGINT, as in shells
        raise typer.Exit(130) from None
    except (ValueError, OSError, ImportError) as error:
        _complain(_said(error), debug)
        raise typer.Exit(_MISTAKE) from None
    except (FloatingPointError, RankFailure, EndedElsewhere, StillCompiling, Unreachable) as error:
        _complain(f"{error}{_if_full(str(error), '')}", debug)
        raise typer.Exit(_FAILED) from None
    except CallbackFailure as error:
        if not debug:
            print(error.__notes__[0], file=sys.stderr, end="")
        _complain(str(error), debug)
        raise typer.Exit(_FAILED) from None
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _complain(f"{text}{_if_full(text, ' (this is a bug; --debug prints the traceback)')}", debug)
        raise typer.Exit(_FAILED) from None
    finally:
        if log_level is not None:
            log.show(None)


# Replacements of the operating system's messages about paths.
_PATHS: dict[type[Exception], str] = {
    FileExistsError: "this path already exists: name another path",
    FileNotFoundError: "the file or directory does not exist: correct the path",
    IsADirectoryError: "this path is a directory: name a file in it",
    NotADirectoryError: "a parent of this path is a file, not a directory: correct the path",
    PermissionError: "you do not have permission to use this path: change its permissions, or name another path",
}

_MEMORY = re.compile(r"out of memory|allocate memory|tried to allocate|MemoryError")


def _if_full(text: str, otherwise: str) -> str:
    if not _MEMORY.search(text):
        return otherwise
    return ": lower data.max_length, recompute activations (as in <tp1,pp1>r) or use more ranks (see hydragraph check)"


_FULL = (errno.ENOSPC, errno.EDQUOT)


def _said(error: Exception) -> str:
    """Return an error's text, with a remedy for rejected paths and full disks."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL:
        return f"{error}: free disk space, or write elsewhere"
    if isinstance(error, OSError) and error.filename is not None and error.strerror == os.strerror(number or 0):
        other = f"{error.strerror.lower()}: correct the path, or name another"
        return f"{error.filename}: {_PATHS.get(type(error), other)}"
    return str(error)


def _complain(sentence: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    where = f"rank {os.environ['RANK']}: " if launched() else ""
    print(f"hydragraph: {where}{sentence}", file=sys.stderr)


app = _app()

if __name__ == "__main__":
    main()

"""Ranks forked from one process that has prepared what they share: captured models, compiled templates."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch

from hydragraph.runtime.crew import Context, dismiss, outcome_of, run_crew, start
from hydragraph.runtime.rank_process import Died, Raised, Returned, error_of, raised

_MORE_S = 30.0  # for ranks that took too long to be ended


def run_forked(
    context: Context, prepare: bytes, ranks: int, port: int, work: bytes, timeout: timedelta | None
) -> list[bytes]:
    """Run ranks as `run_crew` does, forked from a process that has prepared what comes before their arguments.

    Args:
        context: what starts that process.
        prepare: a pickled function, and no arguments.

    Raises:
        RuntimeError: that process died, or `prepare` left what cannot be forked.
        RankFailure, TimeoutError, any other error: as `launch`.
    """
    nursery = start(context, 0, _nurse, dict(os.environ), prepare, ranks, port, work, timeout)
    try:
        limit = None if timeout is None else timeout.total_seconds() + _MORE_S
        if not multiprocessing.connection.wait([nursery.connection, nursery.process.sentinel], limit):
            raise TimeoutError(f"launch: preparing had not ended after {limit:g} s")
        nursery.outcome = outcome_of(nursery)
        if isinstance(nursery.outcome, Died):
            raise RuntimeError(f"launch: the process that ranks are forked from was {nursery.outcome.how}")
        if isinstance(nursery.outcome, Raised):
            raise error_of(nursery.outcome)
        found: list[bytes] = pickle.loads(nursery.outcome.value)
        return found
    finally:
        dismiss([nursery])


def _nurse(
    connection: Connection,
    environment: dict[str, str],
    prepare: bytes,
    ranks: int,
    port: int,
    work: bytes,
    timeout: timedelta | None,
) -> None:
    """Prepare, then have ranks forked; live until they are gone."""
    os.environ.clear()
    os.environ.update(environment)
    began = time.monotonic()
    try:
        _without_monitor()
        function, _ = pickle.loads(prepare)
        prepared = (function(),)
        _check_forkable(function)
        left = None if timeout is None else timeout - timedelta(seconds=time.monotonic() - began)
        if left is not None and left <= timedelta(0):
            raise TimeoutError(f"launch: preparing took all of the {timeout.total_seconds():g} s")  # type: ignore[union-attr]
        context = multiprocessing.get_context("fork")
        outcome: Returned | Raised = Returned(pickle.dumps(run_crew(context, ranks, port, work, left, prepared)))
    except BaseException as error:
        outcome = raised(error)
    with contextlib.suppress(OSError):
        connection.send(outcome)


def _without_monitor() -> None:
    """Keep tqdm from starting a thread: `torch.fx.Interpreter` makes a bar that nobody sees."""
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    tqdm.monitor_interval = 0


def _check_forkable(prepare: object) -> None:
    """Raise RuntimeError where a forked process would inherit something broken."""
    name = getattr(prepare, "__qualname__", repr(prepare))
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        raise RuntimeError(f"launch: `{name}` left threads, which ranks cannot inherit: {', '.join(others)}; end them")
    if torch.cuda.is_initialized():
        raise RuntimeError(f"launch: `{name}` used a GPU, which ranks cannot inherit: prepare on the CPU or on meta")

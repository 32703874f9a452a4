"""Logging of a run's events through Python's `logging`, one line per event.

    [rank 1/4 step 12] hydragraph.passes.variants: compiled layer.3 for rank 0 of 2 in 0.41 s

INFO is for events that happen a few times in a run, DEBUG for events of every step. To show lines, use `--log-level`,
`show` in a script (also for ranks of `hydragraph.launch`), or a handler with a `RankFilter`. Long operations report
progress to `doing`, which calls the functions registered with `hearing`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(where)s%(name)s: %(message)s"

_LIBRARY = "hydragraph"


@dataclass
class _Position:
    rank: int | None = None
    ranks: int = 1
    step: int = 0


_position = _Position()


def at_rank(rank: int, ranks: int) -> None:
    """Set this process's rank."""
    _position.rank = rank
    _position.ranks = ranks


def at_step(step: int) -> None:
    """Set this process's step."""
    _position.step = step


Hearer = Callable[[str, int, int], None]
_hearers: list[Hearer] = []


def doing(what: str, done: int = 0, of: int = 0) -> None:
    """Report the current activity to the functions registered with `hearing`.

    Args:
        done: index of the part that begins now, from 1; 0 if unknown.
        of: number of parts; 0 if unknown.
    """
    for hear in _hearers:
        hear(what, done, of)


@contextmanager
def hearing(hear: Hearer) -> Iterator[None]:
    """Call a function with activities that `doing` reports in the `with` block."""
    _hearers.append(hear)
    try:
        yield
    finally:
        _hearers.remove(hear)


class RankFilter(logging.Filter):
    """Filter that adds `rank` (None before joining ranks), `ranks`, `step` and the prefix `where` to log records."""

    def filter(self, record: logging.LogRecord) -> bool:
        at = _position
        record.rank = at.rank
        record.ranks = at.ranks
        record.step = at.step
        record.where = "" if at.rank is None else f"[rank {at.rank}/{at.ranks} step {at.step}] "
        return True


class _Shown(logging.StreamHandler[Any]):
    """Handler that writes to the current stderr, which progress bars may replace."""

    def __init__(self) -> None:
        # StreamHandler.__init__ would store the current stderr
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(FORMAT))
        self.addFilter(RankFilter())

    @property
    def stream(self) -> TextIO:  # pyrefly: ignore[bad-override]  # a property
        return sys.stderr


def show(level: str | int | None = "info") -> None:
    """Write log lines to stderr with rank and step, in this process and in ranks that `launch` starts later.

    Args:
        level: lowest level to show, as a name or number; None stops the output.

    Raises:
        ValueError: the level is unknown.
    """
    # getLevelName returns a name's number, or a text for an unknown name, rejected below.
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if isinstance(level, str) and level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r}: use {', '.join(LEVELS)}")
    logger = logging.getLogger(_LIBRARY)
    for handler in [h for h in logger.handlers if isinstance(h, _Shown)]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET if number is None else number)
    # Otherwise a configured root logger would repeat each line
    logger.propagate = number is None
    if number is not None:
        logger.addHandler(_Shown())


def shown() -> int | None:
    """Return the level passed to `show`, or None."""
    logger = logging.getLogger(_LIBRARY)
    return logger.level if any(isinstance(handler, _Shown) for handler in logger.handlers) else None

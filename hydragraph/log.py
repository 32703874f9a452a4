"""What a run says while it works: one line for each event, through Python's logging.

    [rank 1/4 step 12] hydragraph.passes.variants: compiled layer.3 for rank 0 of 2 in 0.41 s

Lines come from loggers that are named after their modules, below "hydragraph". INFO has what happens a few times in a
run, DEBUG what may happen in every step. Nobody hears either unless somebody asks: by `--log-level` on the command
line, by `show` in a script of one's own, which the ranks of `hydragraph.launch` inherit, or by handlers of one's own,
to which `RankFilter` gives the rank and the step.

What takes a while besides says so when it begins, by `doing`; whoever shows a run to people hears it by `hearing`.
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
    """Where this process is: which rank, None before it has joined the others; and in which step."""

    rank: int | None = None
    ranks: int = 1
    step: int = 0


_position = _Position()


def at_rank(rank: int, ranks: int) -> None:
    """Note which rank this process is; the runtime does, where it joins the others."""
    _position.rank, _position.ranks = rank, ranks


def at_step(step: int) -> None:
    """Note which step this process is in; the executable does, where one begins."""
    _position.step = step


Hearer = Callable[[str, int, int], None]
_hearers: list[Hearer] = []


def doing(what: str, done: int = 0, of: int = 0) -> None:
    """Tell whoever shows this process's work what it now does; where nobody does, nothing happens.

    Args:
        what: such as "capturing LlamaForCausalLM".
        done, of: the part that now begins, from 1, and how many there are; 0: unknown.
    """
    for hear in _hearers:
        hear(what, done, of)


@contextmanager
def hearing(hear: Hearer) -> Iterator[None]:
    """Have a function called with all that `doing` is told in this process, inside."""
    _hearers.append(hear)
    try:
        yield
    finally:
        _hearers.remove(hear)


class RankFilter(logging.Filter):
    """Gives records `rank` (None in a process that is none), `ranks`, `step`, and `where`, the text of all three.

    It lets everything pass: `handler.addFilter(RankFilter())`, with `FORMAT` or a format of one's own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields to a record."""
        at = _position
        record.rank, record.ranks, record.step = at.rank, at.ranks, at.step
        record.where = "" if at.rank is None else f"[rank {at.rank}/{at.ranks} step {at.step}] "
        return True


class _Shown(logging.StreamHandler[Any]):
    """Writes to whatever stderr is at the time: a progress bar puts itself in its place, and moves out of the way."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's would keep the stream
        self.setFormatter(logging.Formatter(FORMAT))
        self.addFilter(RankFilter())

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """This process's stderr."""
        return sys.stderr


def show(level: str | int | None = "info") -> None:
    """Write the library's lines to stderr, each with its rank and step.

    For whoever owns the process, such as a script: the library never calls it by itself. Ranks that `launch` starts
    afterwards show as much.

    Args:
        level: the least level that is shown, by name or number; None: write nothing any more.

    Raises:
        ValueError: there is no such level.
    """
    number = logging.getLevelName(level.upper()) if isinstance(level, str) else level
    if isinstance(level, str) and level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r}: use {', '.join(LEVELS)}")
    logger = logging.getLogger(_LIBRARY)
    for handler in [each for each in logger.handlers if isinstance(each, _Shown)]:
        logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET if number is None else number)
    logger.propagate = number is None  # else a root logger that somebody configured would write every line again
    if number is not None:
        logger.addHandler(_Shown())


def shown() -> int | None:
    """Return the level that `show` was told, None where nothing is shown."""
    logger = logging.getLogger(_LIBRARY)
    return logger.level if any(isinstance(each, _Shown) for each in logger.handlers) else None

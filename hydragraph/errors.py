"""Errors that tell users what happened, where, and what to do."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence


class Unsupported(ValueError):  # noqa: N818  the public name
    """Error for a request that hydragraph rejects, because the result would be silently wrong.

    Args:
        what: the rejected request, as a clause.
        where: module, block, operator or field.
        remedy: an alternative for the user.
    """

    def __init__(self, what: str, *, where: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.what = what
        self.where = where
        self.remedy = remedy

    def __reduce__(self) -> tuple[Callable[..., Unsupported], tuple[str, str, str]]:
        return _unsupported, (self.what, self.where, self.remedy)


def type_text(value: object) -> str:
    """Return a value's type with an article, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def listed(texts: Sequence[str], most: int = 3) -> str:
    """Join the first `most` texts by commas, and count the rest."""
    rest = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + rest


def _unsupported(what: str, where: str, remedy: str) -> Unsupported:
    return Unsupported(what, where=where, remedy=remedy)


class RankFailure(RuntimeError):  # noqa: N818
    """Raised if a rank fails during a collective call. The failed call updates no weights.

    Args:
        rank: the rank that failed first.
        instruction: text of the instruction or call that failed, or "".
        error: the rank's exception, or how its process ended.
        host: host name of the failed rank, or ""; the message omits the current host's name.
    """

    def __init__(self, rank: int, instruction: str, error: str, host: str = "") -> None:
        on = f" on {host}" if host and host != socket.gethostname() else ""
        at = f" at `{instruction}`" if instruction else ""
        super().__init__(f"rank {rank}{on} failed{at}: {error}")
        self.rank = rank
        self.instruction = instruction
        self.error = error
        self.host = host

    def __reduce__(self) -> tuple[type[RankFailure], tuple[int, str, str, str]]:
        return RankFailure, (self.rank, self.instruction, self.error, self.host)


class Stopped(RuntimeError):  # noqa: N818
    """Raised on all ranks before a step if any rank was asked to stop. Ranks can still save a checkpoint.

    Args:
        reason: the largest of the ranks' reasons (numbers, such as signals).
    """

    def __init__(self, reason: int) -> None:
        super().__init__(f"a rank was asked to stop ({reason}): save a checkpoint, and load it to continue")
        self.reason = reason

    def __reduce__(self) -> tuple[type[Stopped], tuple[int]]:
        return Stopped, (self.reason,)


class TooFewRanks(RuntimeError):  # noqa: N818
    """Raised if too few ranks remain to continue; they can save the complete state."""

    def __init__(self, why: str, remedy: str = "save the state, and continue with more ranks") -> None:
        super().__init__(f"{why}; the state is complete: {remedy}")
        self.why = why
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[TooFewRanks], tuple[str, str]]:
        return TooFewRanks, (self.why, self.remedy)


class Unreachable(RuntimeError):  # noqa: N818
    """Raised if ranks of two hosts cannot connect; the message names the tried addresses."""


class CallbackFailure(RuntimeError):  # noqa: N818
    """Raised if a callback fails; `__notes__` contains its traceback."""


class StillCompiling(RuntimeError):  # noqa: N818
    """Raised if the planner's search is not compiled yet."""


class EndedElsewhere(RuntimeError):  # noqa: N818
    """Raised if another machine ended the run; the message gives the reason."""

"""Errors that a user meets: each says what, where, and the fix."""

from __future__ import annotations

import socket
from collections.abc import Callable


class Unsupported(ValueError):  # noqa: N818  the public name; it reads as a sentence: raise Unsupported(...)
    """Something hydragraph refuses to do, because doing it would be silently wrong.

    Args:
        what: the refused thing, in one clause.
        where: the module, block, operator or field.
        remedy: an alternative for the user.
    """

    def __init__(self, what: str, *, where: str, remedy: str) -> None:
        super().__init__(f"{where}: {what}; {remedy}")
        self.what = what
        self.where = where
        self.remedy = remedy

    def __reduce__(self) -> tuple[Callable[..., Unsupported], tuple[str, str, str]]:
        return _unsupported, (self.what, self.where, self.remedy)


def _unsupported(what: str, where: str, remedy: str) -> Unsupported:
    return Unsupported(what, where=where, remedy=remedy)


class RankFailure(RuntimeError):  # noqa: N818
    """Another rank failed, and with it the call that all ranks were in; no update was applied.

    Args:
        rank: the rank that failed first.
        instruction: the text of its instruction or call, or "".
        error: what the rank raised, or how it ended.
        host: the host that it ran on, or ""; printed unless it is this one.
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
    """A rank was to stop: this step was not begun on any rank, and they can still save.

    Args:
        reason: the largest number that a rank has set, such as a signal's.
    """

    def __init__(self, reason: int) -> None:
        super().__init__(f"a rank was asked to stop ({reason}): save, and load that to continue")
        self.reason = reason

    def __reduce__(self) -> tuple[type[Stopped], tuple[int]]:
        return Stopped, (self.reason,)


class TooFewRanks(RuntimeError):  # noqa: N818
    """Too few ranks are left to continue; they have the whole state, and can save it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; the state is complete: save it, and continue from it with more ranks")
        self.why = why

    def __reduce__(self) -> tuple[type[TooFewRanks], tuple[str]]:
        return TooFewRanks, (self.why,)


class Unreachable(RuntimeError):  # noqa: N818
    """Ranks of two hosts cannot connect to each other; the error names the addresses that were tried."""


class EndedElsewhere(RuntimeError):  # noqa: N818
    """Another machine has ended the run; its own words say why."""

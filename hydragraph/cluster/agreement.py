"""Collective error handling: an error on one rank is raised on all, with the text of the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from hydragraph.cluster.communicators import Groups
from hydragraph.cluster.failure.rank_watch import agreed
from hydragraph.errors import RankFailure

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """Error of one rank as text, because not every exception can be pickled."""

    users: bool
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Describe an error; a `ValueError` is a mistake of the caller and keeps its message."""
        users = isinstance(error, ValueError)
        return Failure(users, str(error) if users else f"{type(error).__name__}: {error}")


def together(groups: Groups, what: str, work: Callable[[], T]) -> list[T]:
    """Run a function on every rank and return all results by rank; if it fails on one, all raise."""
    error: Exception | None = None
    try:
        outcome: T | Failure = work()
    except Exception as raised:
        outcome = Failure.of(raised)
        error = raised
    outcomes = groups.gather_objects(outcome)
    raise_first({r: o for r, o in enumerate(outcomes) if isinstance(o, Failure)}, error, what)
    return cast(list[T], outcomes)


def together_own(groups: Groups, what: str, work: Callable[[], T]) -> T:
    """Run a function on every rank and return this rank's result; if it fails on one, all raise."""
    results: list[T] = []
    together(groups, what, lambda: results.append(work()))
    return results[0]


def raise_first(failures: Mapping[int, Failure], own: BaseException | None, what: str) -> None:
    """Raise this rank's own error, or the first failure of another; a caller's mistake stays a ValueError."""
    if own is not None:
        raise agreed(own)
    if failures:
        rank = min(failures)
        if failures[rank].users:
            raise ValueError(failures[rank].text)
        raise RankFailure(rank, what, failures[rank].text)

"""Errors that all ranks raise: what fails on one of them fails on all, with the first one's words."""

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
    """What one rank raised, as text: not every exception can be sent."""

    users: bool
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Describe an error; a `ValueError` is the caller's own mistake and keeps its words."""
        users = isinstance(error, ValueError)
        return Failure(users, str(error) if users else f"{type(error).__name__}: {error}")


def together(groups: Groups, what: str, work: Callable[[], T]) -> list[T]:
    """Do something on every rank and return all results by rank; if one fails, all raise."""
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
    """Do something on every rank whose result stays there; if one fails, all raise."""
    results: list[T] = []
    together(groups, what, lambda: results.append(work()))
    return results[0]


def raise_first(failures: Mapping[int, Failure], own: BaseException | None, what: str) -> None:
    """Raise this rank's own error, or the first failure of another: a user's mistake is everybody's."""
    if own is not None:
        raise agreed(own)
    if failures:
        rank = min(failures)
        if failures[rank].users:
            raise ValueError(failures[rank].text)
        raise RankFailure(rank, what, failures[rank].text)

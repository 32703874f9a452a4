"""Collective error handling: an error on one rank is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from hydragraph.cluster.failure.rank_watch import agreed
from hydragraph.cluster.launch import World
from hydragraph.errors import RankFailure

T = TypeVar("T")


class Ranks(Protocol):
    """Ranks that exchange small picklable objects: a `World` or `Groups`."""

    def gather(self, value: T) -> list[T]: ...


@dataclass(frozen=True)
class Failure:
    """Text of one rank's error; `users` is true if the mistake is the caller's."""

    users: bool
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Describe a `ValueError` (the caller's mistake) by its message, and any other error also by its type."""
        users = isinstance(error, ValueError)
        return Failure(users, str(error) if users else f"{type(error).__name__}: {error}")


def together(ranks: Ranks, what: str, work: Callable[[], T]) -> list[T]:
    """Run a function on every rank, and return all results; if it fails on any rank, all ranks raise an error.

    A failed rank raises its own error. Other ranks raise the error of the first failed rank if it is a ValueError, and
    otherwise a RankFailure.
    """
    error: Exception | None = None
    try:
        outcome: T | Failure = work()
    except Exception as raised:
        outcome = Failure.of(raised)
        error = raised
    outcomes = ranks.gather(outcome)
    if error is not None:
        raise agreed(error)
    for rank, rank_outcome in enumerate(outcomes):
        if isinstance(rank_outcome, Failure):
            raise ValueError(rank_outcome.text) if rank_outcome.users else RankFailure(rank, what, rank_outcome.text)
    return cast(list[T], outcomes)


def together_own(ranks: Ranks, what: str, work: Callable[[], T]) -> T:
    """Like `together`, but return only this rank's result."""
    results: list[T] = []
    together(ranks, what, lambda: results.append(work()))
    return results[0]


def raise_together(ranks: Ranks, own: Exception | None, sent: Exception | None) -> None:
    """If any rank passes an error as `sent`, raise each rank's `own` error or, where that is None, the first `sent`."""
    first = next((error for error in ranks.gather(sent) if error is not None), None)
    if first is not None:
        raise agreed(own or first)


def from_first(world: World, make: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result or raise its ValueError on all ranks."""
    outcome: T | ValueError | None = None
    if world.rank == 0:
        try:
            outcome = make()
        except ValueError as refused:
            outcome = refused
    outcome = world.gather(outcome)[0]
    if isinstance(outcome, ValueError):
        raise outcome
    return cast(T, outcome)

"""Collective error handling: one rank's error is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from hydragraph.cluster.failure.rank_watch import agreed
from hydragraph.cluster.launch import World
from hydragraph.errors import RankFailure

T = TypeVar("T")


class Ranks(Protocol):
    """A `World` or `Groups`, which exchanges small picklable objects."""

    def gather(self, value: T) -> list[T]: ...


@dataclass(frozen=True)
class Failure:
    users: bool
    text: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        users = isinstance(error, ValueError)
        return Failure(users, str(error) if users else f"{type(error).__name__}: {error}")


def together(ranks: Ranks, what: str, work: Callable[[], T]) -> list[T]:
    """Run a function on every rank, and return all results.

    If it fails on any rank, all ranks raise an error. A failed rank raises its own. The others raise the ValueError of
    the lowest failed rank, or a RankFailure if that rank has another error.
    """
    error: Exception | None = None
    try:
        outcome: T | Failure = work()
    except Exception as raised:
        outcome = Failure.of(raised)
        error = raised
    # A failed rank takes part, because the others wait for it.
    outcomes = ranks.gather(outcome)
    if error is not None:
        raise agreed(error)
    for rank, rank_outcome in enumerate(outcomes):
        if isinstance(rank_outcome, Failure):
            raise ValueError(rank_outcome.text) if rank_outcome.users else RankFailure(rank, what, rank_outcome.text)
    return cast(list[T], outcomes)


def together_own(ranks: Ranks, what: str, work: Callable[[], T]) -> T:
    """Like `together`, but return this rank's result."""
    results: list[T] = []
    together(ranks, what, lambda: results.append(work()))
    return results[0]


def raise_together(ranks: Ranks, own: Exception | None, sent: Exception | None) -> None:
    """If any rank has an error `sent`, raise on all ranks this rank's `own`, or else the first `sent`."""
    first = next((error for error in ranks.gather(sent) if error is not None), None)
    if first is not None:
        raise agreed(own or first)


def from_one(world: World, make: Callable[[], T], rank: int = 0) -> T:
    """Call a function on one rank; return its result, or raise its ValueError, on all ranks."""
    outcome: T | ValueError | None = None
    if world.rank == rank:
        try:
            outcome = make()
        except ValueError as refused:
            outcome = refused
    outcome = world.gather(outcome)[rank]
    if isinstance(outcome, ValueError):
        raise outcome
    return cast(T, outcome)

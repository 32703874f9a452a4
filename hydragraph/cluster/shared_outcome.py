"""Actions of some ranks with an outcome for all: an error on one of them is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hydragraph.cluster.agreement import Failure, raise_first
from hydragraph.cluster.launch import World

T = TypeVar("T")


def together(world: World, what: str, acts: bool, make: Callable[[], T]) -> list[T | None]:
    """Call a function on the ranks that act, and return every rank's result; an error on one is raised on all.

    Args:
        what: description of the action, for ranks without an error.
        acts: whether this rank calls the function.
    """
    value: T | None = None
    error: Exception | None = None
    if acts:
        try:
            value = make()
        except Exception as raised:
            error = raised
    outcomes = world.gather((value, None if error is None else Failure.of(error)))
    raise_first({rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}, error, what)
    return [value for value, _ in outcomes]

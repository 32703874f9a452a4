"""Function calls on some ranks, whose outcomes all ranks receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hydragraph.cluster import agreement
from hydragraph.cluster.launch import World

T = TypeVar("T")


def together(world: World, what: str, acts: bool, make: Callable[[], T]) -> list[T | None]:
    """Like `agreement.together`, but call `make` only where `acts` is true."""
    return agreement.together(world, what, lambda: make() if acts else None)

"""Calls of a function on some ranks; all ranks receive the results and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hydragraph.cluster import agreement
from hydragraph.cluster.launch import World

T = TypeVar("T")


def together(world: World, what: str, acts: bool, make: Callable[[], T]) -> list[T | None]:
    """Call a function on ranks with `acts`; results and errors are as for `agreement.together`."""
    return agreement.together(world, what, lambda: make() if acts else None)

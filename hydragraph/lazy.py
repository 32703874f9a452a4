"""Packages whose names are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attributes(package: str, where: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any]]:
    """Return a package's `__all__` and `__getattr__` (PEP 562).

    Args:
        where: name -> the module that it comes from.
    """

    def find(name: str) -> Any:
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(where[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return sorted(where), find

"""Tests that run only in `make thorough`: further cases of properties that `make test` shows with one case."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def first(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`: those kept run always, the others in `make thorough` only."""
    return [case if case in kept else _later(case) for case in cases]


def _later(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=thorough)

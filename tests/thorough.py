"""Tests that run only in `make thorough`: further cases of properties that `make test` shows with the cheapest case."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

thorough = pytest.mark.thorough


def first(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`: those kept run always, the others in `make thorough` only."""
    return [case if case in kept else _later(case) for case in cases]


def only(*ids: str) -> pytest.MarkDecorator:
    """Mark a parametrised test: of its cases, `make test` runs those with these ids, and `make thorough` all."""
    return pytest.mark.only(*ids)


def mark_others(items: Sequence[pytest.Item], whole: bool) -> None:
    """Mark the cases that `only` does not name.

    Args:
        items: the collected tests.
        whole: whether they are all tests of their files.

    Raises:
        pytest.UsageError: `only` names an id that no case of the test has.
    """
    unseen: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("only")
        if marker is None or not isinstance(item, pytest.Function):
            continue
        case = item.callspec.id
        unseen.setdefault(f"{item.path}::{item.originalname}", set(marker.args)).discard(case)
        if case not in marker.args:
            item.add_marker(thorough)
    wrong = [f"{name}: no case has the id {sorted(ids)[0]!r}" for name, ids in unseen.items() if ids and whole]
    if wrong:
        raise pytest.UsageError(f"{wrong[0]}, which @only names: list the ids with pytest --collect-only -m ''")


def _later(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=thorough)

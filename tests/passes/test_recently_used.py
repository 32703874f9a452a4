"""The cache keeps the most recently requested keys, in any order of requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.passes.recently_used import LRU


@given(st.integers(1, 5), st.lists(st.integers(0, 7)))
def test_the_last_ones_asked_for_are_kept(capacity: int, keys: list[int]) -> None:
    recent, made = LRU[int, object](capacity), dict[int, object]()
    for i, key in enumerate(keys):
        kept = list(dict.fromkeys(reversed(keys[:i])))[:capacity]
        value = object()
        found = recent.get(key, lambda value=value: value)
        assert found is (made[key] if key in kept else value)
        made[key] = found
        assert len(recent) == len(set(kept) | {key}) if len(kept) < capacity else len(recent) == capacity


def test_a_value_that_cannot_be_made_is_not_kept() -> None:
    recent = LRU[str, int](1)
    assert recent.get("a", lambda: 1) == 1
    with pytest.raises(ZeroDivisionError):
        recent.get("b", lambda: 1 // 0)
    assert recent.get("a", lambda: 2) == 1

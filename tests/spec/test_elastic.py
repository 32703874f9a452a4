"""What a launch does when ranks are lost: settings that make no sense are refused."""

from __future__ import annotations

from typing import Any

import pytest

from hydragraph.spec.elastic import Elastic


@pytest.mark.parametrize(
    ("name", "value"), [("min_ranks", 0), ("spares", -1), ("min_ranks", True), ("grace_s", 0), ("progress_s", 0)]
)
def test_wrong_numbers_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Elastic(**{name: value})

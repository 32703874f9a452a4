"""Arguments of a wrong type are named with the annotation that they must fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from hydragraph.spec.argument_types import typed


@typed("count", "seconds", "lengths", "named", "text")
def function(
    count: int = 0,
    seconds: float | None = None,
    lengths: Sequence[Sequence[int]] = (),
    named: Mapping[str, int] | None = None,
    text: str = "",
) -> int:
    return count


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"count": 1.5}, "function: 'count' is 1.5: give int"),
        ({"count": True}, "function: 'count' is True: give int"),
        ({"seconds": "5"}, "function: 'seconds' is '5': give float or None"),
        ({"lengths": [3, 4]}, r"function: 'lengths' is \[3, 4\]: give Sequence\[Sequence\[int\]\]"),
        ({"lengths": "34"}, "function: 'lengths' is '34'"),
        ({"named": [1]}, r"function: 'named' is \[1\]: give Mapping\[str, int\] or None"),
        ({"text": 3}, "function: 'text' is 3: give str"),
    ],
)
def test_a_wrong_type_is_told(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        function(**given)


def test_what_fits_is_passed_on() -> None:
    given: Any = (np.int64(3), np.float32(1), [np.array([1, 2]), (3,)], {"a": 1}, "b")
    assert function(*given) == 3
    rows: Any = np.ones((2, 2), dtype=int)
    assert function(2, 5, rows, None) == 2
    with pytest.raises(TypeError, match="unexpected keyword argument 'nosuch'"):
        function(nosuch=1)  # pyrefly: ignore[unexpected-keyword]

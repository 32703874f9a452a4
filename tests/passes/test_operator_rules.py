"""How views carry a cut dimension."""

from __future__ import annotations

import pytest

import hydragraph.kernels.varlen_attention  # noqa: F401  registers the operator that has a rule
from hydragraph.passes.operator_rules import carried


@pytest.mark.parametrize(
    ("before", "after", "dim", "expected"),
    [
        ([5, 48], [5, 4, 12], 1, 1),
        ([5, 4, 12], [5, 48], 1, 1),
        ([5, 4, 12], [5, 48], 2, None),
        ([1, 5, 48], [5, 48], 2, 1),
        ([5, 48], [1, 5, 48], 1, 2),
        ([5, 16], [5, 1, 16], 1, 1),  # one head
        ([5, 48], [240], 1, None),
        ([5, 48], [240], 0, 0),
    ],
)
def test_where_a_view_carries_a_dimension(before: list[int], after: list[int], dim: int, expected: int | None) -> None:
    assert carried(before, after, dim) == expected

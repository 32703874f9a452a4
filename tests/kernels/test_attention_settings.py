"""Windows, and the cut of packed sequences into chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.kernels.attention_settings import AttentionSettings, cut_at_multiples, visible
from tests.kernels.test_varlen_attention import bounds


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 12),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_parts_are_the_chunks_of_each_sequence(lengths: list[int], chunk: int, dtype: torch.dtype) -> None:
    starts = bounds(lengths, dtype)
    parts = cut_at_multiples(starts, sum(lengths), chunk)
    assert parts.dtype == dtype
    found = [(a, b) for a, b in pairwise(parts.tolist()) if b > a]
    assert found == [
        (a + i, min(a + i + chunk, b)) for a, b in pairwise(starts.tolist()) for i in range(0, b - a, chunk)
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (AttentionSettings(True, 1.0, window=2), [[1, 0, 0], [1, 1, 0], [0, 1, 1]]),
        (AttentionSettings(False, 1.0, window=2), [[1, 1, 0], [1, 1, 1], [0, 1, 1]]),
        (AttentionSettings(True, 1.0), [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        (AttentionSettings(False, 1.0), [[1] * 3] * 3),
    ],
)
def test_what_a_query_sees(settings: AttentionSettings, expected: list[list[int]]) -> None:
    places = torch.arange(3)
    assert visible(places, places, settings).int().tolist() == expected

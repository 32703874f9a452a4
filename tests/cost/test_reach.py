"""Pairs of windows and chunks against keys counted one by one."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydragraph.cost.reach import WHOLE, AttentionReach, total
from hydragraph.kernels.attention_settings import AttentionSettings, visible

LENGTHS = st.integers(0, 80)
LIMITS = st.none() | st.integers(1, 40)


def counted(length: int, reach: AttentionReach, causal: bool) -> int:
    """Return the keys of all queries of a sequence."""
    places = torch.arange(length)
    seen = visible(places, places, AttentionSettings(causal, 1.0, reach.window))
    if reach.chunk is not None:
        seen &= places[:, None] // reach.chunk == places // reach.chunk
    return int(seen.sum())


@given(LENGTHS, LIMITS, LIMITS)
def test_pairs_are_twice_the_keys_of_causal_queries_without_the_diagonals_terms(
    length: int, window: int | None, chunk: int | None
) -> None:
    reach = AttentionReach(window, chunk)
    parts = [length] if chunk is None else [chunk] * (length // chunk) + [length % chunk]
    diagonal = sum(part if window is None else min(part, window) for part in parts)
    assert reach.pairs(length) == 2 * counted(length, reach, causal=True) - diagonal


@given(LENGTHS, st.integers(1, 40))
def test_queries_that_see_both_ways_lack_one_key_for_each_token_beyond_the_window(length: int, window: int) -> None:
    pairs = AttentionReach(window).pairs(length)
    assert counted(length, AttentionReach(window), causal=False) == pairs - max(0, length - window)


@given(LENGTHS, LIMITS, LIMITS)
def test_limits_of_the_length_or_more_are_none(length: int, window: int | None, chunk: int | None) -> None:
    assert WHOLE.pairs(length) == length**2
    assert AttentionReach(length + (window or 1), length + (chunk or 1)).pairs(length) == length**2
    assert AttentionReach(window, chunk).pairs(length) <= length**2


@given(st.lists(LENGTHS, min_size=1), LIMITS, LIMITS)
def test_arrays_are_counted_like_numbers(lengths: list[int], window: int | None, chunk: int | None) -> None:
    reach = AttentionReach(window, chunk)
    found = reach.pairs(np.array(lengths, dtype=np.float64))
    assert found.tolist() == [reach.pairs(length) for length in lengths]


def test_reaches_are_named() -> None:
    assert [str(each) for each in (WHOLE, AttentionReach(4096), AttentionReach(8, 16))] == [
        "whole sequences",
        "window 4,096",
        "window 8, chunks of 16",
    ]


def test_coefficients_of_one_reach_add_up_in_one_order() -> None:
    narrow, wide, cut = AttentionReach(4), AttentionReach(8), AttentionReach(chunk=8)
    parts = [(1.0, ((cut, 1.0), (narrow, 2.0))), (3.0, ((wide, 5.0), (narrow, 1.0)))]
    assert total(parts) == ((narrow, 5.0), (wide, 15.0), (cut, 1.0))

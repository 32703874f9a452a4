"""Ranges copied as memory: against a loop over elements of every size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hydragraph.kernels.memory_ranges import copy_ranges


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [0, 3])
def test_ranges_are_where_they_belong_and_nothing_else_is_touched(dtype: torch.dtype, shift: int) -> None:
    source, target = torch.arange(200).to(dtype)[shift:], torch.full((200,), -1, dtype=dtype)[shift:]
    ranges = [(5, 90, 20), (0, 0, 1), (7, 50, 0), (100, 3, 64), (196 - shift, 196 - shift, 4)]
    expected = target.clone()
    for origin, at, length in ranges:
        expected[at : at + length] = source[origin : origin + length]
    offsets = np.array(ranges, dtype=np.int64).T.copy()
    copy_ranges(source, target, (offsets[0], offsets[1], offsets[2]))
    assert torch.equal(target, expected)


def test_no_ranges_are_none() -> None:
    none = np.zeros(0, dtype=np.int64)
    copy_ranges(torch.zeros(0), torch.zeros(0), (none, none, none))

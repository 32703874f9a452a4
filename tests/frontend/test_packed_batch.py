"""Packed micro-batches: bounds, padding, and fields of the user's own."""

from __future__ import annotations

import pytest
import torch

from hydragraph.frontend.packed_batch import pack, padding
from hydragraph.spec.workload import Sequence


def sequence(length: int, start: int = 1) -> Sequence:
    ids = torch.arange(start, start + length)
    return Sequence(ids, -ids, {"weight": ids / 2, "teacher": ids[:, None] * torch.ones(2)})


@pytest.mark.parametrize(
    ("lengths", "multiple", "several", "blanks"),
    [
        ([5], 1, False, 0),
        ([1], 1, False, 1),
        ([5], 1, True, 1),
        ([5, 3], 1, True, 0),
        ([5], 4, False, 3),
        ([8], 4, True, 4),
        ([8], 4, False, 0),
        ([1], 4, True, 3),
    ],
)
def test_padding_is_a_sequence_without_targets(lengths: list[int], multiple: int, several: bool, blanks: int) -> None:
    batch = pack([sequence(n) for n in lengths], multiple, several=several)
    assert padding(lengths, multiple, several) == blanks
    tokens = sum(lengths)
    assert batch["input_ids"].shape == (1, tokens + blanks)
    assert batch["labels"][0, tokens:].tolist() == [-100] * blanks
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert batch["cu_seqlens"].tolist() == [0, *ends, *([tokens + blanks] if blanks else [])]
    assert int(batch["max_length"]) == max([*lengths, blanks])


def test_fields_of_ones_own_are_packed_with_zeros_behind() -> None:
    batch = pack([sequence(2), sequence(1, start=7)], 4)
    assert batch["weight"].tolist() == [[0.5, 1.0, 3.5, 0.0]]
    assert batch["teacher"].tolist() == [[[1, 1], [2, 2], [7, 7], [0, 0]]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0]]

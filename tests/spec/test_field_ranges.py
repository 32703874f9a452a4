"""Values outside of what a model's tables and loss allow are refused by sequence and position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.frontend.mini_batch import MiniBatch
from hydragraph.spec.field_ranges import FieldRange
from hydragraph.spec.workload import Sequence

LIMITS = (
    FieldRange("input_ids", 0, 64, "wte"),
    FieldRange("labels", 0, 64, "the loss", -7),
    FieldRange("position_ids", 0, 5, "wpe"),
    FieldRange("second", 0, 64, "the loss", -7),
)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            torch.tensor([1, 64]),
            "sequence 1: input_ids is 64 at position 1, outside the range 0 to 63 of wte; correct the data",
        ),
        (torch.tensor([-1, 3]), "sequence 1: input_ids is -1 at position 0"),
        (
            {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, -100, 64])},
            "sequence 1: labels is 64 at position 2",  # where it was given
        ),
        (torch.tensor([1] * 6), "sequence 1 has 6 tokens, but wpe has 5 positions; truncate the sequence"),
    ],
)
def test_values_outside_are_refused_by_sequence_and_position(wrong: Tensor | dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MiniBatch.of([torch.tensor([1, 2]), wrong], True, {}, LIMITS[:3])


@pytest.mark.parametrize("limit", LIMITS, ids=str)
@given(st.lists(st.lists(st.integers(-100, 70), min_size=1, max_size=6), max_size=4))
def test_a_mini_batch_is_within_a_limit_where_each_sequence_is(limit: FieldRange, ids: list[list[int]]) -> None:
    sequences = [Sequence(torch.tensor(each), torch.tensor(each), {"second": torch.tensor(each)}) for each in ids]
    try:
        for index, sequence in enumerate(sequences):
            limit.check(sequence, index)
    except ValueError:
        assert not limit.holds(sequences)
    else:
        assert limit.holds(sequences)


def test_what_a_loss_ignores_is_no_value_outside() -> None:
    tokens = torch.tensor([1, 2, 3])
    LIMITS[3].check(Sequence(tokens, tokens, {"second": torch.tensor([5, -7, -7])}), 0)
    with pytest.raises(ValueError, match="sequence 0: second is -100 at position 1"):
        LIMITS[3].check(Sequence(tokens, tokens, {"second": torch.tensor([5, -100, -7])}), 0)


def test_values_inside_pass_whatever_their_integer_type_and_strides() -> None:
    right = [
        torch.tensor([63, 0], dtype=torch.int32),
        torch.tensor([3]).expand(4),
        torch.arange(10)[::2],
        torch.tensor([1, 2], dtype=torch.uint8),
        {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([-100, -100])},
    ]
    found = MiniBatch.of(right, True, {}, LIMITS[:3])
    assert all(s.ids.is_contiguous() and s.ids.dtype is torch.int64 for s in found.sequences)
    assert found.lengths == (2, 4, 5, 2, 0)

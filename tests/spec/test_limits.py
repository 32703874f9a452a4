"""Values outside of what a model's tables and loss allow are refused by sequence and position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydragraph.mini_batch import MiniBatch
from hydragraph.spec.limits import Limit

LIMITS = (Limit("input_ids", 0, 64, "wte"), Limit("labels", 0, 64, "the loss"), Limit("position_ids", 0, 5, "wpe"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.tensor([1, 64]), "sequence 1: input_ids is 64 at position 1, outside the 0 to 63 of wte; mend the data"),
        (torch.tensor([-1, 3]), "sequence 1: input_ids is -1 at position 0"),
        (
            {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, -100, 64])},
            "sequence 1: labels is 64 at position 2",  # where it was given
        ),
        (torch.tensor([1] * 6), "sequence 1 has 6 tokens, and wpe has 5 positions; cut the sequence"),
    ],
)
def test_values_outside_are_refused_by_sequence_and_position(given: Tensor | dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MiniBatch.of([torch.tensor([1, 2]), given], True, {}, LIMITS)


def test_values_inside_pass_whatever_their_integer_type_and_strides() -> None:
    given = [
        torch.tensor([63, 0], dtype=torch.int32),
        torch.tensor([3]).expand(4),
        torch.arange(10)[::2],
        torch.tensor([1, 2], dtype=torch.uint8),
        {"input_ids": torch.tensor([1, 2]), "labels": torch.tensor([-100, -100])},
    ]
    found = MiniBatch.of(given, True, {}, LIMITS)  # type: ignore[arg-type]
    assert all(s.ids.is_contiguous() and s.ids.dtype is torch.int64 for s in found.sequences)
    assert found.lengths == (2, 4, 5, 2, 0)

"""Padded batches: the sequences that they hold, and the masks that are refused."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding

from hydragraph.errors import Unsupported
from hydragraph.spec.padded import sequences_in
from hydragraph.spec.workload import sequence_of

IDS = torch.tensor([[5, 6, 7, 0], [8, 0, 0, 0], [1, 2, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
CUT = [[5, 6, 7], [8], [1, 2, 3, 4]]


def ids_of(given: Any) -> list[list[int]]:
    return [(s if isinstance(s, Tensor) else s["input_ids"]).tolist() for s in sequences_in(given)]


@pytest.mark.parametrize("kind", [dict, UserDict, BatchEncoding])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_a_batch_is_cut_into_its_sequences(kind: type, dtype: torch.dtype) -> None:
    batch = kind({"input_ids": IDS, "attention_mask": MASK.to(dtype)})
    assert ids_of(batch) == ids_of([batch]) == CUT
    assert ids_of([torch.tensor([9]), batch, {"input_ids": IDS[0], "attention_mask": MASK[0]}]) == [[9], *CUT, CUT[0]]


def test_lists_of_a_tokenizer_become_tensors() -> None:
    assert ids_of(BatchEncoding({"input_ids": CUT, "attention_mask": [[1] * len(row) for row in CUT]})) == CUT
    assert ids_of([BatchEncoding({"input_ids": CUT[0], "attention_mask": [1, 1, 1]})]) == [CUT[0]]


def test_arrays_become_tensors() -> None:
    rows = np.array([[3, 1, 2], [4, 5, 0]], dtype=np.int32)
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    cut = sequences_in({"input_ids": rows, "attention_mask": mask})
    assert [row["input_ids"].tolist() for row in cut] == [[3, 1, 2], [4, 5]]
    (one, field) = sequences_in([rows[0], {"input_ids": rows[1], "weight": np.ones(3, np.float32)}], ["weight"])
    assert isinstance(one, Tensor)
    assert torch.equal(one, torch.tensor([3, 1, 2], dtype=torch.int32))
    assert isinstance(field, dict)
    assert field["weight"].dtype is torch.float32


def test_labels_and_fields_are_cut_alike() -> None:
    labels, weight = IDS.masked_fill(MASK == 0, -100), torch.rand(3, 4, 2)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": labels, "weight": weight, "token_type_ids": IDS * 0}
    for i, found in enumerate(sequences_in(batch)):
        assert set(found) == {"input_ids", "labels", "weight"}
        assert found["labels"].tolist() == CUT[i]
        assert torch.equal(found["weight"], weight[i, : len(CUT[i])])


def test_one_number_per_sequence_stays() -> None:
    for found in sequences_in({"input_ids": IDS, "attention_mask": MASK, "advantages": torch.rand(3)}):
        assert isinstance(found, dict)
        assert found["advantages"].shape == ()


def test_what_is_ones_own_stays() -> None:
    batch = {"input_ids": IDS[0], "attention_mask": IDS[1], "token_type_ids": IDS[0] * 0}
    assert set(sequences_in([batch], own=batch)[0]) == set(batch)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([0, 1, 1, 1]),
        torch.tensor([1, 0, 1, 0]),
        torch.tensor([1, 1, 2, 2]),
        torch.tensor([0.0, 0.0, 0.0, -1e9]),
        torch.ones(4, 4),
        torch.ones(3),
        None,
    ],
)
def test_other_masks_are_refused(mask: Tensor | None) -> None:
    batch = {"input_ids": IDS[2], "attention_mask": mask}
    if mask is None:
        assert ids_of([batch]) == [CUT[2]]
        return
    with pytest.raises(Unsupported, match=r"sequence 1: an attention_mask .*; pad on the right only"):
        sequences_in([IDS[0], batch])


def test_labels_that_count_in_the_padding_are_refused() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    with pytest.raises(
        ValueError, match="sequence 0: labels is 0 at position 3, which attention_mask marks as padding"
    ):
        sequences_in(batch)


def test_a_field_without_a_row_for_each_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence 0: labels has 2 rows, but input_ids has 3; pass one row"):
        sequences_in({"input_ids": IDS, "labels": IDS[:2]})


def test_one_number_instead_of_a_sequence_is_refused() -> None:
    (row,) = sequences_in([{"input_ids": IDS[0], "attention_mask": MASK[0], "labels": torch.tensor(5)}])
    with pytest.raises(ValueError, match=r"sequence 0: labels is .*; pass"):
        sequence_of(row, 0, causal=True)
    with pytest.raises(Unsupported, match=r"sequence 0: an attention_mask of \[\]"):
        sequences_in([{"input_ids": torch.tensor(5), "attention_mask": torch.tensor(1)}])

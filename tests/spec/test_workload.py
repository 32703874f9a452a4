"""Values that a user may pass as one sequence, and how its labels are aligned."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.spec.workload import Field, sequence_of

IDS, LABELS = torch.tensor([3, 1, 4]), torch.tensor([-100, 1, 5])
FIELDS = {"weight": Field(torch.float32), "teacher": Field(torch.float64, (2,))}
WEIGHT, TEACHER = torch.rand(3), torch.rand(3, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("given", "causal", "labels"),
    [
        (IDS, True, [1, 4, -100]),
        ({"input_ids": IDS}, True, [1, 4, -100]),
        ({"input_ids": IDS, "labels": LABELS}, True, [1, 5, -100]),
        ({"input_ids": IDS, "labels": LABELS}, False, [-100, 1, 5]),
        ({"input_ids": IDS, "shift_labels": LABELS}, True, [-100, 1, 5]),
        ({"input_ids": IDS, "shift_labels": LABELS}, False, [-100, 1, 5]),
        (IDS[:0], True, []),
    ],
)
def test_labels_are_aligned(given: Tensor | dict[str, Tensor], causal: bool, labels: list[int]) -> None:
    found = sequence_of(given, 0, causal)
    assert found.labels.tolist() == labels
    assert found.targets == sum(n != -100 for n in labels)
    assert len(found) == len(labels)
    assert not found.extra


def test_fields_of_ones_own_are_kept() -> None:
    found = sequence_of({"input_ids": IDS, "weight": WEIGHT, "teacher": TEACHER}, 0, True, FIELDS)
    assert {n: t.shape for n, t in found.extra.items()} == {"weight": (3,), "teacher": (3, 2)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": IDS}, "sequence 2: no input_ids, teacher, weight; pass input_ids"),
        ({"input_ids": IDS, "weight": WEIGHT}, "sequence 2: no teacher; "),
        ({"input_ids": IDS, "attention_mask": IDS}, "sequence 2: unknown fields ['attention_mask']; "),
    ],
)
def test_other_fields_are_refused(given: dict[str, Tensor], message: str) -> None:
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}.*(a padding mask is not needed)$"):
        sequence_of(given, 2, True, FIELDS)


def test_plain_positions_change_nothing() -> None:
    positions = torch.arange(3, dtype=torch.int32)
    assert not sequence_of({"input_ids": IDS, "position_ids": positions}, 0, True).extra
    assert list(
        sequence_of({"input_ids": IDS, "position_ids": IDS}, 0, True, {"position_ids": Field(torch.int64)}).extra
    )


@pytest.mark.parametrize("given", [torch.tensor([0, 1, 0]), torch.arange(4), torch.arange(3)[None], [0, 1, 2]], ids=str)
def test_other_positions_are_refused(given: Any) -> None:
    with pytest.raises(
        Unsupported, match=r"^sequence 1: position_ids are .*at positions 0, 1, 2.*leave position_ids out"
    ):
        sequence_of({"input_ids": IDS, "position_ids": given}, 1, True)


def test_labels_are_given_once() -> None:
    with pytest.raises(Unsupported, match="both labels and shift_labels"):
        sequence_of({"input_ids": IDS, "labels": LABELS, "shift_labels": LABELS}, 0, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": IDS, "labels": LABELS[:2]}, "labels is torch.int64 [2]; pass 1-D int64 tensors of equal length"),
        ({"input_ids": IDS[None]}, "input_ids is torch.int64 [1, 3]; pass 1-D int64"),
        ({"input_ids": IDS, "weight": WEIGHT.double()}, "weight is torch.float64 [3]; pass torch.float32 [tokens]"),
        (
            {"input_ids": IDS, "teacher": TEACHER[:, :1]},
            "teacher is torch.float64 [3, 1]; pass torch.float64 [tokens, 2]",
        ),
        ({"input_ids": IDS, "weight": [1, 2, 3]}, "weight is list ([1, 2, 3]); pass"),
    ],
)
def test_tensors_of_other_forms_are_refused(given: dict[str, Tensor], message: str) -> None:
    own = {name: FIELDS[name] for name in given if name in FIELDS}
    with pytest.raises(ValueError, match=re.escape(f"sequence 0: {message}")):
        sequence_of(given, 0, True, own)


def test_masked_models_need_labels() -> None:
    with pytest.raises(ValueError, match="sequence 0 has no labels; masked models need them"):
        sequence_of(IDS, 0, False)


@pytest.mark.parametrize("number", [2, 2.0, torch.tensor(2.0)])
def test_a_number_is_every_tokens(number: float | Tensor) -> None:
    given = {"input_ids": IDS, "weight": number, "teacher": TEACHER}
    weight = sequence_of(given, 0, True, FIELDS).extra["weight"]  # pyrefly: ignore[bad-argument-type]
    assert weight.tolist() == [2, 2, 2]
    assert weight.dtype == torch.float32


@pytest.mark.parametrize(("name", "number"), [("teacher", 2.0), ("count", 0.5)])
def test_a_number_that_is_no_value_of_the_field_is_refused(name: str, number: float) -> None:
    fields = {"teacher": Field(torch.float64, (2,)), "count": Field(torch.int64)}
    given = {"input_ids": IDS, "teacher": TEACHER, "count": 1} | {name: number}
    with pytest.raises(ValueError, match=f"sequence 0: {name} is"):
        sequence_of(given, 0, True, fields)  # pyrefly: ignore[bad-argument-type]

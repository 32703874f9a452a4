"""Fields of a packed batch that users add: what they hold in padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hydragraph as hg
from hydragraph.frontend.packed_inputs import own_fields, token_cross_entropy
from hydragraph.spec.workload import Field
from tests.own_models import small
from tests.thorough import first

EXAMPLE = {"second": torch.zeros(1, 8, dtype=torch.int64), "weight": torch.ones(1, 8)}


@pytest.mark.parametrize("ignored", first([0], [-100, 0]))
def test_targets_in_a_field_are_ignored_in_padding(ignored: int) -> None:
    """Predict the token after the next as well, with targets that sequences bring."""

    def loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        costs = F.cross_entropy(logits[0], batch["second"][0], ignore_index=ignored, reduction="none")
        return token_cross_entropy(logits, batch) + (costs * batch["weight"][0]).sum()

    program = hg.capture(small(), loss=loss, example=EXAMPLE, check="auto")
    assert own_fields(program) == {
        "second": Field(torch.int64, padding=ignored),
        "weight": Field(torch.float32),
    }
    exe = hg.compile(small(), "<tp1,pp1>", program=program, loss=loss)
    ids = torch.arange(5)
    second = torch.tensor([2, 3, 4, ignored, ignored])
    one = {"input_ids": ids, "second": second, "weight": torch.ones(5)}
    assert exe.evaluate([one, one]).loss == pytest.approx(exe.evaluate([one]).loss)
    exe.close()


@pytest.mark.parametrize(("value", "form"), [(0.5, "a float"), ([1.0], "a list"), (np.ones((1, 8)), "a ndarray")])
def test_an_example_that_is_no_tensor_is_refused(value: Any, form: str) -> None:
    with pytest.raises(hg.Unsupported, match=rf"the example's field 'weight' \({form}\) does not fit"):
        hg.capture(small(), example={"second": EXAMPLE["second"], "weight": value})

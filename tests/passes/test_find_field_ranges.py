"""The values that a model's tables and its loss allow, found in its graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hydragraph.frontend.capture import capture
from hydragraph.frontend.mini_batch import MiniBatch
from hydragraph.frontend.packed_inputs import own_fields
from hydragraph.passes.find_field_ranges import field_ranges_of
from tests.models import captured
from tests.own_models import Own, small
from tests.thorough import thorough


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {("input_ids", 0, 101), ("position_ids", 0, 8192), ("labels", 0, 101)}),  # by its config
        ("gpt2", {("input_ids", 0, 101), ("position_ids", 0, 256), ("labels", 0, 101)}),
        pytest.param("opt", {("input_ids", 0, 101), ("position_ids", -2, 256), ("labels", 0, 101)}, marks=thorough),
    ],
)
def test_limits_of_families(name: str, expected: set[tuple[str, int, int]]) -> None:
    found = field_ranges_of(captured(name)[0])
    assert {(limit.field, limit.low, limit.high) for limit in found} == expected


def test_rotary_models_have_the_positions_that_their_config_says() -> None:
    (limit,) = (limit for limit in field_ranges_of(captured("llama")[0]) if limit.field == "position_ids")
    MiniBatch.of([torch.zeros(8192, dtype=torch.int64)], True, {}, [limit])
    message = (
        r"sequence 1 has 8193 tokens, but the model's config \(max_position_embeddings\) has 8192 positions; trunc"
    )
    with pytest.raises(ValueError, match=message):
        MiniBatch.of([torch.zeros(n, dtype=torch.int64) for n in (8192, 8193)], True, {}, [limit])


class Looking(Own):
    """Looks ids up in a smaller table too, two rows further on, and in a buffer by index."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.stack = small().stack
        self.more = nn.Embedding(64, 32)
        self.register_buffer("table", torch.rand(50, 32))

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, kind: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        x = self.tokens(input_ids) + self.more(input_ids + 2) + self.table[position_ids] + self.more(kind)
        x = x[0]
        for block in self.stack:
            x = block(x, cu_seqlens)
        return self.out(self.norm(x))[None]


def other_class(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[0], batch["labels"][0], ignore_index=-1, reduction="sum")


def test_limits_of_tables_of_other_sizes_and_of_ones_own_fields() -> None:
    program = capture(Looking(), loss=other_class, example={"kind": torch.zeros(1, 8, dtype=torch.int64)})
    found = {(limit.field, limit.low, limit.high, limit.where) for limit in field_ranges_of(program)}
    assert found == {
        ("input_ids", 0, 101, "tokens.weight"),
        ("input_ids", -2, 62, "more.weight"),
        ("kind", 0, 64, "more.weight"),
        ("position_ids", -50, 50, "table"),
        ("labels", 0, 101, "the loss over 101 classes"),
    }
    assert next(limit for limit in field_ranges_of(program) if limit.field == "labels").ignored == -1


def of_a_teacher(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[0], batch["teacher"][0], reduction="sum")


def test_probabilities_of_a_teacher_are_no_classes() -> None:
    program = capture(small(), loss=of_a_teacher, example={"teacher": torch.rand(1, 8, 101)})
    assert "teacher" not in {limit.field for limit in field_ranges_of(program)}
    assert own_fields(program)["teacher"].padding == 0, "adds nothing to the loss"

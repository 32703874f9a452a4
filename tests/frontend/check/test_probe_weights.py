"""Weights to compare with: never zero, never alike, the same for the same name, near the model's own where copied."""

from __future__ import annotations

import pytest
import torch

from hydragraph.frontend.check.probe_weights import DrawnWeights


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("shape", [(8,), (8, 4), (3, 8, 4)])
def test_a_parameter_that_starts_at_zero_becomes_something(shape: tuple[int, ...], copied: bool) -> None:
    value = torch.zeros(shape)
    drawn = DrawnWeights(0, torch.float32, copied).drawn(value, "lora_B")
    assert drawn.shape == value.shape
    assert (drawn != 0).all()
    assert drawn.unique().numel() == drawn.numel()
    assert (value == 0).all(), "the model's own is as it was"


def test_names_and_seeds_choose_the_numbers() -> None:
    value = torch.empty(8, 4, device="meta")
    one = DrawnWeights(0, torch.float64, copied=False)
    assert one.drawn(value, "a").dtype is torch.float64
    assert torch.equal(one.drawn(value, "a"), DrawnWeights(0, torch.float64, copied=False).drawn(value, "a"))
    assert not torch.equal(one.drawn(value, "a"), one.drawn(value, "b"))
    assert not torch.equal(one.drawn(value, "a"), DrawnWeights(1, torch.float64, copied=False).drawn(value, "a"))


def test_copies_stay_near_and_new_ones_have_a_models_size() -> None:
    value = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 5
    copied = DrawnWeights(0, torch.float32, copied=True).drawn(value, "w")
    assert float((copied - value).std() / value.std()) == pytest.approx(0.3, rel=0.05)
    assert float(DrawnWeights(0, torch.float32, copied=False).drawn(value, "w").std()) == pytest.approx(
        1 / 16, rel=0.05
    )
    vector = DrawnWeights(0, torch.float32, copied=False).drawn(torch.empty(10_000, device="meta"), "norm")
    assert float(vector.mean()) == pytest.approx(1, abs=0.01)


def test_large_new_matrices_share_memory_and_are_not_alike() -> None:
    weights = DrawnWeights(0, torch.float32, copied=False)
    one, two = (weights.drawn(torch.empty(2048, 2048, device="meta"), name) for name in ("a", "b"))
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    assert not torch.equal(one[0], two[0])
    assert not torch.equal(one[0], one[1])
    assert 0.5 <= float(one.std()) * 2048**0.5 <= 2


def test_what_is_no_floating_point_number_is_copied_exactly() -> None:
    value = torch.arange(6)
    assert torch.equal(DrawnWeights(0, torch.float64, copied=True).drawn(value, "table"), value)

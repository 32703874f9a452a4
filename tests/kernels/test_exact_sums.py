"""Exact sums: what any order and grouping of float32 gives, and how far that is from the true sum."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hydragraph.kernels import exact_sums

numbers = st.floats(-exact_sums.LARGEST, exact_sums.LARGEST, width=32)
CPU = torch.device("cpu")


def parts_of(rows: list[list[float]]) -> list[Tensor]:
    parts = [torch.zeros(len(rows[0]), dtype=torch.float64) for _ in exact_sums.GRIDS]
    for row in rows:
        exact_sums.add(parts, torch.tensor(row))
    return parts


@settings(max_examples=40, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_order_and_grouping_gives_the_same_bits_near_the_true_sum(
    values: list[float], groups: int, draw: random.Random
) -> None:
    want = exact_sums.joined(parts_of([[v] for v in values]), torch.empty(1))
    shuffled = draw.sample(values, len(values))
    grouped = [parts_of([[v] for v in shuffled[i::groups]]) for i in range(groups) if shuffled[i::groups]]
    totals = [torch.stack(each).sum(0) for each in zip(*grouped, strict=True)]
    assert torch.equal(exact_sums.joined(totals, torch.empty(1)), want)
    true = float(sum(map(Fraction, values)))
    assert abs(want.item() - true) <= 2.0**-23 * abs(true) + len(values) * 2.0**-62


def test_as_many_as_there_may_be_of_the_largest_leave_the_smallest_whole() -> None:
    most = exact_sums.LARGEST * exact_sums.MOST
    parts = [torch.tensor([most - 1], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    assert exact_sums.add(parts, torch.tensor([2.0**-24])).item() == 2.0**-24
    assert parts[0].item() - (most - 1) == 2.0**-24
    parts = [
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([2.0**-25 * exact_sums.MOST - 2.0**-40], dtype=torch.float64),
    ]
    before = parts[1].item()
    exact_sums.add(parts, torch.tensor([2.0**-62]))
    assert parts[1].item() - before == 2.0**-62


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.integers(0, 20))
def test_squares_of_any_parts_add_up_to_those_of_the_whole(values: list[float], cut: int) -> None:
    vector = torch.tensor(values)
    scale = exact_sums.scale_of(exact_sums.largest([vector], CPU).item())
    whole = exact_sums.squares([vector], scale, CPU)
    assert torch.equal(
        exact_sums.squares([vector[cut:]], scale, CPU) + exact_sums.squares([vector[:cut]], scale, CPU), whole
    )
    true = float(sum(Fraction(v) ** 2 for v in vector.tolist()))
    assert math.isclose(whole.sum().item() / scale**2, true, rel_tol=1e-12)


def test_losses_on_their_grids_and_what_is_not_finite() -> None:
    loss = torch.tensor(1234567.875)
    assert exact_sums.split(loss, exact_sums.LOSS_GRIDS).sum().item() == loss.item()
    parts = parts_of([[math.inf, math.nan, 1.0]])
    assert not torch.isfinite(exact_sums.joined(parts, torch.empty(3)))[:2].any()
    assert exact_sums.scale_of(math.nan) == 1.0
    assert not torch.isfinite(exact_sums.squares([torch.tensor([math.inf])], 1.0, CPU)).all()
    assert exact_sums.largest([torch.empty(0)], CPU).item() == 0

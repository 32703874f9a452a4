"""The worst difference is found for values in pieces, of other dtypes, missing, or not finite."""

from __future__ import annotations

import math

import pytest
import torch

from hydragraph.frontend.check.loss_comparison import DOUBLE, SINGLE, ErrorBound, GradientComparison, compare

WIDE = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}


def test_equal_tensors_differ_by_nothing() -> None:
    found = compare(WIDE, WIDE, SINGLE, (16,))
    assert found is not None
    assert (found.ratio, found.relative) == (0.0, 0.0)


@pytest.mark.parametrize("bound", [SINGLE, DOUBLE])
def test_the_ratio_is_the_error_over_the_bound_of_its_own_norm_and_of_all(bound: ErrorBound) -> None:
    error = 1e-3
    found = compare({**WIDE, "a": WIDE["a"] + torch.tensor([error, 0.0])}, WIDE, bound, (16,))
    assert found is not None
    assert found.parameter == "a"
    assert found.relative == pytest.approx(error / 5, rel=1e-3)
    assert found.ratio == pytest.approx(error / (5 * bound.own + 5 * bound.all), rel=1e-3)


def test_a_true_gradient_of_zero_is_bound_by_the_norm_of_all() -> None:
    """As of a key's bias: no error is small beside its own norm."""
    inside = compare({**WIDE, "b": torch.tensor([4e-6])}, WIDE, SINGLE, ())
    outside = compare({**WIDE, "b": torch.tensor([6e-6])}, WIDE, SINGLE, ())
    assert inside is not None
    assert outside is not None
    assert inside.ratio < 1 < outside.ratio
    assert outside.parameter == "b"
    assert outside.relative == 1.0


def test_a_gradient_that_was_not_found_counts_as_zero() -> None:
    found = compare({"a": WIDE["a"]}, {**WIDE, "c": torch.tensor([1.0])}, SINGLE, ())
    assert found is not None
    assert (found.parameter, found.relative) == ("c", 1.0)


def test_summands_and_dtypes_may_differ() -> None:
    comparison = GradientComparison({"a": torch.tensor([3.0, 4.0], dtype=torch.float32)})
    comparison.subtract("a", torch.tensor([1.0, 4.0], dtype=torch.float64))
    comparison.subtract("a", torch.tensor([2.0, 0.0], dtype=torch.float64))
    found = comparison.worst(2.0, 2.0, DOUBLE, (3, 4))
    assert found is not None
    assert (found.ratio, found.tokens) == (0.0, (3, 4))


def test_the_loss_is_compared_too() -> None:
    found = GradientComparison({}).worst(2.0, 2.1, SINGLE, ())
    assert found is not None
    assert (found.parameter, found.ratio > 1) == ("", True)
    assert found.relative == pytest.approx(0.1 / 2.1)


def test_nothing_is_said_where_what_is_expected_is_not_finite_and_all_where_what_was_found_is_not() -> None:
    wrong = {"a": torch.tensor([math.nan, 1.0])}
    assert compare(WIDE, {**WIDE, **wrong}, SINGLE, ()) is None
    found = compare({**WIDE, **wrong}, WIDE, SINGLE, ())
    assert found is not None
    assert (found.parameter, found.ratio) == ("a", math.inf)

"""Comparison of losses and gradients within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ErrorBound:
    """Maximum difference between two correct computations.

    Attributes:
        own: tolerance relative to a gradient's norm, or to the loss.
        all: additional tolerance relative to the norm of all gradients, for gradients near 0.
    """

    own: float
    all: float


# Correct results differ by 1e-7 to 1e-5 in fp32 and 1e-15 to 1e-12 in fp64; wrong ones by 1e-3 or more.
SINGLE = ErrorBound(1e-4, 1e-6)
DOUBLE = ErrorBound(1e-7, 1e-9)


@dataclass(frozen=True)
class Difference:
    """Difference with the largest `ratio`.

    Attributes:
        parameter: parameter whose gradient differs; "" for the loss.
        ratio: error divided by the allowed error.
    """

    parameter: str
    error: float
    norm: float
    ratio: float
    loss: float
    expected: float
    tokens: tuple[int, ...]

    @property
    def relative(self) -> float:
        return self.error / self.norm if self.norm else math.inf if self.error else 0.0


class GradientComparison:
    """Running difference between computed and expected gradients.

    Args:
        computed: gradients by name; modified in place.
        norms: norms of expected gradients; None: of computed gradients.
    """

    def __init__(self, computed: dict[str, Tensor], norms: Mapping[str, float] | None = None) -> None:
        self._left = computed
        self._norms = norms if norms is not None else {name: _norm(gradient) for name, gradient in computed.items()}
        # For these gradients, expected values must be finite; for others, differences must be.
        self._told_apart = {name for name, norm in self._norms.items() if norms is not None or not math.isfinite(norm)}
        self._finite = norms is None or all(map(math.isfinite, norms.values()))

    def subtract(self, name: str, expected: Tensor) -> None:
        if name in self._told_apart:
            self._finite = self._finite and math.isfinite(_norm(expected))
        left = self._left.get(name)
        if left is None:
            self._left[name] = -expected
        elif left.dtype is expected.dtype:
            left.sub_(expected)
        else:
            self._left[name] = left - expected

    def worst(self, loss: float, expected: float, bound: ErrorBound, tokens: tuple[int, ...]) -> Difference | None:
        """Return the difference with the largest ratio; None if an expected value is not finite."""
        errors = {name: _norm(left) for name, left in sorted(self._left.items())}
        infinite = any(not math.isfinite(error) and name not in self._told_apart for name, error in errors.items())
        if not self._finite or infinite or not math.isfinite(expected):
            return None
        # everything: norm of all gradients; rounding in large ones reaches small ones.
        everything = math.sqrt(sum(norm**2 for norm in self._norms.values()))

        def difference(name: str, error: float, norm: float, limit: float) -> Difference:
            ratio = error / limit if limit else math.inf if error else 0.0
            ratio = math.inf if math.isnan(ratio) else ratio
            return Difference(name, error, norm or error, ratio, loss, expected, tokens)

        rows = [difference("", abs(loss - expected), abs(expected), bound.own * abs(expected))]
        for name, error in errors.items():
            norm = self._norms.get(name, 0.0)
            rows.append(difference(name, error, norm, bound.own * norm + bound.all * everything))
        # Among equal ratios, such as infinite, a gradient's name helps more than the loss.
        return max(rows, key=lambda row: (row.ratio, row.parameter != ""))


def compare(
    computed: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: ErrorBound, tokens: tuple[int, ...]
) -> Difference | None:
    norms = {name: _norm(value) for name, value in expected.items()}
    comparison = GradientComparison({name: value.clone() for name, value in computed.items()}, norms)
    for name, value in expected.items():
        comparison.subtract(name, value)
    return comparison.worst(0.0, 0.0, bound, tokens)


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32)))

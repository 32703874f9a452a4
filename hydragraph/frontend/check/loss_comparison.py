"""Losses and gradients beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bound:
    """How far two right computations may be apart.

    Attributes:
        own: of a gradient, as a part of its norm; and of the loss.
        all: besides, as a part of the norm of all gradients: some true gradients are 0 (key biases).
    """

    own: float
    all: float


# Two fp32 computations of a few dozen tokens differ by 1e-7 to 1e-5, two in fp64 by 1e-15 to 1e-12; what is computed
# wrongly differs by 1e-3 and more. What fails the first bound is computed again in fp64, so the first need not be wide.
SINGLE = Bound(1e-4, 1e-6)
DOUBLE = Bound(1e-7, 1e-9)


@dataclass(frozen=True)
class Difference:
    """The worst of a comparison.

    Attributes:
        parameter: whose gradient it is; "" for the loss.
        error, norm: of that gradient, or of the loss.
        ratio: the error over its bound; 1 is the limit.
        loss, expected: the losses.
        tokens: of the packed batches.
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
        """The error as a part of the norm."""
        return self.error / self.norm if self.norm else math.inf if self.error else 0.0


class Comparison:
    """Gradients beside each other: what was found, less what is expected, as that comes.

    So no more than one of both is kept.

    Args:
        computed: by name; written to.
        norms: of what is expected. None: those of what was found; where the two are far apart, the error is no smaller.
    """

    def __init__(self, computed: dict[str, Tensor], norms: Mapping[str, float] | None = None) -> None:
        self._left = computed
        self._norms = norms if norms is not None else {name: _norm(gradient) for name, gradient in computed.items()}
        # Of what is finite on both sides the difference is, so that what is expected need not be read for it alone.
        self._told_apart = {name for name, norm in self._norms.items() if norms is not None or not math.isfinite(norm)}
        self._finite = norms is None or all(map(math.isfinite, norms.values()))

    def subtract(self, name: str, expected: Tensor) -> None:
        """Compare with a gradient, or with a summand of it; one that was not found counts as 0."""
        # In place where dtypes allow, so that of a large model no third copy of a gradient exists.
        if name in self._told_apart:
            self._finite = self._finite and math.isfinite(_norm(expected))
        left = self._left.get(name)
        if left is None:
            self._left[name] = -expected
        elif left.dtype is expected.dtype:
            left.sub_(expected)
        else:
            self._left[name] = left - expected

    def worst(self, loss: float, expected: float, bound: Bound, tokens: tuple[int, ...]) -> Difference | None:
        """Return the worst difference; None where the expected values are not finite, so that nothing can be said.

        Args:
            loss, expected: the losses.
            tokens: of the packed batches.
        """
        errors = {name: _norm(left) for name, left in sorted(self._left.items())}
        infinite = any(not math.isfinite(error) and name not in self._told_apart for name, error in errors.items())
        if not self._finite or infinite or not math.isfinite(expected):
            return None
        # A key's bias cancels in softmax: its true gradient is 0, and what is computed is rounding. Against the norm of
        # all gradients it is small; against its own norm it would be all wrong.
        everything = math.sqrt(sum(norm**2 for norm in self._norms.values()))

        def difference(name: str, error: float, norm: float, limit: float) -> Difference:
            ratio = error / limit if limit else math.inf if error else 0.0
            ratio = math.inf if math.isnan(ratio) else ratio
            return Difference(name, error, norm or error, ratio, loss, expected, tokens)

        rows = [difference("", abs(loss - expected), abs(expected), bound.own * abs(expected))]
        for name, error in errors.items():
            norm = self._norms.get(name, 0.0)
            rows.append(difference(name, error, norm, bound.own * norm + bound.all * everything))
        return max(rows, key=lambda row: (row.ratio, row.parameter != ""))


def compare(
    computed: Mapping[str, Tensor], expected: Mapping[str, Tensor], bound: Bound, tokens: tuple[int, ...]
) -> Difference | None:
    """Return the worst difference of tensors by name; see `Comparison`."""
    norms = {name: _norm(value) for name, value in expected.items()}
    comparison = Comparison({name: value.clone() for name, value in computed.items()}, norms)
    for name, value in expected.items():
        comparison.subtract(name, value)
    return comparison.worst(0.0, 0.0, bound, tokens)


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32)))

"""Losses and gradients beside each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hydragraph.check.sides import Computed


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

_PIECE = 1 << 20  # elements whose difference stays in a processor's cache


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


def compare(found: Computed, expected: Computed, bound: Bound, tokens: tuple[int, ...]) -> Difference | None:
    """Return the worst difference; None where the expected values are not finite, so that nothing can be said.

    Args:
        found, expected: a gradient that only one of them has is compared with 0.
        tokens: of the packed batches.
    """
    norms = {name: _norm(g) for name, g in expected.gradients.items()}
    everything = math.sqrt(sum(norm**2 for norm in norms.values()))
    loss, wanted = float(found.loss), float(expected.loss)
    if not math.isfinite(everything) or not math.isfinite(wanted):
        return None

    def difference(name: str, error: float, norm: float, limit: float) -> Difference:
        ratio = error / limit if limit else math.inf if error else 0.0
        ratio = math.inf if math.isnan(ratio) else ratio
        return Difference(name, error, norm, ratio, loss, wanted, tokens)

    rows = [difference("", abs(loss - wanted), abs(wanted), bound.own * abs(wanted))]
    for name in sorted(expected.gradients.keys() | found.gradients.keys()):
        norm = norms.get(name, 0.0)
        error = _error(found.gradients.get(name), expected.gradients.get(name))
        rows.append(difference(name, error, norm, bound.own * norm + bound.all * everything))
    return max(rows, key=lambda row: (row.ratio, row.parameter != ""))


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        only = expected if found is None else found
        return 0.0 if only is None else _norm(only)
    if not (found.is_contiguous() and expected.is_contiguous()):
        return _norm(found - expected)
    pairs = zip(found.view(-1).split(_PIECE), expected.view(-1).split(_PIECE), strict=True)
    return math.sqrt(sum(_norm(one - other) ** 2 for one, other in pairs))


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, torch.float32)))

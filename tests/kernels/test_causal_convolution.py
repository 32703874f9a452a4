"""A short convolution of packed sequences equals PyTorch's of each sequence alone, and so do gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hydragraph.kernels import causal_convolution  # noqa: F401  registers the operator
from tests.kernels.test_gated_delta_rule import bounds

CHANNELS, TAPS = 3, 4


@pytest.mark.parametrize("lengths", [[1], [2, 1], [5, 1, 9, 3]], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_each_sequence_is_convolved_alone(lengths: list[int], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(sum(lengths), CHANNELS), (CHANNELS, TAPS), *([(CHANNELS,)] if biased else [])]
    given = [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]
    x, weight, bias = (*given, None)[:3]
    assert x is not None
    assert weight is not None
    parts = [
        F.conv1d(F.pad(part.T[None], (TAPS - 1, 0)), weight[:, None], bias, groups=CHANNELS)[0].T
        for part in x.split(lengths)
    ]
    expected, found = torch.cat(parts), torch.ops.hydragraph.causal_convolution(x, weight, bias, bounds(lengths))
    torch.testing.assert_close(found, expected)
    factor = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * factor).sum(), given)
    for one, other in zip(torch.autograd.grad((found * factor).sum(), given), wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_the_operator_obeys_pytorchs_rules() -> None:
    x, weight, bias = torch.randn(6, CHANNELS), torch.randn(CHANNELS, TAPS), torch.randn(CHANNELS)
    given = (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), bounds([2, 4]))
    torch.library.opcheck(torch.ops.hydragraph.causal_convolution.default, given)

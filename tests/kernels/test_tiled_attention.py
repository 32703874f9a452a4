"""Tiles of queries against one softmax per sequence, and their cost."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hydragraph.kernels import tiled_attention
from hydragraph.kernels.attention_settings import AttentionSettings, visible


@pytest.mark.parametrize("cap", [None, 0.9])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "window"), [(150, 20), (300, 140), (9, 30)])
def test_tiles_equal_the_whole(length: int, window: int, causal: bool, cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, weights = torch.randn(4, 2, 2, length, 8, generator=generator, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    settings, places = AttentionSettings(causal, 0.5, window, cap), torch.arange(length)
    scores = q @ k.mT * 0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible(places, places, settings), float("-inf"))
    expected = scores.softmax(-1) @ v
    gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    with torch.no_grad():
        out, lse = tiled_attention.forward(q, k, v, settings)
        found = tiled_attention.backward(weights, q, k, v, out, lse, settings)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    for a, b in zip((out, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_cost_falls_with_the_window() -> None:
    q, k, v = torch.randn(3, 1, 1, 4096, 8)
    flops = {}
    for window in (128, 512, 4096):
        with FlopCounterMode(display=False) as counter:
            tiled_attention.forward(q, k, v, AttentionSettings(True, 1.0, window, cap=1.0))
        flops[window] = counter.get_total_flops()
    # Half of the 4096^2 pairs without a window; a tile of 128 queries meets 127 keys more than the window.
    assert flops[4096] == pytest.approx(4096**2 / 2 * 4 * 8, rel=0.05)
    assert flops[512] < flops[4096] / 3
    assert flops[128] < flops[4096] / 7

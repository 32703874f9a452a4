"""PyTorch's varlen_attn under the arguments that its versions take."""

from __future__ import annotations

import pytest
import torch

from hydragraph.commands.bench.torch_attention import arguments, torch_varlen
from hydragraph.errors import Unsupported


def test_a_function_that_takes_everything_gets_it() -> None:
    q, k = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    *found, options = arguments(q, k, k, 0.5, {"window_size", "enable_gqa", "scale"})
    assert options == {"window_size": (-1, 0), "enable_gqa": True, "scale": 0.5}
    assert all(a is b for a, b in zip(found, (q, k, k), strict=True))


def test_one_that_takes_less_gets_tensors_that_mean_the_same() -> None:
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    query, key, value, options = arguments(q, k, v, 0.5, {"is_causal"})
    assert options == {"is_causal": True}
    assert torch.equal(key, k.repeat_interleave(2, 1))
    assert torch.equal(value, v.repeat_interleave(2, 1))
    torch.testing.assert_close(query * 8**-0.5, q * 0.5)


def test_the_cpu_is_refused() -> None:
    q = torch.randn(5, 4, 8)
    with pytest.raises(Unsupported, match="varlen_attn: tensors on the CPU"):
        torch_varlen(q, q, q, torch.tensor([0, 5], dtype=torch.int32), 5, 1.0)

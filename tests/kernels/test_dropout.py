"""Dropout by place: its statistics, and equal masks for every cut of tokens and features."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydragraph.kernels import dropout as _  # noqa: F401  registers the operator
from hydragraph.kernels.philox import key_of, keys_of
from tests.kernels.interpreter import interpreted

drop = torch.ops.hydragraph.dropout
BLOCK = torch.tensor(1)
KEYS = keys_of(key_of(1, 2), [5, 7, 3], [2, 0, 1])


def dropped(x: Tensor, p: float, keys: Tensor = KEYS, call: int = 0, token_dim: int = 1) -> Tensor:
    result: Tensor = drop(x, keys, BLOCK, None, p, call, token_dim, 0, 0, 1)
    return result


def test_mean_and_variance_are_those_of_independent_draws() -> None:
    # 300,000 draws: the share of dropped elements has a standard deviation of 0.0007, and neighbours no correlation.
    keys = keys_of(key_of(0, 1), [300], [0])
    kept = dropped(torch.ones(1, 300, 1000), 0.2, keys) > 0
    assert abs(kept.float().mean() - 0.8) < 0.004
    centred = kept[0].float() - 0.8
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < 0.004
    assert abs((centred[1:] * centred[:-1]).mean()) < 0.004


def test_other_seeds_steps_blocks_calls_and_sequences_have_other_masks() -> None:
    x = torch.ones(1, 15, 64)
    masks = [
        dropped(x, 0.5),
        dropped(x, 0.5, token_dim=1, call=1),
        drop(x, KEYS, torch.tensor(2), None, 0.5, 0, 1, 0, 0, 1),
        dropped(x, 0.5, keys_of(key_of(1, 3), [5, 7, 3], [2, 0, 1])),
        dropped(x, 0.5, keys_of(key_of(2, 2), [5, 7, 3], [2, 0, 1])),
        dropped(x, 0.5, keys_of(key_of(1, 2), [5, 7, 3], [3, 4, 5])),
    ]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 0.3 < (one != other).float().mean() < 0.7


def test_packing_does_not_change_a_sequence() -> None:
    x = torch.randn(1, 15, 12)
    together = dropped(x, 0.3)
    for number, (first, last) in {2: (0, 5), 0: (5, 12), 1: (12, 15)}.items():
        own = keys_of(key_of(1, 2), [last - first], [number])
        assert torch.equal(dropped(x[:, first:last], 0.3, own), together[:, first:last])


@pytest.mark.parametrize(
    ("shape", "token_dim", "dim"),
    [((1, 15, 12), 1, 2), ((15, 6, 4), 0, 1), ((1, 6, 15, 5), 2, 1), ((1, 15, 3, 6), 1, 3)],
)
def test_a_part_of_a_dimension_has_its_slice_of_the_mask(shape: tuple[int, ...], token_dim: int, dim: int) -> None:
    x = torch.randn(shape)
    whole = dropped(x, 0.4, token_dim=token_dim)
    size = shape[dim]
    for first, length in ((0, size // 3), (size // 3, size - size // 3)):
        part = x.narrow(dim, first, length)
        mine = drop(part, KEYS, BLOCK, torch.tensor(first * 2), 0.4, 0, token_dim, dim, size, 2)
        assert torch.equal(mine, whole.narrow(dim, first, length))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nothing_is_dropped_with_p_0_or_in_an_evaluation(dtype: torch.dtype) -> None:
    x = torch.randn(1, 15, 12, dtype=dtype)
    assert torch.equal(dropped(x, 0.0), x)
    assert torch.equal(dropped(x, 0.5, keys_of(3, [5, 10], [-1, -1])), x)
    assert not dropped(x, 1.0).any()


def test_the_gradient_has_the_mask_of_the_forward() -> None:
    x = torch.randn(1, 15, 12, dtype=torch.float64, requires_grad=True)
    out = dropped(x, 0.3)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, out != 0)
    assert torch.allclose(out, x * x.grad)
    torch.library.opcheck(
        drop.default, (x, KEYS, BLOCK, None, 0.3, 0, 1, 0, 0, 1), test_utils=("test_schema", "test_faketensor")
    )


def test_a_model_that_is_traced_alone_may_lack_keys() -> None:
    with pytest.raises(AssertionError, match="needs dropout keys, except while tracing"):
        drop(torch.ones(1, 2, 2), None, None, None, 0.5, 0, 1, 0, 0, 1)


@interpreted
def test_the_kernel_gives_the_bits_of_plain_pytorch() -> None:
    from hydragraph.kernels import dropout

    shapes = (((1, 15, 300), 1, 2), ((1, 6, 15, 5), 2, 1), ((15, 3, 6), 0, 2))
    for dtype, (shape, token_dim, dim) in zip((torch.float32, torch.bfloat16, torch.float16), shapes, strict=True):
        for p, keys in ((0.3, KEYS), (0.9, keys_of(-5, [9, 6], [-1, 2**20])), (1.0, KEYS))[: 3 if dim == 1 else 1]:
            x = torch.randn(shape).to(dtype)
            whole = dropout._form(x, token_dim, None, 0, 0, 1)
            part = dropout._form(x, token_dim, torch.tensor(14), dim, shape[dim] + 11, 2)
            for form in (whole, part):
                want = dropout.reference(x, keys, form, 65539, p, token_dim)
                assert torch.equal(dropout._launch(x, keys, form, 65539, p), want)

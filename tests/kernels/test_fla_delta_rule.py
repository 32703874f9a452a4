"""The gated delta rule through flash-linear-attention's interface, which a stand-in has here: its kernels need a GPU.

By hand, its kernels (0.6.0) were run in Triton's interpreter, with one configuration each: 40 tokens in two sequences
give the values and gradients of plain PyTorch, within 6e-7 of the largest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hydragraph.kernels import fla_delta_rule, gated_delta_rule
from tests.kernels.test_gated_delta_rule import bounds, inputs


class _Kernels(torch.autograd.Function):
    """As in the package: the forward and the backward are kernels, so PyTorch records nothing inside."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, cu_seqlens, g, beta)
        out: Tensor = gated_delta_rule.forward(q[0], k[0], v[0], cu_seqlens, g[0], beta[0])
        return out[None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cu_seqlens, g, beta = ctx.saved_tensors
        given = (grads[0][0], q[0], k[0], v[0], cu_seqlens, g[0], beta[0])
        return (*(x[None] for x in gated_delta_rule.backward(*given)), None)


def _version(version: str) -> ModuleType:
    module = ModuleType("fla")
    vars(module)["__version__"] = version
    return module


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Install the stand-in; yield the options of its calls."""
    calls: list[dict[str, Any]] = []

    def chunk_gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        calls.append(options)
        return _Kernels.apply(q, k, v, g, beta, options["cu_seqlens"]), None

    module = ModuleType("fla.ops.gated_delta_rule")
    vars(module)["chunk_gated_delta_rule"] = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setitem(sys.modules, "fla", _version("0.6.0"))
    fla_delta_rule._function.cache_clear()
    yield calls
    fla_delta_rule._function.cache_clear()


def test_values_and_gradients_are_those_of_plain_pytorch(package: list[dict[str, Any]]) -> None:
    q, k, v, g, beta = inputs(75)
    weight = torch.randn(75, v.shape[1], v.shape[2], dtype=torch.float64)
    given = (q, k, v, bounds([70, 5]), g, beta)
    torch.testing.assert_close(
        fla_delta_rule.forward(*given), torch.ops.hydragraph.gated_delta_rule(*given), rtol=0, atol=0
    )
    wanted = torch.ops.hydragraph.gated_delta_rule_backward(weight, *given)
    for one, other in zip(fla_delta_rule.backward(weight, *given), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert [call["cu_seqlens"].dtype for call in package] == [torch.int64] * 2
    assert all(call["use_qk_l2norm_in_kernel"] for call in package)


def test_the_operator_differentiates_through_the_package(
    package: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [x.requires_grad_() for x in inputs(9)]
    q, k, v, g, beta = given
    wanted = torch.autograd.grad(torch.ops.hydragraph.gated_delta_rule(q, k, v, bounds([9]), g, beta).sum(), given)
    monkeypatch.setattr(fla_delta_rule, "usable", lambda k: True)
    found = torch.autograd.grad(torch.ops.hydragraph.gated_delta_rule(q, k, v, bounds([9]), g, beta).sum(), given)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(package) == 2


def test_only_sixteen_bits_on_a_gpu_use_the_package(package: list[dict[str, Any]]) -> None:
    _, k, *_ = inputs(4)
    assert fla_delta_rule._function() is not None
    assert not fla_delta_rule.usable(k.bfloat16())


@pytest.mark.parametrize(
    ("version", "used"), [("0.5.1", False), ("0.6rc1", False), ("0.10.0.dev3", True), ("1.0", True)]
)
def test_versions_that_need_as_many_heads_of_keys_are_not_used(
    version: str, used: bool, package: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla", _version(version))
    assert (fla_delta_rule._function() is not None) == used


def test_without_the_package_plain_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    fla_delta_rule._function.cache_clear()
    assert fla_delta_rule._function() is None
    fla_delta_rule._function.cache_clear()

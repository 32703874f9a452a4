"""Kernels where Triton is missing, and where it cannot run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hydragraph.errors import Unsupported
from hydragraph.kernels import triton_jit
from tests.thorough import thorough

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import hydragraph
from hydragraph.kernels import adamw, linear_cross_entropy, slice_copy, triton_attention
q = torch.ones(3, 1, 16)
assert torch.equal(hydragraph.varlen_attention(q, q, q, torch.tensor([0, 3])), q)
one = torch.ones(1, dtype=torch.int64)
target = torch.zeros(3)
slice_copy.slice_copy(torch.arange(3.0), target, slice_copy.SliceTable.make(one, one, one))
assert target.tolist() == [0, 1, 0]
hidden = torch.ones(2, 4, requires_grad=True)
linear_cross_entropy.head_loss(hidden, torch.ones(3, 4), one.repeat(2), -100)[0].backward()
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
adamw.AdamW([weight]).step()
try:
    hydragraph.varlen_attention(q, q, q, torch.tensor([0, 3]), backend="triton")
except hydragraph.Unsupported as error:
    print(error)
"""


@thorough
def test_all_works_on_the_cpu_without_triton() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "triton: triton is not installed" in ran.stdout


def test_a_gpu_without_triton_is_no_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_jit, "find_spec", lambda name: None)
    assert triton_jit.why_not(torch.device("cuda")) == "triton is not installed"
    assert not triton_jit.use_kernel(torch.device("cpu"), "slice_copy")
    with pytest.raises(Unsupported, match="slice_copy: triton is not installed; pip install triton"):
        triton_jit.use_kernel(torch.device("cuda"), "slice_copy")


def test_where_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_jit, "find_spec", lambda name: object())
    monkeypatch.setattr(triton_jit, "_interpreted", lambda: False)
    assert triton_jit.why_not(torch.device("cuda")) is None
    assert triton_jit.why_not(torch.device("cpu")) == "Triton kernels do not run on cpu tensors"
    monkeypatch.setattr(triton_jit, "_interpreted", lambda: True)
    assert triton_jit.why_not(torch.device("cpu")) is None
    assert triton_jit.use_kernel(torch.device("cpu"), "slice_copy")
    assert not triton_jit.use_kernel(torch.device("mps"), "slice_copy")


def test_two_devices_are_refused() -> None:
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1, device="meta")}
    with pytest.raises(Unsupported, match="op: a on cpu, b on meta; move all to one device"):
        triton_jit.require_one_device("op", tensors)

"""Kernels and a whole step on the GPU, where there is one, against double precision on the CPU; else on the CPU.

`benchmarks/gpu.sh` runs this before it measures anything.
"""

from __future__ import annotations

import logging
import os
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from hydragraph.kernels import adamw, linear_cross_entropy, slice_copy
from hydragraph.kernels.attention_backends import choose
from hydragraph.kernels.varlen_attention import reference, varlen_attention
from tests.models import llama, sequences

# On a CPU other tests cover all of it, so that only the script itself is to be proven there.
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and "HYDRAGRAPH_ON_DEVICE" not in os.environ,
    reason="no GPU here; benchmarks/gpu.sh --cpu runs this on the CPU",
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["torch", "triton", "flash_attn", None] if DEVICE.type == "cuda" else ["loop", None]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}  # relative, in the 2-norm


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    wide = expected.detach().double()
    return float((found.detach().cpu().double() - wide).norm() / wide.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 64), ((2, 2), 128), ((3, 1), 80)])
def test_attention(backend: str | None, dtype: torch.dtype, heads: tuple[int, int], size: int) -> None:
    lengths = [1, 200, 17, 0, 129, 64]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    q, k, v, grad = (draw(sum(lengths), h, size, seed=i).to(dtype) for i, h in enumerate((*heads, heads[1], heads[0])))
    there = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    with hg.attention_backend(backend):
        try:
            choose(*there)
        except hg.Unsupported as refusal:
            pytest.skip(str(refusal))
    out = varlen_attention(*there, starts.to(DEVICE), max_length=torch.tensor(max(lengths)), backend=backend)
    found = [out, *torch.autograd.grad(out, there, grad.to(DEVICE))]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, starts, True, size**-0.5)
    for a, b in zip(found, [expected, *torch.autograd.grad(expected, wide, grad.double())], strict=True):
        assert error(a, b) < BOUND[dtype]


def test_triton_attention_twice_is_the_same_to_the_last_bit() -> None:
    q, k, v = (draw(300, 4, 64, seed=i).to(DEVICE, torch.bfloat16).requires_grad_() for i in range(3))
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)

    def run() -> list[Tensor]:
        out = varlen_attention(q, k, v, starts, backend="triton" if DEVICE.type == "cuda" else None)
        return [out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize(("dtype", "add", "sums"), [(torch.bfloat16, False, False), (torch.float32, True, True)])
def test_slice_copy(dtype: torch.dtype, add: bool, sums: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(0, 9000, (60,), generator=generator)
    begin = length.cumsum(0) - length
    order = torch.randperm(60, generator=generator)
    target = torch.empty_like(begin)
    target[order] = length[order].cumsum(0) - length[order]
    if sums:
        target = target // 2
    source, here = draw(int(length.sum())), draw(int(length.sum()), seed=1).to(dtype)
    there = here.to(DEVICE)
    table = slice_copy.SliceTable.make(begin, target, length, sums=sums, device=DEVICE)
    slice_copy.slice_copy(source.to(DEVICE), there, table, accumulate=add)
    slice_copy.reference(source, here, table, add)
    assert torch.equal(there.cpu(), here)


@pytest.mark.parametrize("size", [1, 16, 5003])
def test_adamw(size: int) -> None:
    weight, gradient, moment, square = draw(4, size).unbind()
    tensors = [weight, gradient, 0.1 * moment, 0.01 * square.square()]
    there = adamw.Shard(*(x.to(DEVICE) for x in tensors), torch.empty(size, dtype=torch.bfloat16, device=DEVICE), 3)
    wide = adamw.Shard(*(x.double() for x in tensors), None, 3)
    adamw.update([there], adamw.AdamWSettings(1e-2))
    adamw.reference([wide], adamw.AdamWSettings(1e-2))
    for found, expected in zip(there.tensors()[:4], wide.tensors(), strict=True):
        assert error(found, expected) < 1e-6
    assert there.copy is not None
    assert torch.equal(there.copy, there.weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy(dtype: torch.dtype) -> None:
    hidden, weight = draw(300, 64).to(dtype), (draw(5003, 64, seed=1) / 8).to(dtype)
    labels = torch.randint(5003, (300,), generator=torch.Generator().manual_seed(2))
    labels[::7] = -100
    there = [x.to(DEVICE).requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy.linear_cross_entropy(*there, labels.to(DEVICE))
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = linear_cross_entropy.reference(*wide, labels)
    assert error(loss, expected) < BOUND[dtype]
    found = torch.autograd.grad(loss, there)
    for a, b in zip(found, torch.autograd.grad(expected, wide), strict=True):
        assert error(a, b) < BOUND[dtype]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_gradients_of_a_whole_step_equal_the_cpus(dtype: torch.dtype, bound: float) -> None:
    model = llama(layers=2, heads=4, kv=2)
    batch = sequences([40, 3, 17])
    strategy = hg.Strategy.parse("<tp1,pp1>", layers=2)
    found = []
    for device, kind in (("cpu", torch.float32), (DEVICE, dtype)):
        exe = hg.compile(model, strategy, device=device, dtype=kind)
        gradients = exe.gradients(batch)
        found.append(torch.cat([gradients[name].flatten() for name in sorted(gradients)]))
        exe.close()
    assert error(found[1], found[0]) < bound


def test_what_a_device_runs_in_bf16_was_checked(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # an empty cache: no earlier run
    with caplog.at_level(logging.INFO, "hydragraph.frontend.check"):
        strategy = hg.Strategy.parse("<[0]x2r>", layers=2)
        exe = hg.compile(llama(layers=2), strategy, device=DEVICE, dtype=torch.bfloat16, check="full")
        exe.gradients(sequences([40, 3, 17]))
        exe.close()
    assert [m for m in caplog.messages if m.startswith("checked LlamaForCausalLM: embed, head and 2 of 2 blocks")]
    assert [m for m in caplog.messages if m.startswith("checked what ranks run under <tp1r>")]

"""Kernels and whole steps on the GPU, or on the CPU if there is none, against double precision on the CPU.

`benchmarks/gpu.sh` runs all of it; `make test` runs the cheapest cases, so that this file itself keeps working.
"""

# pyrefly: ignore-errors[bad-argument-count, bad-argument-type]
from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hydragraph as hg
from hydragraph.cluster.communicators import _first as first
from hydragraph.kernels import adamw, linear_cross_entropy, slice_copy
from hydragraph.kernels.attention_backends import choose
from hydragraph.kernels.attention_settings import AttentionSettings
from hydragraph.kernels.varlen_attention import reference, varlen_attention
from hydragraph.private.process_groups import abort_together, unbound
from tests.models import MODELS, llama, sequences
from tests.thorough import only, thorough

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["torch", "triton", "flash_attn", None] if DEVICE.type == "cuda" else ["loop", None]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}  # relative, in the 2-norm


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def skip_if_refused(backend: str | None, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> None:
    with hg.attention_backend(backend):
        try:
            choose(q, k, v, settings)
        except hg.Unsupported as refusal:
            pytest.skip(str(refusal))


def error(found: Tensor, expected: Tensor) -> float:
    wide = expected.detach().double()
    return float((found.detach().cpu().double() - wide).norm() / wide.norm())


@only("heads0-64-dtype0-None")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "size"), [((4, 2), 64), ((2, 2), 128), ((3, 1), 80)])
def test_attention(backend: str | None, dtype: torch.dtype, heads: tuple[int, int], size: int) -> None:
    lengths = [1, 200, 17, 0, 129, 64]
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    q, k, v, grad = (draw(sum(lengths), h, size, seed=i).to(dtype) for i, h in enumerate((*heads, heads[1], heads[0])))
    there = [x.to(DEVICE).requires_grad_() for x in (q, k, v)]
    skip_if_refused(backend, *there, AttentionSettings(True, size**-0.5))
    out = varlen_attention(*there, starts.to(DEVICE), max_length=torch.tensor(max(lengths)), backend=backend)
    found = [out, *torch.autograd.grad(out, there, grad.to(DEVICE))]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference(*wide, starts, True, size**-0.5)
    for a, b in zip(found, [expected, *torch.autograd.grad(expected, wide, grad.double())], strict=True):
        assert error(a, b) < BOUND[dtype]


@only("{'window': 50}-None")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{"causal": False}, {"window": 50}, {"chunk": 64}, {"cap": 5.0}, {"sink": True}, {"window": 9, "causal": False}],
    ids=str,
)
def test_attention_with_options(backend: str | None, options: dict[str, Any]) -> None:
    lengths, heads, size = [1, 200, 17, 300], (4, 2), 64
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    q, k, v, grad = (draw(sum(lengths), h, size, seed=i).bfloat16() for i, h in enumerate((*heads, heads[1], heads[0])))
    sinks = [draw(heads[0], seed=5)] if "sink" in options else []
    others = {name: value for name, value in options.items() if name != "sink"}
    there = [x.to(DEVICE).requires_grad_() for x in (q, k, v, *sinks)]
    settings = AttentionSettings(others.get("causal", True), size**-0.5, others.get("window"), others.get("cap"))
    skip_if_refused(backend, *there[:3], settings)
    given = dict(zip(("sink",), there[3:], strict=False))
    out = varlen_attention(*there[:3], starts.to(DEVICE), backend=backend, **others, **given)
    found = [out, *torch.autograd.grad(out, there, grad.to(DEVICE))]
    wide = [x.double().requires_grad_() for x in (q, k, v, *sinks)]
    given = dict(zip(("sink",), wide[3:], strict=False))
    expected = reference(*wide[:3], starts, **{"causal": True, "scale": size**-0.5, **others, **given})
    for a, b in zip(found, [expected, *torch.autograd.grad(expected, wide, grad.double())], strict=True):
        assert error(a, b) < BOUND[torch.bfloat16]


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
    loss = linear_cross_entropy.head_loss(*there, labels.to(DEVICE), -100)[0]
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = linear_cross_entropy.reference(*wide, labels)
    assert error(loss, expected) < BOUND[dtype]
    found = torch.autograd.grad(loss, there)
    for a, b in zip(found, torch.autograd.grad(expected, wide), strict=True):
        assert error(a, b) < BOUND[dtype]


@only("dtype0-0.0001")
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


@thorough
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma", "mistral", "mixtral", "phi"])
def test_gradients_of_other_families_equal_the_cpus(name: str) -> None:
    model = MODELS[name]()
    batch = sequences([40, 3, 17])
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        found = []
        for device in ("cpu", DEVICE):
            strategy = hg.Strategy.parse("<tp1,pp1>", layers=2)
            exe = hg.compile(model, strategy, device=device, dtype=dtype, check="off", backend="eager")
            gradients = exe.gradients(batch)
            found.append(torch.cat([gradients[key].flatten() for key in sorted(gradients)]))
            exe.close()
        assert error(found[1], found[0]) < bound


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """Make a process group of this process alone, over NCCL."""
    if DEVICE.type != "cuda":
        pytest.skip("NCCL communicators need a GPU")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.usefixtures("nccl")
def test_nccl_communicators_work_on_streams_of_high_priority_and_abort_together() -> None:
    with unbound():
        groups = [dist.new_group([0], backend="nccl", timeout=timedelta(seconds=20)) for _ in range(2)]
    stream = torch.cuda.Stream(DEVICE, priority=-1)
    given = torch.arange(1 << 20, device=DEVICE, dtype=torch.float32)
    for group in groups:
        assert group is not None
        first(partial(dist.all_reduce, group=group), DEVICE)
        out = torch.empty_like(given)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(DEVICE))
            works = [
                dist.all_to_all_single(out, given, group=group, async_op=True),
                dist.all_reduce(out, group=group, async_op=True),
            ]
        for work in works:
            work.wait()
        assert torch.equal(out, given)
    abort_together(groups)
    assert float(given.sum()) > 0  # the device still computes


@pytest.mark.usefixtures("nccl")
def test_a_step_runs_where_the_user_has_made_an_nccl_group() -> None:
    exe = hg.compile(llama(layers=2), hg.Strategy.parse("<tp1,pp1>", layers=2), device=DEVICE, dtype=torch.bfloat16)
    gradients = exe.gradients(sequences([40, 3, 17]))
    exe.close()
    assert dist.is_initialized()
    assert all(bool(each.isfinite().all()) for each in gradients.values())


@thorough
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
    assert [m for m in caplog.messages if m.startswith("checked the graphs of stages of kind <tp1r>")]

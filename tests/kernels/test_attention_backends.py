"""Choice of the backend for an attention call, and the arguments that each backend passes to its library."""

# pyrefly: ignore-errors[bad-argument-type]
from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels import attention_backends
from hydragraph.kernels.attention_backends import AttentionCall, attention_backend, check_gpu, choose, forced
from hydragraph.kernels.attention_settings import AttentionSettings
from hydragraph.kernels.varlen_attention import reference, varlen_attention
from tests.kernels.test_varlen_attention import bounds, packed, results


class OnGpu:
    """Looks like bf16 heads on a GPU, for choosing only."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 64) -> None:
        self.dtype, self.device, self.shape = dtype, torch.device("cuda", 0), (4, 2, size)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr("hydragraph.kernels.triton_attention.why_not", lambda device: None)


PLAIN = AttentionSettings(True, 1.0)


def chosen(x: Any, settings: AttentionSettings = PLAIN) -> str:
    return choose(x, x, x, settings).name


def test_the_cpu_has_the_loop() -> None:
    assert chosen(torch.zeros(1, 1, 4)) == "loop"


def test_the_order_on_a_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backends, "_flash_attn", lambda: ModuleType("flash_attn"))
    assert chosen(OnGpu()) == "flash_attn"
    monkeypatch.setattr(attention_backends, "_flash_attn", lambda: "the package cannot be imported")
    assert chosen(OnGpu()) == "torch"
    assert chosen(OnGpu(torch.float32)) == "triton"
    assert chosen(OnGpu(size=20)) == "triton"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert chosen(OnGpu()) == "triton"


def test_caps_need_flash_attn_or_triton(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backends, "_flash_attn", lambda: "the package cannot be imported")
    assert chosen(OnGpu(), AttentionSettings(True, 1.0, window=8)) == "torch"
    assert chosen(OnGpu(), AttentionSettings(True, 1.0, cap=8.0)) == "triton"


def test_a_choice_is_logged_once_with_its_reasons(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention_backends, "_flash_attn", lambda: "the package cannot be imported")
    attention_backends._announce.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            chosen(OnGpu())
    assert caplog.messages == ["varlen_attention on cuda: torch (flash_attn: the package cannot be imported)"]


def test_all_refuse(gpu: None) -> None:
    with pytest.raises(
        Unsupported, match=r"no backend supports torch.float64 .* triton: no kernel for torch.float64.*use bf16"
    ):
        chosen(OnGpu(torch.float64))


def test_forcing() -> None:
    with attention_backend("loop"):
        assert forced() == "loop"
        with attention_backend(None):
            assert forced() is None
        assert forced() == "loop"
    assert forced() is None
    with (
        pytest.raises(ValueError, match="no backend 'magic': use one of flash_attn, torch, triton, loop"),
        attention_backend("magic"),
    ):
        pass


def test_a_gpu_that_is_too_old_for_every_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_gpu(torch.device("cuda", 0))
    check_gpu(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(Unsupported, match=r"Tesla T4 is older than compute capability 8\.0"):
        check_gpu(torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["flash_attn", "torch"])
def test_a_forced_backend_never_falls_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backends, "_flash_attn", lambda: ModuleType("flash_attn"))
    q, k, v, cu_seqlens = packed([3])
    with pytest.raises(Unsupported, match=rf"{name}: no kernel for cpu.*attention_backend\(None\)"):
        varlen_attention(q, k, v, cu_seqlens, backend=name)


class Recorder:
    """Stands in for a flash library: computes by the loop, and keeps the arguments."""

    def __init__(self) -> None:
        self.forwards: list[tuple[Any, ...]] = []
        self.backwards: list[tuple[Any, ...]] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, settings: AttentionSettings, *kept: Any
    ) -> tuple[Tensor, Tensor, None, None, None]:
        self.forwards.append(kept)
        loop = attention_backends._BACKENDS["loop"]
        out, lse = loop.forward(q, k, v, AttentionCall(starts, torch.tensor(0), settings))
        return out, lse.T.contiguous(), None, None, None

    def backward(self, *args: Any, kept: tuple[Any, ...]) -> Any:
        grad, q, k, v, out, lse, starts, settings = args
        self.backwards.append(kept)
        assert lse.shape == (q.shape[1], q.shape[0])
        loop = attention_backends._BACKENDS["loop"]
        return loop.backward(grad, (q, k, v, out, lse.T), AttentionCall(starts, torch.tensor(0), settings))


def asked(causal: bool, scale: float, left: int | None, right: int | None, cap: float = 0.0) -> AttentionSettings:
    """Return what a flash library computes for its arguments."""
    assert (left in (None, -1)) == (right in (None, -1))
    window = None if left in (None, -1) else left + 1
    assert right == {True: 0, False: left}[causal] or window is None
    return AttentionSettings(causal, scale, window, cap or None)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Let CPU tensors through to recorded copies of both flash libraries."""
    found = Recorder()
    monkeypatch.setattr(attention_backends, "_flash_refusal", lambda q, k, v: None)

    def torch_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        dropout: float, causal: bool, debug: bool, *, scale: float,
        window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        settings = asked(causal, scale, window_size_left, window_size_right)
        return found.forward(q, k, v, cu_q, settings, cu_q.dtype, max_q, max_k, dropout, debug)

    def torch_backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
        max_q: int, max_k: int, dropout: float, causal: bool, state: Tensor, unused: Tensor, *, scale: float,
        window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> Any:  # fmt: skip
        settings = asked(causal, scale, window_size_left, window_size_right)
        return found.backward(grad, q, k, v, out, lse, cu_q, settings, kept=(cu_q.dtype, max_q, max_k, dropout))

    class Aten:
        _flash_attention_forward, _flash_attention_backward = staticmethod(torch_forward), staticmethod(torch_backward)
        _scaled_dot_product_flash_attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        )

    # The signatures of flash-attn 2.7 and 2.8.
    def package_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> Any:  # fmt: skip
        kept = (cu_seqlens_q.dtype, max_seqlen_q, max_seqlen_k, dropout_p, return_softmax)
        settings = asked(causal, softmax_scale, window_size_left, window_size_right, softcap)
        return found.forward(q, k, v, cu_seqlens_q, settings, *kept)

    def package_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
        dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
    ) -> Any:  # fmt: skip
        assert (alibi_slopes, deterministic) == (None, False)
        kept = (cu_seqlens_q.dtype, max_seqlen_q, max_seqlen_k, dropout_p)
        settings = asked(causal, softmax_scale, window_size_left, window_size_right, softcap)
        args = (dout, q, k, v, out, softmax_lse, cu_seqlens_q, settings)
        for given, gradient in zip((dq, dk, dv), found.backward(*args, kept=kept), strict=True):
            given.copy_(gradient)

    package = ModuleType("flash_attn.flash_attn_interface")
    package._flash_attn_varlen_forward, package._flash_attn_varlen_backward = package_forward, package_backward
    monkeypatch.setattr(attention_backends, "aten", Aten)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", package)
    attention_backends._flash_attn.cache_clear()
    return found


@pytest.mark.parametrize(
    ("name", "cap"), [("flash_attn", None), ("torch", None), ("flash_attn", 0.9)], ids=["package", "torch", "cap"]
)
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize(("longest", "causal"), [(None, True), (torch.tensor(9), False)])
def test_what_the_flash_libraries_are_given(
    recorder: Recorder,
    name: str,
    cap: float | None,
    window: int | None,
    longest: Tensor | None,
    causal: bool,
    request: pytest.FixtureRequest,
) -> None:
    request.addfinalizer(attention_backends._flash_attn.cache_clear)
    q, k, v, _ = packed([3, 5], heads=4, kv=2)
    cu_seqlens = bounds([3, 5], torch.int64)
    options: dict[str, Any] = {"window": window, "cap": cap}
    out = varlen_attention(q, k, v, cu_seqlens, causal=causal, scale=0.7, max_length=longest, backend=name, **options)
    found = results(out, q, k, v)
    expected = results(reference(q, k, v, cu_seqlens, causal, 0.7, **options), q, k, v)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    most = 5 if longest is None else 9
    assert recorder.forwards == [(torch.int32, most, most, 0.0, False)]
    assert recorder.backwards == [(torch.int32, most, most, 0.0)]


def test_a_package_that_cannot_be_imported_is_a_reason(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    attention_backends._flash_attn.cache_clear()
    request.addfinalizer(attention_backends._flash_attn.cache_clear)
    q, k, v, cu_seqlens = packed([3])
    with pytest.raises(Unsupported, match="flash_attn: the package cannot be imported"):
        varlen_attention(q, k, v, cu_seqlens, backend="flash_attn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.zeros(3, 2, 4)}, r"q, k, v of shapes \[3, 2, 8\], \[3, 2, 8\], \[3, 2, 4\]"),
        ({"k": torch.zeros(2, 2, 8)}, r"pass \[T, Hq, D\], \[T, Hk, D\]"),
        (
            {"cu_seqlens": torch.zeros(2)},
            r"cu_seqlens of shape \[2\] and torch.float32; pass an int32 or int64 tensor \[N \+ 1\]",
        ),
    ],
)
def test_shapes_that_are_refused(change: dict[str, Tensor], message: str) -> None:
    inputs = {name: torch.zeros(3, 2, 8) for name in "qkv"} | {"cu_seqlens": bounds([3])} | change
    with pytest.raises(Unsupported, match=message):
        varlen_attention(**inputs)

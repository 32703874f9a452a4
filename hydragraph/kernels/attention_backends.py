"""Backends of `varlen_attention`, chosen by device, dtype and settings, or forced by name.

Shapes are as in `varlen_attention`. All backends save the same log-sum-exp, so any backend can run another's backward.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import groupby, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from hydragraph.errors import Unsupported
from hydragraph.kernels import tiled_attention, triton_attention
from hydragraph.kernels.attention_settings import AttentionSettings
from hydragraph.kernels.new_tensors import contiguous_like, wide_dtype

aten = torch.ops.aten
log = logging.getLogger(__name__)

_OLDEST = (8, 0)
_TOO_OLD = "older than compute capability 8.0"

_forced: ContextVar[str | None] = ContextVar("attention_backend", default=None)


Gradients = tuple[Tensor, Tensor, Tensor]  # contiguous


@dataclass(frozen=True)
class AttentionCall:
    """Sequences and settings of a call.

    Attributes:
        starts: [N + 1], each sequence's start, then the number of tokens.
        longest: length of the longest sequence, 0-d int64 on the CPU; 0 if unknown.
    """

    starts: Tensor
    longest: Tensor
    settings: AttentionSettings


class Backend(Protocol):
    name: str

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> str | None:
        """Return why the call is not supported, or None."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Return the output [T, Hq, D] and the natural log-sum-exp [T, Hq] (fp32, or fp64 for fp64 q), contiguous."""

    def backward(self, grad: Tensor, saved: Sequence[Tensor], call: AttentionCall) -> Gradients:
        """Return the gradients of q, k, v; `saved` is q, k, v, output, log-sum-exp."""


@contextmanager
def attention_backend(name: str | None) -> Iterator[None]:
    """Force the backend of `varlen_attention`, including its backward, in this context.

    Args:
        name: "flash_attn", "torch", "triton" or "loop"; None: the first that supports the call.

    Raises:
        ValueError: the name is unknown.
    """
    if name is not None and name not in _BACKENDS:
        raise ValueError(f"attention_backend: no backend {name!r}: use one of {', '.join(_BACKENDS)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def forced() -> str | None:
    return _forced.get()


def choose(q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> Backend:
    """Return the forced backend, or the first that accepts the call; raise Unsupported if none does."""
    name = _forced.get()
    names = (name,) if name else ("loop",) if q.device.type == "cpu" else ("flash_attn", "torch", "triton")
    refusals: list[str] = []
    for candidate in names:
        backend = _BACKENDS[candidate]
        reason = backend.refusal(q, k, v, settings)
        if reason is None:
            _announce(candidate, q.device.type, name is not None, tuple(refusals))
            return backend
        refusals.append(f"{candidate}: {reason}")
    raise Unsupported(
        f"no backend supports {q.dtype} heads of size {q.shape[2]} on {q.device} ({'; '.join(refusals)})",
        where="varlen_attention",
        remedy="use attention_backend(None) to choose any backend" if name else "use bf16 on CUDA, or use the CPU",
    )


def check_gpu(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        raise Unsupported(
            f"{torch.cuda.get_device_name(device)} is {_TOO_OLD}",
            where="varlen_attention",
            remedy="use newer GPUs (A100, L4, RTX 30 or later), or the CPU",
        )


@cache
def _announce(name: str, device: str, was_forced: bool, refusals: tuple[str, ...]) -> None:
    why = " (forced)" if was_forced else f" ({'; '.join(refusals)})" if refusals else ""
    log.info("varlen_attention on %s: %s%s", device, name, why)


class _Flash(ABC):
    """Base of backends whose kernels take int32 bounds and return a log-sum-exp [Hq, T]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._forward((_dense(q), _dense(k), _dense(v), *_sizes(call)), call.settings)
        return out, lse.T.contiguous()

    def backward(self, grad: Tensor, saved: Sequence[Tensor], call: AttentionCall) -> Gradients:
        q, k, v, out, lse = saved
        tensors = (_dense(grad), _dense(q), _dense(k), _dense(v), out, lse.T.contiguous())
        return self._backward(tensors, _sizes(call), call.settings)

    @abstractmethod
    def _forward(self, arguments: tuple[Any, ...], settings: AttentionSettings) -> tuple[Any, ...]:
        """Return the output, the log-sum-exp, and unused results."""

    @abstractmethod
    def _backward(self, tensors: tuple[Tensor, ...], sizes: tuple[Any, ...], settings: AttentionSettings) -> Gradients:
        pass


class _FlashAttn(_Flash):
    name = "flash_attn"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> str | None:
        module = _flash_attn()
        return module if isinstance(module, str) else _flash_refusal(q, k, v)

    def _forward(self, arguments: tuple[Any, ...], settings: AttentionSettings) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = _flash_attn()._flash_attn_varlen_forward(
            *arguments, settings.scale, causal=settings.causal, **self._options(settings)
        )
        return outputs

    def _backward(self, tensors: tuple[Tensor, ...], sizes: tuple[Any, ...], settings: AttentionSettings) -> Gradients:
        dq, dk, dv = contiguous_like(*tensors[1:4])
        _flash_attn()._flash_attn_varlen_backward(
            *(*tensors, dq, dk, dv, *sizes, settings.scale, settings.causal),
            **self._options(settings),
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv

    @staticmethod
    def _options(settings: AttentionSettings) -> dict[str, Any]:
        before, after = _sides(settings)
        return {"window_size_left": before, "window_size_right": after, "softcap": settings.cap or 0.0}


class _TorchFlash(_Flash):
    name = "torch"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> str | None:
        if q.device.type == "cuda" and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without flash kernels"
        return "capped scores are not supported" if settings.cap is not None else _flash_refusal(q, k, v)

    def _forward(self, arguments: tuple[Any, ...], settings: AttentionSettings) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = aten._flash_attention_forward(
            *arguments, settings.causal, False, **self._options(settings)
        )
        return outputs

    def _backward(self, tensors: tuple[Tensor, ...], sizes: tuple[Any, ...], settings: AttentionSettings) -> Gradients:
        # Only dropout uses the random state.
        state = torch.zeros(2, dtype=torch.uint64, device=tensors[0].device)
        unused = torch.empty(0, device=tensors[0].device)
        dq, dk, dv = aten._flash_attention_backward(
            *tensors, *sizes, settings.causal, state, unused, **self._options(settings)
        )
        return dq.contiguous(), dk.contiguous(), dv.contiguous()

    @staticmethod
    def _options(settings: AttentionSettings) -> dict[str, Any]:
        if settings.window is None:
            return {"scale": settings.scale}
        before, after = _sides(settings)
        return {"scale": settings.scale, "window_size_left": before, "window_size_right": after}


class _Triton:
    name = "triton"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> str | None:
        return triton_attention.refusal(q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return triton_attention.forward(q, k, v, call.starts, call.settings)

    def backward(self, grad: Tensor, saved: Sequence[Tensor], call: AttentionCall) -> Gradients:
        q, k, v, out, lse = saved
        return triton_attention.backward(grad, q, k, v, out, lse, call.starts, call.settings)


class _Loop:
    name = "loop"

    def refusal(self, q: Tensor, k: Tensor, v: Tensor, settings: AttentionSettings) -> str | None:
        return None if q.device.type == "cpu" else "this backend runs only on a CPU"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        settings = call.settings
        group = q.shape[1] // k.shape[1]
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=wide_dtype(q.dtype))
        # n sequences of equal length, with tokens [a, b), share a call.
        for a, b, n in runs(call.starts):
            inputs = _heads_first(q[a:b], n), _heads_first(k[a:b], n, group), _heads_first(v[a:b], n, group)
            if _needs_tiles(settings, (b - a) // n):
                o, s = tiled_attention.forward(*inputs, settings)
            else:
                o, s = aten._scaled_dot_product_flash_attention_for_cpu(
                    *inputs, 0.0, settings.causal, scale=settings.scale
                )
            out[a:b] = _tokens_first(o)
            lse[a:b] = s.transpose(1, 2).flatten(0, 1)
        return out, lse

    def backward(self, grad: Tensor, saved: Sequence[Tensor], call: AttentionCall) -> Gradients:
        settings = call.settings
        q, k, v, out, lse = saved
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = contiguous_like(q, k, v)
        for a, b, n in runs(call.starts):
            inputs = (
                _heads_first(grad[a:b], n),
                _heads_first(q[a:b], n),
                _heads_first(k[a:b], n, group),
                _heads_first(v[a:b], n, group),
                _heads_first(out[a:b], n),
                lse[a:b].unflatten(0, (n, -1)).transpose(1, 2),
            )
            if _needs_tiles(settings, (b - a) // n):
                gradients = tiled_attention.backward(*inputs, settings)
            else:
                gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *inputs, 0.0, settings.causal, scale=settings.scale
                )
            dq[a:b], dk[a:b], dv[a:b] = (_tokens_first(x, g) for x, g in zip(gradients, (1, group, group), strict=True))
        return dq, dk, dv


_BACKENDS: dict[str, Backend] = {b.name: b for b in (_FlashAttn(), _TorchFlash(), _Triton(), _Loop())}


def spans(starts: Tensor) -> Iterator[tuple[int, int]]:
    return ((a, b) for a, b in pairwise(starts.tolist()) if b > a)


def runs(starts: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, number of sequences) of consecutive, equally long sequences."""
    for _, run in groupby(spans(starts), key=lambda span: span[1] - span[0]):
        sequences = list(run)
        yield sequences[0][0], sequences[-1][1], len(sequences)


@cache
def _flash_attn() -> Any:
    try:
        return import_module("flash_attn.flash_attn_interface")
    except ImportError as error:
        return f"the package cannot be imported ({error})"


def _flash_refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if q.device.type != "cuda":
        return f"no kernel for {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        return f"no kernel for {q.dtype}"
    if q.shape[2] > 256 or q.shape[2] % 8:
        return f"head size {q.shape[2]} is not a multiple of 8 up to 256"
    if torch.cuda.get_device_capability(q.device) < _OLDEST:
        return f"the GPU is {_TOO_OLD}"
    return None


def _sides(settings: AttentionSettings) -> tuple[int, int]:
    before, after = settings.sides()
    return (-1, -1) if before is None or after is None else (before, after)


def _needs_tiles(settings: AttentionSettings, length: int) -> bool:
    return settings.cap is not None or (settings.window is not None and length > settings.window)


def _sizes(call: AttentionCall) -> tuple[Any, ...]:
    bounds = call.starts.to(torch.int32)
    # Reading `max` makes the host wait for the device.
    most = int(call.longest) or int(call.starts.diff().max())
    return bounds, bounds, most, most, 0.0


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads_first(x: Tensor, sequences: int, group: int = 1) -> Tensor:
    x = _dense(x).unflatten(0, (sequences, -1)).transpose(1, 2)
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _tokens_first(x: Tensor, group: int = 1) -> Tensor:
    x = x.transpose(1, 2).flatten(0, 1)
    return x if group == 1 else x.unflatten(1, (-1, group)).sum(2)

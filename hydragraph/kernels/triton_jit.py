"""Lazily compiled Triton kernels; importing them does not need Triton."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from hydragraph.errors import Unsupported


class Kernel:
    """Function in Triton's language, compiled on the first launch.

    Before compilation, `tl` (`triton.language`) and compiled `Inlined` functions are added to its module.

    Attributes:
        unspecialized: run-time integers that must not cause another compilation if they are 1 or multiples of 16.
    """

    def __init__(self, function: Callable[..., None], unspecialized: tuple[str, ...]) -> None:
        self.function = function
        self.unspecialized = unspecialized

    @cached_property
    def compiled(self) -> Any:
        """Triton's JITFunction, or the interpreter's function under TRITON_INTERPRET."""
        import triton

        module = self.function.__globals__
        module["tl"] = triton.language
        module.update({name: triton.jit(f.function) for name, f in module.items() if isinstance(f, Inlined)})
        return triton.jit(self.function, do_not_specialize=self.unspecialized)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        launch: Callable[..., Any] = self.compiled[grid]
        return launch


@dataclass(frozen=True)
class Inlined:
    """Function inlined by the kernels of its module."""

    function: Callable[..., Any]

    def __call__(self, *_: Any) -> Any:
        raise AssertionError(f"{self.function.__name__} runs only in Triton kernels")


def kernel(*unspecialized: str) -> Callable[[Callable[..., None]], Kernel]:
    return lambda function: Kernel(function, unspecialized)


@dataclass(frozen=True, eq=False)
class KernelVariant:
    """One configuration of a kernel, which compiles without a GPU.

    Attributes:
        signature: Triton's name for each run-time argument's type, such as "*bf16" or "i64".
        aligned: run-time integers that are multiples of 16.
    """

    name: str
    kernel: Kernel
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    options: Mapping[str, object] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()


def why_not(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" or (device.type == "cpu" and _interpreted()):
        return None
    return f"Triton kernels do not run on {device.type} tensors"


def use_kernel(device: torch.device, where: str) -> bool:
    """Return whether to launch a Triton kernel: on CUDA, and on CPU under TRITON_INTERPRET=1.

    Raises:
        Unsupported: Triton is missing on CUDA, where plain PyTorch would be slow.
    """
    if device.type == "cpu" and not _interpreted():
        # Looking for Triton takes 0.4 ms
        return False
    if device.type == "cuda" and (reason := why_not(device)):
        raise Unsupported(reason, where=where, remedy="pip install triton (PyTorch's CUDA wheels include it)")
    return device.type == "cuda" or why_not(device) is None


def _interpreted() -> bool:
    if "TRITON_INTERPRET" not in os.environ or find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def require_one_device(where: str, tensors: Mapping[str, Tensor]) -> None:
    if len({tensor.device for tensor in tensors.values()}) > 1:
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise Unsupported(devices, where=where, remedy="move all to one device")

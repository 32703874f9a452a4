"""Pending operations, and copies of GPU tensors in host memory for gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Operation(Protocol):
    """Pending operation, as returned by torch.distributed."""

    def wait(self) -> object:
        """Wait until the operation is complete; under NCCL, make the current stream wait."""

    def is_completed(self) -> bool: ...


@dataclass(frozen=True)
class CombinedWork:
    parts: tuple[Operation, ...]

    def wait(self) -> None:
        for work in self.parts:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.parts)


@dataclass(frozen=True, eq=False)
class Message:
    """A pending operation, completed by `Groups.wait`.

    Attributes:
        landed: function to call on the waiting stream after completion.
        kept: tensors that the operation still uses.
    """

    work: Operation
    landed: Callable[[], None] | None = None
    kept: tuple[Tensor, ...] = ()

    @property
    def done(self) -> bool:
        """Whether `Groups.wait` would return without blocking the host."""
        return self.work.is_completed()


class Staging:
    """Copies tensors to and from temporary host memory (page-locked for GPUs)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def outgoing(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory, and wait for the copy."""
        host = self.incoming(tensor)
        host.copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return host

    def incoming(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")

    def arrived(self, host: Tensor, tensor: Tensor) -> None:
        """Copy received values from `host` to a tensor, on the current stream."""
        tensor.copy_(host, non_blocking=True)

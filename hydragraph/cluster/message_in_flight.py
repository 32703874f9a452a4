"""Pending operations, and gloo's copies of GPU tensors in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Operation(Protocol):
    def wait(self) -> object:
        """Wait; under NCCL, only the current stream waits."""

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
        landed: function to call on the waiting stream afterwards.
        kept: tensors that the operation still uses.
    """

    work: Operation
    landed: Callable[[], None] | None = None
    kept: tuple[Tensor, ...] = ()

    @property
    def done(self) -> bool:
        """Whether `Groups.wait` would not block the host."""
        return self.work.is_completed()


class Staging:
    """Copies tensors to and from host memory (page-locked for GPUs)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def outgoing(self, tensor: Tensor) -> Tensor:
        host = self.incoming(tensor)
        host.copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return host

    def incoming(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")

    def arrived(self, host: Tensor, tensor: Tensor) -> None:
        tensor.copy_(host, non_blocking=True)

"""A message under way, and the host memory that messages of a GPU pass through where the backend moves no other.

So several ranks can share one GPU over gloo: NCCL refuses that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Operation(Protocol):
    """What torch.distributed returns for an operation under way."""

    def wait(self) -> object:
        """Wait until it is done; under NCCL let the current stream wait."""

    def is_completed(self) -> bool:
        """Say whether it is done."""


@dataclass(frozen=True)
class Works:
    """Several operations under way, as one."""

    parts: tuple[Operation, ...]

    def wait(self) -> None:
        """Wait for all."""
        for work in self.parts:
            work.wait()

    def is_completed(self) -> bool:
        """Say whether all are done."""
        return all(work.is_completed() for work in self.parts)


@dataclass(frozen=True, eq=False)
class Message:
    """An operation under way; `Groups.wait` ends it.

    Attributes:
        work: what torch.distributed returned.
        landed: called after it, on the stream that waits: brings what came in through host memory to its place.
        kept: tensors that the operation still reads or writes; held here so that their memory is not reused.
    """

    work: Operation
    landed: Callable[[], None] | None = None
    kept: tuple[Tensor, ...] = ()

    @property
    def done(self) -> bool:
        """Whether waiting for it would not hold up the host."""
        return self.work.is_completed()


class Staging:
    """Copies tensors to host memory of their own and back.

    Args:
        device: where the tensors live; for a GPU the host memory is page-locked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def outgoing(self, tensor: Tensor) -> Tensor:
        """Return a tensor's values in host memory; waits until the current stream has made and copied them."""
        host = self.incoming(tensor)
        host.copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return host

    def incoming(self, tensor: Tensor) -> Tensor:
        """Return host memory for the values that a tensor is to get."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")

    def arrived(self, host: Tensor, tensor: Tensor) -> None:
        """Copy what came, on the current stream; the host memory is kept until that is done."""
        tensor.copy_(host, non_blocking=True)

"""Buffers that an iteration's weights, gradients and messages live in, kept for the next iteration on the CPU.

There, memory of this size goes back to the system when it is freed, and every step would pay for fresh pages again.
CUDA's allocator keeps memory by itself.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Buffers:
    """Hands out 1-D uninitialised tensors, and hands them out again once they were given back.

    Args:
        device: where they live; only the CPU's are kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By elements and dtype: what earlier iterations left, and what this one gave back.
        self._earlier: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._returned: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._taken: dict[int, Tensor] = {}  # by address

    def begin(self) -> None:
        """Start an iteration: what the last one had no use for is dropped, such as what another strategy needed."""
        self._earlier, self._returned = self._returned, defaultdict(list)
        self._taken.clear()  # what a failed iteration never gave back

    def trim(self) -> None:
        """Drop what lies idle, so that it does not stand beside what computing takes most memory for."""
        self._earlier.clear()
        self._returned.clear()

    def take(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a buffer of so many elements, with any content."""
        kept = self._returned.get((elements, dtype)) or self._earlier.get((elements, dtype))
        buffer = kept.pop() if kept else torch.empty(elements, dtype=dtype, device=self._device)
        if self._device.type == "cpu" and elements:
            self._taken[buffer.data_ptr()] = buffer
        return buffer

    def give(self, tensor: Tensor) -> None:
        """Take back what nobody reads any more; a tensor that is not one of these buffers is left alone."""
        buffer = self._taken.pop(tensor.data_ptr(), None) if tensor.device.type == "cpu" else None
        if buffer is not None:
            self._returned[len(buffer), buffer.dtype].append(buffer)

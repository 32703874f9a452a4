"""Buffers for weights, gradients and messages, which the next iteration reuses.

On CUDA, the device may still read a returned buffer, so a mark in the device's queue shows when the buffer is free.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import torch
from torch import Tensor

from hydragraph.runtime.streams import DeviceStreams, Mark

_LOG = logging.getLogger(__name__)

# Maximum idle buffers of one size; beyond it, `take` waits until the device has read one
AHEAD = 2

# Idle buffers by size and dtype
Idle = dict[tuple[int, torch.dtype], list[tuple[Tensor, Mark]]]


class Buffers:
    """Pool of uninitialized 1-D tensors."""

    def __init__(self, device: torch.device, streams: DeviceStreams | None = None) -> None:
        self._device = device
        self._streams = streams or DeviceStreams()
        self._earlier: Idle = {}
        self._returned: Idle = defaultdict(list)
        self._taken: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Start an iteration; drop buffers that the last iteration did not use."""
        _log_dropped(self._earlier)
        self._earlier = self._returned
        self._returned = defaultdict(list)
        self._taken.clear()

    def trim(self) -> None:
        """Drop idle buffers, to lower peak memory."""
        _log_dropped(self._earlier)
        self._earlier.clear()
        for key, idle in list(self._returned.items()):
            self._returned[key] = [(buffer, mark) for buffer, mark in idle if not self._streams.passed(mark)]

    def take(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized buffer for the current stream."""
        kept = self._free(self._returned, (elements, dtype)) or self._free(self._earlier, (elements, dtype))
        if kept is None:
            buffer = torch.empty(elements, dtype=dtype, device=self._device)
        else:
            buffer, mark = kept
            self._streams.wait(mark)
            self._streams.hold(buffer)
        if elements:
            self._taken[buffer.data_ptr()] = buffer
        return buffer

    def give(self, tensor: Tensor) -> None:
        """Take back a buffer that the current stream no longer reads; ignore other tensors."""
        # Search by address: the returned tensor may be another view.
        buffer = self._taken.pop(tensor.data_ptr(), None)
        if buffer is not None:
            self._returned[len(buffer), buffer.dtype].append((buffer, self._streams.mark()))

    def _free(self, idle: Idle, key: tuple[int, torch.dtype]) -> tuple[Tensor, Mark] | None:
        # Prefer the last returned buffer that is no longer read. Wait for the oldest only if many are
        # idle: a new buffer needs no wait.
        candidates = idle.get(key, [])
        at = next((i for i in reversed(range(len(candidates))) if self._streams.passed(candidates[i][1])), None)
        if at is None:
            return candidates.pop(0) if len(candidates) > AHEAD else None
        return candidates.pop(at)


def _log_dropped(idle: Idle) -> None:
    buffers = [buffer for kept in idle.values() for buffer, _ in kept] if _LOG.isEnabledFor(logging.DEBUG) else []
    if buffers:
        _LOG.debug("dropped %d idle buffers, in total %.1f MB", len(buffers), sum(b.nbytes for b in buffers) / 1e6)

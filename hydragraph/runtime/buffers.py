"""Buffers that an iteration's weights, gradients and messages live in, kept for the next iteration.

On the CPU, memory of this size goes back to the system when it is freed, and every step would pay for fresh pages
again. On CUDA the host runs ahead of the device: what it gives back may still be read there, so a buffer carries the
mark behind which it is free.

A buffer is taken from what was given back in this iteration, else from what the last one left, else made. Iterations
of one strategy ask for the same sizes, so from the second on hardly any is made; what one iteration has no use for is
dropped when the next begins.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import torch
from torch import Tensor

from hydragraph.runtime.streams import DeviceStreams, HostStreams, Mark

_LOG = logging.getLogger(__name__)

AHEAD = 2  # buffers of one size that may be in use by the device still, before their reuse waits for it

Idle = dict[tuple[int, torch.dtype], list[tuple[Tensor, Mark]]]  # by elements and dtype


class Buffers:
    """Hands out 1-D uninitialised tensors, and hands them out again once they were given back.

    Args:
        device: where they live.
        streams: the device's queues; default: a CPU's.
    """

    def __init__(self, device: torch.device, streams: DeviceStreams | None = None) -> None:
        self._device = device
        self._streams = streams or HostStreams()
        # What earlier iterations left, and what this one gave back.
        self._earlier: Idle = {}
        self._returned: Idle = defaultdict(list)
        self._taken: dict[int, Tensor] = {}  # by address

    def begin(self) -> None:
        """Start an iteration: what the last one had no use for is dropped, such as what another strategy needed."""
        if _LOG.isEnabledFor(logging.DEBUG):
            _log_dropped(self._earlier)
        self._earlier = self._returned
        self._returned = defaultdict(list)
        self._taken.clear()  # what a failed iteration never gave back

    def trim(self) -> None:
        """Drop what lies idle, so that it does not stand beside what computing takes most memory for."""
        if _LOG.isEnabledFor(logging.DEBUG):
            _log_dropped(self._earlier)
        self._earlier.clear()
        for key, idle in list(self._returned.items()):
            self._returned[key] = [(buffer, mark) for buffer, mark in idle if not self._streams.passed(mark)]

    def take(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a buffer of so many elements, with any content, for the current stream."""
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
        """Take back what nobody reads once the current stream got here; leave alone what is not one of these."""
        # By address: what is given back may be another view than what was taken. Views that begin further in are not
        # recognised, and neither are tensors of the home state.
        buffer = self._taken.pop(tensor.data_ptr(), None)
        if buffer is not None:
            self._returned[len(buffer), buffer.dtype].append((buffer, self._streams.mark()))

    def _free(self, idle: Idle, key: tuple[int, torch.dtype]) -> tuple[Tensor, Mark] | None:
        """Take out the newest that the device is done with, or the oldest where it still uses too many of them."""
        # Where the device is done with none of them, a new one costs memory and waiting costs time: up to AHEAD it is a
        # new one, and then the oldest, which the device gets done with first.
        candidates = idle.get(key, [])
        at = next((i for i in reversed(range(len(candidates))) if self._streams.passed(candidates[i][1])), None)
        if at is None:
            return candidates.pop(0) if len(candidates) > AHEAD else None
        return candidates.pop(at)


def _log_dropped(idle: Idle) -> None:
    buffers = [buffer for kept in idle.values() for buffer, _ in kept]
    if buffers:
        _LOG.debug("dropped %d idle buffers of %.1f MB", len(buffers), sum(b.nbytes for b in buffers) / 1e6)

"""A micro-probe: how many small products a device makes per second, of a device that has nothing else to do.

A strategy may leave a slow device idle (Malleus's standby); then no instruction says whether it is fast again. A probe
runs for a while, not once: a device that is stopped for 60 of every 100 ms looks healthy for 40 of them.
"""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": 128, "cuda": 2048}  # rows and columns: some tenths of a millisecond
MOST_S = 0.25  # that a probe takes


class Probe:
    """Probes one device.

    Args:
        device: which.

    Attributes:
        most_s: after so many seconds it ends; 0: it does not begin.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.most_s = 0.0

    def __call__(self) -> float:
        """Return products per second; 0 where it may not begin. Memory is taken for as long as it lasts."""
        if self.most_s <= 0:
            return 0.0
        size = SIZES[self._device.type]
        factor = torch.ones(size, size, device=self._device) / size
        out = torch.empty_like(factor)
        self._multiply(factor, out)  # to be warm
        began = time.perf_counter()
        count = 0
        while (now := time.perf_counter()) < began + self.most_s:
            self._multiply(factor, out)
            count += 1
        return count / (now - began)

    def _multiply(self, factor: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(factor, factor, out=out)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

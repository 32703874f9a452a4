"""Mask, scale and cap of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSettings:
    """Settings of an attention call, as in `varlen_attention`."""

    causal: bool
    scale: float
    window: int | None = None
    cap: float | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and self.cap is None

    def sides(self) -> tuple[int | None, int | None]:
        """Return the maximum distances to earlier and later keys; None: no limit."""
        distance = None if self.window is None else self.window - 1
        return distance, 0 if self.causal else distance


def visible(rows: Tensor, columns: Tensor, settings: AttentionSettings) -> Tensor:
    """Return a mask of the keys (`columns`) to which queries (`rows`) attend."""
    distance = rows[:, None] - columns[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    before, after = settings.sides()
    if before is not None:
        seen &= distance <= before
    if after is not None:
        seen &= -distance <= after
    return seen


def cut_at_multiples(starts: Tensor, tokens: int, chunk: int) -> Tensor:
    """Split sequences after every `chunk` tokens.

    The result's size is independent of sequence lengths, so no length is copied from the device. Parts of sequence n
    begin at index starts[n] // chunk + n; some are empty.

    Args:
        starts: [N + 1], each sequence's start, then `tokens`.

    Returns:
        Starts of parts, [tokens // chunk + N + 1].
    """
    # starts [0, 5, 6], chunk 4: first = [0, 2, 3], result [0, 4, 5, 6].
    # Slots after a sequence's end get this end, so their parts are empty.
    slots = torch.arange(tokens // chunk + len(starts), device=starts.device, dtype=starts.dtype)
    first = starts // chunk + torch.arange(len(starts), device=starts.device, dtype=starts.dtype)
    sequence = (torch.searchsorted(first, slots, right=True) - 1).clamp(max=len(starts) - 2)
    return torch.minimum(starts[sequence] + (slots - first[sequence]) * chunk, starts[sequence + 1])

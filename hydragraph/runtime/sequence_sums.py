"""Sums over each sequence's tokens in packed micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoredSequences:
    """Positions of a rank's sequences in the mini-batch.

    Attributes:
        count: L, the number of sequences in the mini-batch.
        values: K, the number of values per token.
        places: each micro-batch's sequence indices, in packed order.
    """

    count: int
    values: int
    places: Mapping[int, Sequence[int]]

    def sums(self, rows: Mapping[int, tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
        """Return fp64 sums [L, K] by sequence; 0 for other ranks' sequences.

        Args:
            rows: each micro-batch's values [1, tokens, K] and sequence bounds [sequences + 1], with padding last.
        """
        total = torch.zeros(self.count, self.values, dtype=torch.float64, device=device)
        for micro_batch, (values, bounds) in rows.items():
            places = torch.tensor(self.places[micro_batch], device=device)
            lengths = bounds.diff()[: len(places)].long()
            of_token = torch.repeat_interleave(places, lengths)
            total.index_add_(0, of_token, values[0, : len(of_token)].double())
        return total

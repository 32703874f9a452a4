"""Sums over each sequence's tokens, from values of packed micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scored:
    """Positions of a rank's sequences in the mini-batch.

    Attributes:
        count: L, the number of sequences in the mini-batch.
        values: K, the number of values per token.
        places: for each micro-batch, the indices of its sequences in packed order.
    """

    count: int
    values: int
    places: Mapping[int, Sequence[int]]

    def sums(self, rows: Mapping[int, tuple[Tensor, Tensor]], device: torch.device) -> Tensor:
        """Return the sums of each sequence's values in fp64, [L, K]; 0 for sequences of other ranks.

        Args:
            rows: for each micro-batch, its tokens' values [1, tokens, K] and its sequences' bounds [sequences + 1],
                padding last.
        """
        total = torch.zeros(self.count, self.values, dtype=torch.float64, device=device)
        for micro_batch, (values, bounds) in rows.items():
            places = torch.tensor(self.places[micro_batch], device=device)
            lengths = bounds.diff()[: len(places)].long()
            of_token = torch.repeat_interleave(places, lengths)
            total.index_add_(0, of_token, values[0, : len(of_token)].double())
        return total

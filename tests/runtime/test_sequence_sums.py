"""Sums over the tokens of packed sequences."""

from __future__ import annotations

import torch

from hydragraph.runtime.sequence_sums import ScoredSequences


def test_each_sequence_gets_the_sum_of_its_own_tokens() -> None:
    # Three sequences in the order 3, 0, 2, then padding.
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 99.0]])[..., None]
    bounds = torch.tensor([0, 2, 3, 5, 6], dtype=torch.int32)
    alone = (torch.tensor([[32.0, 64.0]])[..., None], torch.tensor([0, 2], dtype=torch.int32))
    scored = ScoredSequences(5, 1, {7: (3, 0, 2), 8: (4,)})
    sums = scored.sums({7: (values, bounds), 8: alone}, torch.device("cpu"))
    assert sums[:, 0].tolist() == [4, 0, 24, 3, 96]
    assert sums.dtype == torch.float64


def test_a_rank_without_micro_batches_adds_nothing() -> None:
    assert ScoredSequences(3, 2, {}).sums({}, torch.device("cpu")).tolist() == [[0, 0]] * 3

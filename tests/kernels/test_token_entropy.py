"""Entropies of tokens, including distributions that exclude some words."""

from __future__ import annotations

import math

import pytest
import torch

from hydragraph.kernels.token_entropy import token_entropy


def test_entropies_are_those_of_the_distribution() -> None:
    logits = torch.tensor(
        [[0.0, 0.0, 0.0, 0.0], [500.0, 0.0, 0.0, 0.0], [3.0, 3.0, -math.inf, -math.inf], [1.0, 2.0, 3.0, 4.0]]
    )
    labels = torch.tensor([0, 1, 2, -100])
    assert token_entropy(logits, labels, -100).tolist() == pytest.approx([math.log(4), 0, math.log(2), 0])

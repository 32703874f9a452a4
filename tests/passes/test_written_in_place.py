"""Operators whose derivatives PyTorch writes in place: deviations, norms, weights that are computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests import reference
from tests.models import randomised, sequences
from tests.thorough import only


class Standardised(nn.Module):
    """A weight of mean 0 and deviation 1 in each row, for `parametrize`."""

    def forward(self, weight: Tensor) -> Tensor:
        return (weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-3)


class Layer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(32, 64), nn.Linear(64, 32), kind
        if kind == "parametrize":
            parametrize.register_parametrization(self.down, "weight", Standardised())

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        match self.kind:
            case "std of a weight":
                return x + F.linear(h, Standardised()(self.down.weight), self.down.bias)
            case "std of activations":
                return x + self.down((h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-3))
            case "var and norm":
                return x + self.down(h / (h.norm(dim=-1, keepdim=True) + h.var(-1, keepdim=True)))
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(101, 32), nn.Linear(32, 101)
        self.blocks = nn.ModuleList([Layer(kind) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@only("std of a weight")
@pytest.mark.parametrize("kind", ["std of a weight", "std of activations", "var and norm", "parametrize"])
def test_gradients_equal_the_models_own(kind: str) -> None:
    model, batch = randomised(Model(kind)), sequences([9, 4, 6])
    targets = sum(len(s) - 1 for s in batch)
    alone = torch.stack([F.cross_entropy(model(s[None])[0, :-1], s[1:], reduction="sum") for s in batch]).sum()
    (alone / targets).backward()
    reference.refuse_difference(model, batch, layers=2)

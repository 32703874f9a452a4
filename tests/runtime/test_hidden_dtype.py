"""Hidden states of another dtype than the weights', between stages over real gloo processes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.cost.graph_footprint import token_bytes
from hydragraph.ir.hidden_state import hidden_dtype
from tests import reference
from tests.models import randomised, sequences
from tests.ready import Ready
from tests.thorough import only, thorough

STRATEGIES = ["<tp1,pp2>", "<tp2,pp1>"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x.to(self.up.weight.dtype))))
        return x + y.to(x.dtype)


class Model(nn.Module):
    """A model whose residual stream has a dtype of its own."""

    def __init__(self, residual: torch.dtype) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(102, 32), nn.Linear(32, 102)
        self.blocks = nn.ModuleList([Layer() for _ in range(4)])
        self.residual = residual

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).to(self.residual)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype)).float()


CASES = {
    "wider": (torch.float64, torch.float32, 1.0),
    "fp32 under bf16": (torch.float32, torch.bfloat16, 5e3),  # gradients have 8 bits
    "narrower": (torch.bfloat16, torch.float32, 5e3),
}


def ready() -> dict[str, Ready]:
    return {
        name: Ready.of(randomised(Model(residual)), STRATEGIES, dtype) for name, (residual, dtype, _) in CASES.items()
    }


def train(prepared: dict[str, Ready]) -> dict[str, list[dict[str, Tensor]]]:
    """Return the gradients of each case under each strategy."""
    found = {}
    for name, one in prepared.items():
        chosen = [hg.Strategy.parse(text, layers=4) for text in STRATEGIES]
        exe = one.executable(chosen[0], dtype=CASES[name][1])
        found[name] = [exe.gradients(sequences([9, 4, 6]), strategy=strategy) for strategy in chosen]
        exe.close()
    return found


@thorough
def test_pipelines_move_hidden_states_as_they_are() -> None:
    found, batch = hg.launch(train, 2, ready())[0], sequences([9, 4, 6])
    for name, (residual, dtype, limit) in CASES.items():
        model = randomised(Model(residual)).to(dtype)
        sums = [F.cross_entropy(model(s[None])[0, :-1], s[1:], reduction="sum") for s in batch]
        (torch.stack(sums).sum() / sum(len(s) - 1 for s in batch)).backward()
        expected = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        for strategy, gradients in zip(STRATEGIES, found[name], strict=True):
            worst, ratio = reference.worst(gradients, expected)
            assert ratio <= limit, f"{name}, {strategy}: {worst}"


@only("narrower")
@pytest.mark.parametrize("name", list(CASES))
def test_what_a_hidden_state_takes(name: str) -> None:
    residual, dtype, _ = CASES[name]
    program = hg.capture(Model(residual), dtype=dtype)
    assert hidden_dtype(program) is residual
    assert token_bytes(program.templates[program.blocks[0].template].graph) == 32 * residual.itemsize


class Unreached(Model):
    """The loss reaches the embedding by the tied head alone: what is below the head gets zeros for gradients."""

    def __init__(self, residual: torch.dtype) -> None:
        super().__init__(residual)
        self.head = nn.Linear(32, 102, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).to(self.residual)
        for block in self.blocks:
            x = block(x)
        return self.head(x.detach().to(self.head.weight.dtype)).float()


def unreached() -> dict[str, Tensor]:
    strategy = hg.Strategy.parse("<[0]x2,[1]x2>", layers=4)
    exe = hg.compile(randomised(Unreached(torch.float64)), strategy, device="cpu")
    return exe.gradients(sequences([9, 4, 6]))


def test_gradients_of_what_the_loss_does_not_reach_have_the_hidden_states_dtype() -> None:
    gradients = hg.launch(unreached, 2)[0]
    model = randomised(Unreached(torch.float64))
    batch = sequences([9, 4, 6])
    sums = [F.cross_entropy(model(s[None])[0, :-1], s[1:], reduction="sum") for s in batch]
    (torch.stack(sums).sum() / sum(len(s) - 1 for s in batch)).backward()
    assert gradients.keys() == {"embed.weight"}
    torch.testing.assert_close(gradients["embed.weight"], model.embed.weight.grad)

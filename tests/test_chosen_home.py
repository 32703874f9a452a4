"""Training under the home that is chosen by default, and chosen again where ranks move to other strategies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from tests import reference
from tests.models import llama, sequences
from tests.ready import Ready

LAYERS = 2
PIPELINE, BOTH = "<tp1,pp2>", "2*<tp1,pp1>"
WAY = [(None, PIPELINE), (None, BOTH), ("stages", PIPELINE), ("equal", PIPELINE), ("auto copies=2", PIPELINE)]


def batches() -> list[list[Tensor]]:
    return [sequences([20, 7, 33, 1, 12, 5], seed=i) for i in range(len(WAY))]


def ready() -> Ready:
    return Ready.of(llama(layers=LAYERS, tied=True), [PIPELINE, BOTH])


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=0.01)


def train(prepared: Ready) -> tuple[list[float], list[str], list[int], dict[str, Tensor]]:
    """Train a step under each home and strategy; return losses, owners, elements here, and weights."""
    exe = prepared.executable(hg.Strategy.parse(PIPELINE, LAYERS), adam)
    losses, owners, sizes = [], [], []
    for (home, strategy), batch in zip(WAY, batches(), strict=True):
        exe.move(exe.world, home, range(exe.ranks), strategy=strategy)
        losses.append(exe.step(batch).loss)
        owners.append(str(exe.owners))
        sizes.append(sum(weights.numel() for weights in exe.home.weights.values()))
    weights = exe.full_state_dict()
    exe.close()
    return losses, owners, sizes, weights


def test_the_chosen_home_trains_as_one_device_and_follows_the_strategies() -> None:
    found = hg.launch(train, 2, ready())
    losses, owners, sizes, weights = found[0]
    wanted = reference.train(llama(layers=LAYERS, tied=True), batches(), lambda p: torch.optim.AdamW(p, lr=0.01))
    assert losses == pytest.approx(wanted.losses, rel=1e-5)
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-4, msg=name)
    # The first stage's layer on rank 0, the last's on rank 1, the tied table in halves: both stages use it.
    by_stage = "equal head=0,1 layer.0=1,0 layer.1=0,1"
    assert owners == [by_stage, "equal", by_stage, "equal", "equal copies=2 nodes=0,1"]
    assert [each[1] for each in found] == [owners] * 2
    whole = sum(weight.numel() for name, weight in weights.items() if name != "lm_head.weight")
    assert [a + b for a, b in zip(sizes, found[1][2], strict=True)] == [whole] * 4 + [2 * whole]

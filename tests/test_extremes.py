"""Sequence lengths at both ends, over real gloo processes: one sequence of 8K tokens, and 2,000 of four.

One launch runs both under every strategy; loss and gradients equal those of one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from tests import reference
from tests.models import llama, sequences
from tests.ready import Ready
from tests.thorough import thorough

LAYERS = 2
LENGTHS = {"one long": [8192], "many short": [4] * 2000}
STRATEGIES = ["<[0,1]x1s,[2]x1>", "<[2,0]x2> + <[1]x2>"]
LIMIT = timedelta(minutes=5)


@dataclass(frozen=True)
class Run:
    """What one rank saw: per case and strategy, the loss, and on rank 0 the gradients."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]


def model() -> nn.Module:
    return llama(layers=LAYERS, heads=2, kv=1, width=50)


def data(name: str) -> list[Tensor]:
    return sequences(LENGTHS[name], seed=1)


def ready() -> Ready:
    return Ready.of(model(), STRATEGIES)


def runs(prepared: Ready) -> Run:
    chosen = [hg.Strategy.parse(s, layers=LAYERS) for s in STRATEGIES]
    exe = prepared.executable(chosen[0])
    losses, gradients = [], []
    for name in LENGTHS:
        for strategy in chosen:
            losses.append(exe.evaluate(data(name), strategy=strategy).loss)
            gradients.append(exe.gradients(data(name), strategy=strategy))
    exe.close()
    return Run(losses, gradients)


def alone(name: str) -> tuple[float, dict[str, Tensor]]:
    """Compute loss and gradients on one device, all sequences, which are equally long, as one batch."""
    single, ids = model(), torch.stack(data(name))
    logits = single(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in single.named_parameters()}  # pyrefly: ignore[bad-return]


@thorough
def test_extreme_lengths_equal_one_device() -> None:
    found = hg.launch(runs, 3, timeout=LIMIT, prepare=ready)
    assert all(run.losses == found[0].losses for run in found), "ranks disagree"
    cases = [(name, strategy) for name in LENGTHS for strategy in STRATEGIES]
    wanted = {name: alone(name) for name in LENGTHS}
    for (name, strategy), loss, gradients in zip(cases, found[0].losses, found[0].gradients, strict=True):
        assert loss == pytest.approx(wanted[name][0], rel=1e-5)
        worst, ratio = reference.worst(gradients, wanted[name][1])
        assert ratio <= 1, f"{name}, {strategy}: gradient of {worst} is {ratio:.2f} times the tolerance off"

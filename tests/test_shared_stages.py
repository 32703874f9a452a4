"""Stages that several pipelines share: what they train, compared with one device, over real gloo processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hydragraph as hg
from tests import reference
from tests.adapted import hand_written_lora
from tests.models import gpt2, llama, sequences
from tests.ready import Ready
from tests.thorough import first, thorough

LENGTHS = [20, 7, 33, 1, 12, 5, 9]  # one of them has no target
MODELS = {
    "llama": lambda: llama(layers=4, heads=12, kv=2),
    "tied llama": lambda: llama(layers=4, heads=12, kv=6, tied=True),
    "gpt2": lambda: gpt2(layers=4, heads=12),
    "adapters": hand_written_lora,  # three layers
}
FEW = [
    "<[0]x2,[2,3]x2> + <[1]x2,[2,3]x2>",
    "<[2,0]x1s,[1]x3r> + <[2,0]x1s,[3]x3>",
    "<[0]x1,[1]x2,[2]x1> + <[3]x3,[2]x1> gpipe",
]
SHARED = {
    4: [
        "<[0]x2,[2,3]x2> + <[1]x2,[2,3]x2>",  # fan-in, and tensor parallelism in the shared stage
        "<[2,0]x1s,[1]x3r> + <[2,0]x1s,[3]x3>",  # fan-out, sequence parallelism, recomputation on one side
        "<[0]x1,[1]x1,[2]x2> + <[0]x1,[1]x1,[3]x2>",  # two shared stages in a row
        "<[0]x1,[3]x2sr,[1]x1> + <[2]x1,[3]x2sr,[1]x1> gpipe",  # two in a row behind, by gpipe
        "<[0]x1,[1]x2,[2]x1> + <[3]x3,[2]x1>",  # the shared stage is the third of one and the second of another
        "<[0]x3,[1,2]x1s> + <[3]x3,[1,2]x1s>",
        "<[3]x2,[0]x2> + <[1]x2,[0]x2> + <[1]x2,[2]x2>",  # joined in a chain
        "<[0]x2,[2]x2> + <[1]x2,[3]x2> + <[0]x2,[3]x2>",
    ],
    3: ["<[0]x2,[2]x1> + <[1]x2,[2]x1>", "<[0]x1,[1,2]x2sr> + <[3]x1,[1,2]x2sr>"],
}
ORDINARY = ["2*<tp1,pp2>", "<tp2,pp2>"]


@dataclass
class Run:
    """What rank 0 saw: losses of training, gradients under each strategy at the starting weights, final weights.

    Attributes:
        resumed: whether the losses from half-way on were the same bits after a save and a load.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    resumed: bool


def batches(count: int) -> list[list[Tensor]]:
    """Return mini-batches, every third of one sequence: then one pipeline has work, and the others have none."""
    return [sequences(LENGTHS[: 1 if i % 3 == 2 else None], seed=i) for i in range(count)]


def ready(model: str, strategies: list[str]) -> Ready:
    return Ready.of(MODELS[model](), strategies)


def train(prepared: Ready, strategies: list[str], home: hg.Home | None, folder: Path) -> Run:
    """On every rank: gradients under each strategy, then training across all of them, with a checkpoint on the way."""
    layers = prepared.variants.program.layers
    chosen = [hg.Strategy.parse(s, layers) for s in strategies]
    exe = prepared.executable(chosen[0], lambda named: torch.optim.SGD(named, lr=0.05), home=home)
    data = batches(len(chosen))
    gradients = [exe.gradients(data[0], strategy=s) for s in chosen]
    losses: list[float] = []
    for i, strategy in enumerate(chosen):
        if i == len(chosen) // 2:
            exe.save(folder)
        losses.append(exe.step(data[i], strategy=strategy).loss)
    weights = exe.full_state_dict()
    half = len(chosen) // 2
    exe.load(folder)
    again = [exe.step(b, strategy=s).loss for b, s in zip(data[half:], chosen[half:], strict=True)]
    exe.close()
    return Run(losses, gradients, weights, again == losses[half:])


@thorough
@pytest.mark.parametrize(
    ("model", "shared"),
    first([("llama", FEW)], [("llama", FEW), *((name, SHARED[3 if name == "adapters" else 4]) for name in MODELS)]),
)
def test_strategies_that_share_stages_train_as_one_device_does(model: str, shared: list[str], tmp_path: Path) -> None:
    build = MODELS[model]
    strategies = [text for pair in zip(shared, ORDINARY * 4, strict=False) for text in pair]
    home = hg.Home([3, 1, 0, 2]) if model == "adapters" else None
    runs = hg.launch(train, 4, strategies, home, tmp_path, prepare=partial(ready, model, strategies))
    wanted = reference.train(build(), batches(len(strategies)), lambda p: torch.optim.SGD(p, lr=0.05))
    assert all(run.losses == runs[0].losses for run in runs), "ranks disagree"
    assert all(run.resumed for run in runs)
    assert runs[0].losses == pytest.approx(wanted.losses, rel=1e-5)
    for strategy, gradients in zip(strategies, runs[0].gradients, strict=True):
        name, ratio = reference.worst(gradients, wanted.gradients[0])
        assert ratio <= 1, f"{strategy}: gradient of {name} is {ratio:.2f} times the tolerance off"
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(runs[0].weights[name], weight, rtol=1e-4, atol=1e-5, msg=name)

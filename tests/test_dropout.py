"""Dropout with equal masks under every strategy: training equals one device that draws the same masks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend.same_masks import same_masks
from hydragraph.kernels.philox import key_of, keys_of
from tests import reference
from tests.models import dropping_gpt2, llama, sequences
from tests.ready import Ready
from tests.thorough import first

LAYERS = 2
SEED = 2**35 + 5
LENGTHS = [20, 7, 33, 1, 12, 5]  # one of them has no target
STRATEGIES = {
    "gpt2": ["<tp1,pp2>", "2*<tp1,pp1>", "<[1,0]x2sr>"],
    "lora": ["<tp2,pp1>", "<tp1,pp2>", "2*<tp1,pp1>", "<[1,0]x2sr>"],
}
STEPS = 4


def lora() -> nn.Module:
    """Return a Llama with adapters on all products: their dropout stands before and within tensor-parallel regions."""
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.2, target_modules="all-linear")
    torch.manual_seed(3)
    model = peft.get_peft_model(llama(layers=LAYERS, heads=4, kv=2), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return model.train()


MODELS = {"gpt2": partial(dropping_gpt2, LAYERS), "lora": lora}


def batches() -> list[list[Tensor]]:
    return [sequences(LENGTHS, seed=i) for i in range(STEPS)]


def ready(model: str) -> Ready:
    return Ready.of(MODELS[model](), STRATEGIES[model])


def train(
    prepared: Ready, strategies: list[str], folder: Path
) -> tuple[list[dict[str, Tensor]], list[float], list[float], list[float]]:
    """Return the first step's gradients by strategy, losses of training in turn, two evaluations' and resumed ones."""
    chosen = [hg.Strategy.parse(s, layers=LAYERS) for s in strategies]
    exe = prepared.executable(chosen[0], lambda named: torch.optim.SGD(named, lr=0.05), seed=SEED)
    data = batches()
    gradients = [exe.gradients(data[0], strategy=s) for s in chosen]
    evaluated = [exe.evaluate(data[0], strategy=s).loss for s in chosen[:2]]
    losses = []
    for i, batch in enumerate(data):
        if i == 2:
            exe.save(folder / "step-2")
        losses.append(exe.step(batch, strategy=chosen[i % len(chosen)]).loss)
    exe.load(folder / "step-2")
    resumed = [exe.step(data[2], strategy=chosen[2]).loss, exe.step(data[3], strategy=chosen[1]).loss]
    exe.close()
    return gradients, losses, evaluated, resumed


@pytest.mark.parametrize("model", first(["gpt2"], ["gpt2", "lora"]))
def test_every_strategy_equals_one_device_with_the_same_masks(model: str, tmp_path: Path) -> None:
    runs = hg.launch(train, 2, ready(model), STRATEGIES[model], tmp_path)
    gradients, losses, evaluated, resumed = runs[0]
    program = hg.capture(MODELS[model](), check="off")

    def masks(module: nn.Module, step: int, i: int, length: int) -> AbstractContextManager[None]:
        return same_masks(module, program, keys_of(key_of(SEED, step), [length], [i]))

    plain = partial(torch.optim.SGD, lr=0.05)
    want = reference.train(MODELS[model](), batches(), plain, masks=masks)
    for strategy, found in zip(STRATEGIES[model], gradients, strict=True):
        name, ratio = reference.worst(found, want.gradients[0])
        assert ratio <= 1, f"{strategy}: gradient of {name} is {ratio:.2f} times the tolerance off"
    assert losses == pytest.approx(want.losses, rel=1e-5)
    assert resumed[0] == losses[2]  # the same strategy: the same bits
    assert resumed[1] == pytest.approx(losses[3], rel=1e-5)
    without = reference.train(MODELS[model]().eval(), batches()[:1], plain)
    assert evaluated == pytest.approx(without.losses * 2, rel=1e-5)
    assert abs(without.losses[0] - losses[0]) > 1e-3


def test_ranks_with_other_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="'seed' is 'one': give an integer"):
        hg.compile(dropping_gpt2(1), "<tp1,pp1>", seed="one")  # pyrefly: ignore[bad-argument-type]

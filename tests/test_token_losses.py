"""Losses made of log-probabilities per token have one device's gradients, however sequences are packed and split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from tests import reference
from tests.models import llama, sequences
from tests.ready import Ready
from tests.thorough import thorough

LAYERS = 4
LENGTHS = [20, 7, 33, 1, 12, 5]
STRATEGIES = [
    "<[0,1]x3,[2]x1> + <[3]x4>",
    "<[2,0]x2sr,[1,3]x2s>",  # sequence parallelism where the loss is
    "<[3]x1,[0,1]x2s,[2]x1r> zb-h1",
    "<[0]x2,[1,2]x2> + <[3]x2,[1,2]x2>",
]
EXAMPLE = {name: torch.zeros(1, 8) for name in ("old", "base", "advantage")}


def clipped(logp: Tensor, old: Tensor, base: Tensor, advantage: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of GRPO's terms: clipped ratios to the sampling model, and the divergence from a base model."""
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    divergence = (base - logp).exp() - (base - logp) - 1
    return ((0.04 * divergence - gain) * counts).sum()


def loss(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    old, base, advantage = (batch[name][0] for name in EXAMPLE)
    return clipped(hg.token_logprobs(outputs, batch), old, base, advantage, batch["labels"][0] != -100)


def batch(model: nn.Module) -> list[dict[str, Any]]:
    """Draw answers after prompts of three tokens, and older log-probabilities that make many ratios clipped."""
    generator = torch.Generator().manual_seed(3)
    drawn = []
    for i, ids in enumerate(sequences(LENGTHS)):
        labels = torch.where(torch.arange(len(ids)) < 3, -100, ids)
        logp = torch.cat([_logp(model, ids).detach(), torch.zeros(1)])
        old, base = (logp + 0.3 * torch.randn(len(ids), generator=generator) for _ in range(2))
        drawn.append({"input_ids": ids, "labels": labels, "old": old, "base": base, "advantage": (-1) ** i * 0.7})
    return drawn


def _logp(model: nn.Module, ids: Tensor) -> Tensor:
    if len(ids) < 2:
        return torch.zeros(0)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def ready() -> Ready:
    model = llama(layers=LAYERS, heads=12, kv=2)
    return Ready.of(model, STRATEGIES, loss=loss, example=EXAMPLE)


def gradients(prepared: Ready, data: list[dict[str, Any]]) -> list[tuple[float, dict[str, Tensor]]]:
    exe = prepared.executable(STRATEGIES[0], loss=loss)
    found = []
    for strategy in STRATEGIES:
        value = exe.evaluate(data, strategy, divide_by="sequences").loss
        found.append((value, exe.gradients(data, strategy, divide_by="sequences")))
    exe.close()
    return found


@thorough
def test_clipped_ratios_have_the_gradients_of_one_device() -> None:
    model = llama(layers=LAYERS, heads=12, kv=2)
    data = batch(model)
    total = torch.zeros(())
    for each in data:
        counts = each["labels"][1:] != -100
        fields = (each["old"][:-1], each["base"][:-1], torch.tensor(each["advantage"]))
        total = total + clipped(_logp(model, each["input_ids"]), *fields, counts) / len(data)
    total.backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for strategy, (loss, computed) in zip(STRATEGIES, hg.launch(gradients, 4, data, prepare=ready)[0], strict=True):
        assert loss == pytest.approx(total.item(), rel=1e-5)
        name, ratio = reference.worst(computed, wanted)
        assert ratio <= 1, f"{strategy}: gradient of {name} is {ratio:.2f} times the tolerance off"

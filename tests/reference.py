"""One device, plain PyTorch: the unmodified model, one sequence at a time, against which every strategy is checked."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg

_SUMMED = partial(F.cross_entropy, reduction="sum")


@dataclass
class Reference:
    """Losses per step, the gradients of every step, and the final weights, of plain training with AdamW."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def train(
    model: nn.Module,
    mini_batches: list[list[Tensor]],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    clip: float | None = None,
    masks: Callable[[nn.Module, int, int, int], AbstractContextManager[None]] = lambda *_: nullcontext(),
    cost: Callable[[Tensor, Tensor], Tensor] = _SUMMED,
) -> Reference:
    """Train a copy of a causal language model; loss = sum of next-token losses / number of targets.

    `cost` takes the logits of a sequence's tokens and the next tokens, and returns the sum of their losses.

    `masks` is entered for each sequence, with the model, the step, the number of the sequence and its length.
    """
    model = copy.deepcopy(model)
    stepper = optimizer(model.parameters())
    losses, gradients = [], []
    for step, batch in enumerate(mini_batches, start=1):
        stepper.zero_grad()
        targets = sum(max(len(s) - 1, 0) for s in batch)
        loss = torch.zeros(())
        for i, ids in ((i, s) for i, s in enumerate(batch) if len(s) > 1):
            with masks(model, step, i, len(ids)):
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
            loss = loss + cost(logits[:-1], ids[1:]) / targets
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        stepper.step()
    return Reference(losses, gradients, {n: t.detach().clone() for n, t in model.state_dict().items()})


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[str, float]:
    """Return the parameter whose gradient is furthest off, and its error over the tolerance (1 is the limit).

    Tolerance per parameter: 1e-5 of its own norm and 1e-7 of the norm of all gradients.
    """
    everything = torch.stack([g.norm() for g in wanted.values()]).norm()
    ratios = {n: float((found[n] - g).norm() / (1e-5 * g.norm() + 1e-7 * everything)) for n, g in wanted.items()}
    name = max(ratios, key=lambda n: ratios[n])
    return name, ratios[name]


def refuse_difference(model: nn.Module, batch: Sequence[Tensor | dict[str, Tensor]], layers: int) -> None:
    """Raise AssertionError where one rank does not give the gradients that a model's parameters have."""
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    exe = hg.compile(model, hg.Strategy.parse("<tp1,pp1>", layers), None, device="cpu")
    found = exe.gradients(batch)
    exe.close()
    name, ratio = worst(found, expected)
    assert ratio <= 1, name

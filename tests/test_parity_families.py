"""More model families over real gloo processes: losses and gradients of every one equal one device's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from tests import reference
from tests.frontend.families import build
from tests.models import MODELS, bert, llama4, mixtral, randomised, sequences
from tests.own_models import Own, alone, weighted
from tests.ready import Ready
from tests.thorough import thorough

LENGTHS = [20, 7, 1, 12, 8]
MIXED = ["<[2]x1,[0,1]x1s>"]
CUT = [*MIXED, "<[0,1]x2> + <[2]x2>"]  # where what is tied is cut and whole
EXPERTS = ["<[0,1]x1s,[2]x1>", "<[2,0]x2r> + <[1]x2>"]
STEPS, RATE = 3, 0.05

Sequence = Tensor | dict[str, Tensor]


def next_tokens(model: nn.Module, sequence: Any) -> Tensor:
    logits = model(input_ids=sequence[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], sequence[1:], reduction="sum")


def masked(model: nn.Module, sequence: Any) -> Tensor:
    logits = model(input_ids=sequence["input_ids"][None]).logits[0]
    return F.cross_entropy(logits, sequence["labels"], reduction="sum", ignore_index=-100)


def own_tokens(model: nn.Module, sequence: Any) -> Tensor:
    return F.cross_entropy(alone(model, sequence)[:-1], sequence[1:], reduction="sum")


def by_weight(model: nn.Module, sequence: Any) -> Tensor:
    each = F.cross_entropy(alone(model, sequence["input_ids"]), sequence["shift_labels"], reduction="none")
    return (each * sequence["weight"]).sum()


@dataclass(frozen=True)
class Family:
    """How a family is built, what its sequences bring, and what one device computes of one of them."""

    build: Callable[[], nn.Module]
    alone: Callable[[nn.Module, Any], Tensor] = next_tokens
    fields: tuple[str, ...] = ()
    strategies: tuple[str, ...] = tuple(MIXED)
    layers: int = 2

    def mini_batch(self, seed: int) -> list[Sequence]:
        """Return sequences, with every third token as a target where they bring labels."""
        plain = sequences(LENGTHS, seed=seed)
        if not self.fields:
            return list(plain)
        generator = torch.Generator().manual_seed(seed)
        made: dict[str, Callable[[Tensor], Tensor]] = {
            "labels": lambda ids: torch.where(torch.arange(len(ids)) % 3 == 0, ids, -100),
            "shift_labels": lambda ids: torch.where(torch.arange(len(ids)) % 3 == 0, ids, -100),
            "weight": lambda ids: torch.rand(len(ids), generator=generator),
        }
        return [{"input_ids": ids} | {name: made[name](ids) for name in self.fields} for ids in plain]

    def options(self) -> dict[str, Any]:
        """Return what capturing it needs besides the model."""
        return {"loss": weighted, "example": {"weight": torch.zeros(1, 4)}} if "weight" in self.fields else {}


FAMILIES = {
    **{n: Family(MODELS[n], strategies=tuple(CUT)) for n in ("opt", "gemma")},
    **{n: Family(MODELS[n]) for n in ("gpt_neox", "granite", "mistral", "phi", "qwen2", "qwen3")},
    "mixtral": Family(lambda: mixtral(num_hidden_layers=1), strategies=("<[1,0]x1sr>",), layers=1),
    "mixtral in two pipelines": Family(MODELS["mixtral"], strategies=tuple(EXPERTS)),
    "qwen3_5": Family(lambda: randomised(build("qwen3_5_text")[0]), strategies=tuple(EXPERTS)),  # linear attention
    "llama4": Family(lambda: llama4(layers=3), strategies=("<[0,1]x2s,[2]x1>", "<[2,0]x3r> + <[1]x3>"), layers=3),
    "bert": Family(lambda: bert(layers=2), masked, ("labels",)),
    "limited": Family(lambda: randomised(Own(limited=(1,))), own_tokens),  # a window, a cap and sinks in one layer
    "own": Family(lambda: randomised(Own()), by_weight, ("shift_labels", "weight")),
}


def ready(names: list[str]) -> dict[str, Ready]:
    families = {name: FAMILIES[name] for name in names}
    return {n: Ready.of(family.build(), family.strategies, **family.options()) for n, family in families.items()}


def train(prepared: dict[str, Ready]) -> dict[str, tuple[list[float], list[dict[str, Tensor]]]]:
    """On every rank: gradients of the first mini-batch under each strategy, then steps across all of them."""
    found = {}
    for name in prepared:
        family = FAMILIES[name]
        chosen = [hg.Strategy.parse(s, layers=family.layers) for s in family.strategies]
        exe = prepared[name].executable(chosen[0], lambda named: torch.optim.SGD(named, lr=RATE))
        gradients = [exe.gradients(family.mini_batch(0), strategy=s) for s in chosen]
        losses = [exe.step(family.mini_batch(i), strategy=chosen[i % len(chosen)]).loss for i in range(STEPS)]
        exe.close()
        found[name] = (losses, gradients)
    return found


def one_device(family: Family) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of plain training, and the gradients of its first step."""
    model, losses, first = family.build(), [], {}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        batch = family.mini_batch(step)
        targets = sum(_targets(s) for s in batch)
        loss = torch.stack([family.alone(model, s) for s in batch if _targets(s)]).sum() / targets
        optimizer.zero_grad()
        loss.backward()
        first = first or {n: p.grad.clone() for n, p in model.named_parameters()}
        losses.append(loss.item())
        optimizer.step()
    return losses, first


def _targets(sequence: Sequence) -> int:
    if isinstance(sequence, Tensor):
        return len(sequence) - 1
    labels = sequence["labels"] if "labels" in sequence else sequence["shift_labels"]
    return int((labels != -100).sum())


EXPERTS_ONLY = ["mixtral"]
SOME = ["bert", "limited", "qwen3_5", "llama4"]


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (EXPERTS_ONLY, 2),
        pytest.param(SOME, 3, marks=thorough),
        pytest.param([n for n in FAMILIES if n not in EXPERTS_ONLY + SOME], 3, marks=thorough),
    ],
    ids=["experts", "some", "others"],
)
def test_families_under_lopsided_strategies_equal_one_device(names: list[str], ranks: int) -> None:
    runs = hg.launch(train, ranks, ready(names))
    for name in names:
        family = FAMILIES[name]
        wanted, expected = one_device(family)
        assert all(run[name][0] == runs[0][name][0] for run in runs), f"{name}: ranks disagree"
        assert runs[0][name][0] == pytest.approx(wanted, rel=1e-5), name
        for strategy, gradients in zip(family.strategies, runs[0][name][1], strict=True):
            worst, ratio = reference.worst(gradients, expected)
            assert ratio <= 1, f"{name}, {strategy}: gradient of {worst} is {ratio:.2f} times the tolerance off"

"""A model that computes something else than its copies is refused, and so is a loss of its own that is not trained."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import hydragraph as hg
from hydragraph.frontend.capture import capture
from hydragraph.frontend.check.narrow_model import CheckedModel
from hydragraph.frontend.check.numeric_check import check
from tests.models import llama, randomised
from tests.own_models import Own, Small, small

pytestmark = pytest.mark.usefixtures("shared_graphs")

BY_IDENTITY: dict[int, float] = {}
REGISTERED: set[nn.Module] = set()


class Listed(Small):
    """A block that computes something else if it is in a global container, in which no copy is."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        scale = BY_IDENTITY.get(id(self), 1.0) + (self in REGISTERED)
        return super().forward(x, cu_seqlens) * scale


@pytest.mark.parametrize("by_identity", [True, False])
def test_code_that_depends_on_a_modules_identity_is_refused(by_identity: bool) -> None:
    model = small()
    model.stack = nn.ModuleList([Listed() for _ in range(3)])
    subject = CheckedModel(randomised(model), capture(model, blocks="stack"), blocks="stack")
    assert not check(subject).problem
    try:
        if by_identity:
            BY_IDENTITY[id(model.stack[1])] = 2.0
        else:
            REGISTERED.add(model.stack[1])
        with pytest.raises(
            hg.Unsupported, match=r"the model computes the loss .*, but a copy of the model .*: use no id"
        ):
            check(subject)
    finally:
        BY_IDENTITY.clear()
        REGISTERED.clear()


class Scoring(Own):
    """A model that returns logits, and a loss that it computes from the labels."""

    def __init__(self, loss: Any) -> None:
        super().__init__(layers=0)
        self.stack = small().stack
        self.loss = loss

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, labels: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """Return {"logits": [1, T, 101], "loss": []}."""
        logits = super().forward(input_ids, position_ids, cu_seqlens)
        return {"logits": logits, "loss": self.loss(logits[0], labels[0])}


def shifted_again(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, F.pad(labels, (0, 1), value=-100)[1:])


@pytest.mark.filterwarnings("error:Converting a tensor")
def test_a_loss_that_the_model_returns_must_be_the_trained_one() -> None:
    smoothed = randomised(Scoring(functools.partial(F.cross_entropy, label_smoothing=0.1)))
    program = capture(smoothed)  # has no part of the model's own loss, so it is that of all these models
    for loss in (F.cross_entropy, functools.partial(F.cross_entropy, reduction="sum"), shifted_again):
        assert not check(CheckedModel(randomised(Scoring(loss)), program)).problem
    with pytest.raises(hg.Unsupported, match=r"Scoring: the model returns the loss .*, but without loss= .* as loss="):
        check(CheckedModel(smoothed, program))
    own = lambda outputs, batch: F.cross_entropy(  # noqa: E731
        outputs["logits"][0], batch["labels"][0], reduction="sum", label_smoothing=0.1
    )
    assert not check(CheckedModel(smoothed, capture(smoothed, loss=own), own)).problem


class Penalised(LlamaForCausalLM):
    """A user's class that adds to the loss of its library class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the library's forward."""
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss + outputs.logits.logsumexp(-1).square().mean()
        return outputs


def test_a_loss_that_a_subclass_changes_is_refused() -> None:
    model = randomised(Penalised(llama(layers=1).config))  # pyrefly: ignore[bad-argument-type]
    program = capture(model)
    with pytest.raises(hg.Unsupported, match="Penalised: the model returns the loss"):
        check(CheckedModel(model, program))
    plain = randomised(type("Plain", (LlamaForCausalLM,), {"__module__": __name__})(llama(layers=1).config))
    assert not check(CheckedModel(plain, program)).problem
    assert torch.is_grad_enabled()

"""A loss that is a module: its buffers are constants of the program, and its parameters are refused."""

from __future__ import annotations

import pickle
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.errors import Unsupported
from tests import reference
from tests.models import llama, sequences
from tests.ready import Ready

LAYERS, LENGTHS = 1, [9, 4, 13]


class Weighted(nn.Module):
    """Cross-entropy with a weight for each class."""

    weights: Tensor

    def __init__(self, classes: int = 101) -> None:
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.1, 2.0, classes))

    def forward(self, outputs: object, batch: dict[str, Tensor]) -> Tensor:
        logits = getattr(outputs, "logits", outputs)
        return F.cross_entropy(logits[0].float(), batch["labels"][0], self.weights, ignore_index=-100, reduction="sum")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits[0], batch["labels"][0], ignore_index=-100, reduction="sum") * self.t


@cache
def ready() -> Ready:
    return Ready.of(llama(layers=LAYERS), ["<tp2,pp1>"], loss=Weighted())


def trained(prepared: Ready) -> tuple[dict[str, Tensor], list[float]]:
    loss = Weighted()
    exe = prepared.executable("<tp2,pp1>", lambda named: torch.optim.SGD(named, lr=0.1), loss=loss)
    gradients = exe.gradients(sequences(LENGTHS))
    losses = [exe.step(sequences(LENGTHS, seed=i)).loss for i in range(2)]
    loss.weights.mul_(2)
    with pytest.raises(Unsupported, match=r"loss.*weights"):
        exe.step(sequences(LENGTHS))
    exe.close()
    return gradients, losses


def test_class_weights_train_as_on_one_device_and_a_change_is_noticed() -> None:
    (gradients, losses), (_, other) = hg.launch(trained, 2, ready())
    loss = Weighted()
    wanted = reference.train(
        llama(layers=LAYERS),
        [sequences(LENGTHS, seed=i) for i in range(2)],
        partial(torch.optim.SGD, lr=0.1),
        cost=partial(F.cross_entropy, weight=loss.weights, reduction="sum"),
    )
    name, ratio = reference.worst(gradients, wanted.gradients[0])
    assert ratio <= 1, name
    assert losses == other
    assert losses == pytest.approx(wanted.losses, rel=1e-5)


def test_a_program_is_run_with_the_loss_that_it_was_captured_with() -> None:
    program = ready().variants.program
    model = ready().model
    batch = sequences(LENGTHS)
    losses = []
    for loss in (None, program.loss):
        exe = hg.compile(model, "<tp1,pp1>", device="cpu", program=program, loss=loss)
        losses.append(exe.evaluate(batch).loss)
        exe.close()
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match=r"captured with another loss=.*; pass that loss, or no loss=, to"):
        hg.compile(model, "<tp1,pp1>", device="cpu", program=program, loss=Weighted(50))
    elsewhere = pickle.loads(pickle.dumps(program))
    with pytest.raises(ValueError, match=r"a block reads the loss's buffer 'weights', .*; pass the loss module"):
        hg.compile(model, "<tp1,pp1>", device="cpu", program=elsewhere)

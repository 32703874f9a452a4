"""A head that returns log-probabilities instead of their summed loss, in whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hydragraph as hg
from hydragraph.frontend.packed_inputs import own_fields
from hydragraph.ir.program import Program
from hydragraph.passes.scoring_head import scoring_program
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StagePart
from tests.models import captured, gpt2, llama
from tests.thorough import only, thorough


def outputs(program: Program, hidden: Tensor, labels: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Run the last block."""
    block = program.blocks[-1]
    names = dict(zip(program.templates[block.template].parameters, block.parameters, strict=True))
    inputs = {"hidden": hidden, "labels": labels} | {local: weights[name].detach() for local, name in names.items()}
    variant = Variants(program).get(block, StagePart())
    out: Tensor = variant.forward(*(inputs[name] for name in variant.inputs))[0]
    return out


def test_log_probabilities_add_up_to_the_loss() -> None:
    program, model = captured("llama")
    scoring = scoring_program(program)
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[3, 5, -100, 7, 100, 0, -100, 2, 2]])
    weights = dict(model.named_parameters())
    scores = outputs(scoring, hidden, labels, weights)
    assert scores.shape == (1, 9, 1)
    scores = scores[..., 0]
    assert scores[labels == -100].tolist() == [0, 0]
    assert (scores[labels != -100] < 0).all()
    torch.testing.assert_close(-scores.sum(), outputs(program, hidden, labels, weights))
    assert scoring.blocks[:-1] == program.blocks[:-1]


def weighted(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = outputs.logits[0].float()
    costs = F.cross_entropy(logits, batch["labels"][0], ignore_index=-100, reduction="none", label_smoothing=0.1)
    return (costs * batch["weights"][0]).sum()


@thorough
def test_fields_that_only_the_loss_reads_are_no_inputs() -> None:
    model = llama(layers=1)
    program = hg.capture(model, loss=weighted, example={"weights": torch.ones(1, 8)})
    scoring = scoring_program(program)
    (before, after) = (each.templates[each.blocks[-1].template].inputs for each in (program, scoring))
    assert set(before) - set(after) == {"weights"}


def clipped(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    return -(hg.token_logprobs(outputs, batch) - batch["old"][0]).exp().clamp(0.8, 1.2).sum()


def test_scores_need_no_field_of_the_loss_whose_size_the_model_reads() -> None:
    program = hg.capture(gpt2(layers=1), loss=clipped, example={"old": torch.zeros(1, 8)}, check="off")
    assert set(own_fields(program)) == {"old"}
    assert not own_fields(scoring_program(program))


def squares(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    counts = (batch["labels"] != -100)[..., None]
    return (outputs.logits.float().pow(2) * counts).sum()


def of_two_temperatures(outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = outputs.logits[0].float(), batch["labels"][0]
    return F.cross_entropy(logits, labels, reduction="sum") + F.cross_entropy(logits / 2, labels, reduction="sum")


@only("of_two_temperatures-several")
@pytest.mark.parametrize(
    ("loss", "what"), [(squares, "no log-probability per token"), (of_two_temperatures, "several")]
)
def test_a_loss_without_a_single_log_probability_is_refused(loss: Callable[..., Tensor], what: str) -> None:
    with pytest.raises(hg.Unsupported, match=f"the loss has .*{what}"):
        scoring_program(hg.capture(gpt2(layers=1), loss=loss))

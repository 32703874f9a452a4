"""Arguments of `compile` besides a model and a strategy: a program that was captured before."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import hydragraph as hg
from tests.models import captured, llama, sequences
from tests.thorough import thorough

STRATEGY = hg.Strategy.parse("<tp1,pp1>", layers=2)


@thorough
def test_a_program_is_not_captured_again() -> None:
    program, model = captured("llama")
    with mock.patch("hydragraph.engine.api.capture", side_effect=AssertionError("it was captured before")):
        found = hg.compile(model, STRATEGY, program=program)
    wanted = hg.compile(llama(layers=2), STRATEGY)
    batch = sequences([9, 4])
    assert found.evaluate(batch).loss == wanted.evaluate(batch).loss


def of_other_layers() -> nn.Module:
    return llama(layers=3)


def of_another_epsilon() -> nn.Module:
    model = llama(layers=2)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3  # type: ignore[assignment]
    return model


def of_another_activation() -> nn.Module:
    model = llama(layers=2)
    model.model.layers[1].mlp.act_fn = nn.GELU()  # type: ignore[union-attr]
    return model


def of_another_config() -> nn.Module:
    model = llama(layers=2)
    model.config.rope_parameters["rope_theta"] = 5e4  # type: ignore[index]
    return model


def of_another_scale() -> nn.Module:
    model = llama(layers=2)
    model.model.layers[1].self_attn.scaling = 0.3  # type: ignore[union-attr]  # which does not print
    return model


@pytest.mark.parametrize(
    "other", [of_another_scale, of_other_layers, of_another_epsilon, of_another_activation, of_another_config]
)
def test_the_program_of_another_model_is_refused(other: object) -> None:
    program, _ = captured("llama")
    with pytest.raises(ValueError, match="another model than this LlamaForCausalLM: capture this one"):
        hg.compile(other(), STRATEGY, program=program)  # type: ignore[operator]


def test_what_capture_was_told_is_not_told_again() -> None:
    program, model = captured("llama")
    with pytest.raises(ValueError, match=r"it computes in torch.float32; give dtype, example and loss to `capture`"):
        hg.compile(model, STRATEGY, dtype=torch.bfloat16, program=program)
    with pytest.raises(ValueError, match="give dtype, example and loss to `capture` alone"):
        hg.compile(model, STRATEGY, loss=lambda outputs, batch: outputs.logits.sum(), program=program)

"""The unmodified model with a program's masks: which calls of dropout it replaces."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.frontend.same_masks import same_masks
from hydragraph.kernels.philox import key_of, keys_of
from tests.models import dropping_gpt2

KEYS = keys_of(key_of(0, 1), [20], [0])
IDS = torch.arange(20)[None] % 7


@functools.cache
def program() -> hg.Program:
    return hg.capture(dropping_gpt2(2), check="off")


def logits(model: nn.Module, program: hg.Program, keys: Tensor = KEYS) -> Tensor:
    with torch.no_grad(), same_masks(model, program, keys):
        result: Tensor = model(input_ids=IDS).logits
    return result


def test_attention_by_sdpa_and_by_hand_have_one_mask() -> None:
    model = dropping_gpt2(2)
    fused = logits(model, program())
    model.set_attn_implementation("eager")
    assert torch.allclose(logits(model, program()), fused, atol=1e-5)
    assert torch.equal(logits(model, program()), logits(model, program()))
    assert not torch.allclose(logits(model, program(), keys_of(key_of(0, 2), [20], [0])), fused, atol=1e-3)


def test_nothing_is_replaced_outside() -> None:
    model = dropping_gpt2(2)
    with pytest.raises(ZeroDivisionError), same_masks(model, program(), KEYS):
        raise ZeroDivisionError
    torch.manual_seed(0)
    once = model(input_ids=IDS).logits
    assert not torch.equal(model(input_ids=IDS).logits, once)
    assert torch.equal(logits(model.eval(), program()), model(input_ids=IDS).logits)

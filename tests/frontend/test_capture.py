"""Whole captures: the program computes what the model computes, sequence by sequence, or the model is refused."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from tests.frontend.execute import batch, loss
from tests.models import MODELS, captured, gpt2, llama, randomised, tiny

FAMILIES = list(MODELS)


@pytest.mark.parametrize("lengths", [[2], [5, 1, 3], [150, 50]], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_loss_and_gradients_equal_the_models_on_each_sequence_alone(name: str, lengths: list[int]) -> None:
    program, model = captured(name)
    given, total = batch(lengths), torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        logits = model(input_ids=given["input_ids"][:, a:b], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, given["labels"][0, a:b], reduction="sum", ignore_index=-100)
    found = loss(program, model, given)
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-4)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
    gradients = torch.autograd.grad(found, parameters, allow_unused=True, materialize_grads=True)
    scale = torch.stack([g.norm() for g in expected]).norm()
    for parameter, one, other in zip(dict(model.named_parameters()), gradients, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm() + 1e-6 * scale, parameter


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_names_every_parameter_once(name: str) -> None:
    program, model = captured(name)
    assert {n: p.shape for n, p in program.parameters.items()} == {
        n: tuple(p.shape) for n, p in model.named_parameters()
    }
    assert sorted(p.name for bucket in program.buckets for p in bucket.parameters) == sorted(program.parameters)
    assert [b.name for b in program.blocks] == ["embed", *(f"layer.{i}" for i in range(program.layers)), "head"]
    assert program.heads == (4,)
    assert program.causal
    assert program.model == type(model).__name__


def test_a_tied_parameter_is_a_bucket_of_the_blocks_that_use_it() -> None:
    program, _ = captured("gpt2")
    first, *own = program.buckets
    assert (first.name, first.blocks) == ("transformer.wte.weight", ("embed", "head"))
    assert program.parameters[first.name].aliases == ("lm_head.weight",)
    assert [(b.name, b.blocks) for b in own] == [(n, (n,)) for n in ("embed", "layer.0", "layer.1", "head")]


def test_capturing_again_gives_the_same_program_and_leaves_the_model_alone() -> None:
    program, model = captured("llama")
    before = {n: p.clone() for n, p in model.named_parameters()}
    implementation = model.config._attn_implementation
    again = capture(model)
    assert again.fingerprint == program.fingerprint
    assert str(again) == str(program)
    assert model.config._attn_implementation == implementation != "hydragraph"
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_layers_that_depend_on_their_depth_get_templates_of_their_own() -> None:
    config = GPT2Config(
        n_embd=64, n_head=4, vocab_size=101, n_layer=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        scale_attn_by_inverse_layer_idx=True,
    )  # fmt: skip
    program = capture(GPT2LMHeadModel(config))
    assert program.blocks[1].template != program.blocks[2].template


def test_a_masked_model_is_not_causal_and_brings_its_labels() -> None:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = randomised(BertForMaskedLM(BertConfig(**tiny(num_hidden_layers=2, **dropout))))
    program = capture(model)
    assert not program.causal
    assert program.blocks[1].template == program.blocks[2].template
    given = batch([4, 7])
    total = torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        logits = model(input_ids=given["input_ids"][:, a:b]).logits[0]
        total = total + F.cross_entropy(logits, given["labels"][0, a:b], reduction="sum", ignore_index=-100)
    torch.testing.assert_close(loss(program, model, given), total, rtol=1e-5, atol=1e-4)


def albert() -> nn.Module:
    sizes = tiny(num_hidden_layers=3, embedding_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return AlbertForMaskedLM(AlbertConfig(**sizes))


def dropping() -> nn.Module:
    model = gpt2(layers=1)
    model.transformer.drop.p = 0.1
    return model


def mistral() -> nn.Module:
    return MistralForCausalLM(MistralConfig(**tiny(num_key_value_heads=2, sliding_window=8)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear: a module that is no Hugging Face model; pass a transformers"),
        (dropping, "transformer.drop: dropout 0.1 in training; set the config's dropout probabilities to 0"),
        (mistral, "MistralAttention: sliding_window=8; set sliding_window to None in the config"),
        (albert, "AlbertForMaskedLM: blocks run in the order ['layer.0', 'layer.0', 'layer.0']"),
    ],
)
def test_a_model_that_would_be_wrong_is_refused(build: object, message: str) -> None:
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}"):
        capture(build())  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match=f"LlamaForCausalLM: dtype {dtype}; use one of torch.float32, torch.bfloat16"):
        capture(llama(layers=1), dtype)


def test_an_example_batch_is_refused() -> None:
    with pytest.raises(Unsupported, match="no Hugging Face model"):
        capture(llama(layers=1), example={})

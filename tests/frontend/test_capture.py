"""Whole captures: the program computes what the model computes, sequence by sequence, or the model is refused."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.packed_inputs import own_fields
from hydragraph.ir.program import Program
from hydragraph.spec.workload import Field
from tests.frontend.execute import batch, loss
from tests.models import MODELS, captured, llama, mixtral, randomised, tiny
from tests.own_models import alone, small, weighted
from tests.thorough import first, only, thorough

FAMILIES = list(MODELS)


@functools.cache
def experts() -> tuple[Program, nn.Module]:
    model = mixtral(num_hidden_layers=1)
    return capture(model), model


@only("gpt2-[2]", "gpt2-[5, 1, 3]", "experts-[5, 1, 3]")
@pytest.mark.parametrize("lengths", [[2], [5, 1, 3], [150, 50]], ids=str)
@pytest.mark.parametrize("name", ["experts", *FAMILIES])
def test_packed_loss_and_gradients_equal_the_models_on_each_sequence_alone(name: str, lengths: list[int]) -> None:
    program, model = experts() if name == "experts" else captured(name)
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


@pytest.mark.parametrize("name", first(["gpt2"], FAMILIES))
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


@thorough
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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: nn.Linear(2, 2),
            "Linear: no repeated blocks were found; pass blocks='path.to.list', the path of an nn.ModuleList (or",
        ),
        pytest.param(
            albert,
            "AlbertForMaskedLM: the model calls its blocks in the order ['layer.0', 'layer.0', 'layer.0']",
            marks=thorough,
        ),
    ],
)
def test_a_model_that_would_be_wrong_is_refused(build: object, message: str) -> None:
    with pytest.raises(Unsupported, match=f"^{re.escape(message)}"):
        capture(build())


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match=f"LlamaForCausalLM: dtype {dtype}; use one of torch.float32, torch.bfloat16"):
        capture(llama(layers=1), dtype)


def classifier(kind: type[nn.Module]) -> nn.Module:
    return randomised(
        kind(LlamaConfig(**tiny(num_hidden_layers=2, num_labels=3, pad_token_id=0, classifier_dropout=0.0)))
    )


def test_outputs_pooled_over_a_packed_row_are_refused() -> None:
    with pytest.raises(
        Unsupported, match=r"LlamaForSequenceClassification: the logits of .*use the ForTokenClassification"
    ):
        capture(classifier(LlamaForSequenceClassification))


def test_a_token_classifier_brings_labels_that_stay_where_they_are() -> None:
    model = classifier(LlamaForTokenClassification)
    program = capture(model)
    assert not program.causal
    given = batch([4, 7], vocab=3)
    total = torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        logits = model(input_ids=given["input_ids"][:, a:b]).logits[0]
        total = total + F.cross_entropy(logits, given["labels"][0, a:b], reduction="sum", ignore_index=-100)
    torch.testing.assert_close(loss(program, model, given), total, rtol=1e-5, atol=1e-4)


def test_positions_that_start_behind_the_padding_id() -> None:
    sizes = tiny(num_hidden_layers=1, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = randomised(RobertaForCausalLM(RobertaConfig(**sizes, pad_token_id=1)))
    given, program = batch([4, 7]), capture(model)
    given["input_ids"] += 2 - given["input_ids"].clamp(max=2)  # a padding id would be no token
    parts = [given["input_ids"][:, a:b] for a, b in pairwise(given["cu_seqlens"].tolist())]
    logits = torch.cat([model(input_ids=p, use_cache=False).logits[0] for p in parts])
    total = F.cross_entropy(logits, given["labels"][0], reduction="sum", ignore_index=-100)
    torch.testing.assert_close(loss(program, model, given), total, rtol=1e-5, atol=1e-4)


def bloom() -> nn.Module:
    dropout: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return BloomForCausalLM(BloomConfig(vocab_size=101, hidden_size=64, n_layer=1, n_head=4, **dropout))


def routed() -> nn.Module:
    sizes = tiny(num_key_value_heads=2, num_local_experts=2, sliding_window=None, output_router_logits=True)
    return MixtralForCausalLM(MixtralConfig(**sizes))


def dropping_by_function() -> nn.Module:
    sizes = tiny(ffn_dim=96, word_embed_proj_dim=64, dropout=0.1)
    del sizes["intermediate_size"]
    return OPTForCausalLM(OPTConfig(**sizes)).train()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (bloom, r"BloomModel: attention scores have distance biases .*ALiBi.*; choose a model with rotary or learned"),
        (routed, r"output_router_logits: the auxiliary router loss is not supported; set output_router_logits=False"),
    ],
)
def test_what_would_be_left_out_is_refused(build: Callable[[], nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(Unsupported, match=message):
        capture(model)


@thorough
def test_dropout_by_function_is_captured() -> None:
    try:
        program = capture(dropping_by_function())
    except Unsupported as error:  # older releases of transformers decide by a random number whether to skip a layer
        assert "remove Python decisions on tensor" in str(error)  # noqa: PT017
    else:
        assert program.drops


@pytest.mark.parametrize(
    "example",
    [
        {"input_ids": torch.zeros(4, dtype=torch.int64)},
        {"labels": torch.zeros(1, 4)},
        {"weight": torch.zeros(4)},
        {"weight": torch.zeros(2, 4)},
        {"no name": torch.zeros(1, 4)},
        {"hidden": torch.zeros(1, 4)},
        {"weight": torch.zeros(1, 4), "labels": torch.zeros(1, 5, dtype=torch.int64)},
    ],
    ids=lambda e: ", ".join(e),
)
def test_an_example_that_fits_no_packed_batch_is_refused(example: dict[str, torch.Tensor]) -> None:
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM: the example's field .*; pass the standard fields"):
        capture(llama(layers=1), example=example)


def test_a_loss_of_ones_own_reads_a_field_of_ones_own() -> None:
    model = randomised(small())
    program = capture(model, loss=weighted, example={"weight": torch.zeros(1, 8), "unused": torch.zeros(1, 8, 3)})
    assert own_fields(program) == {"weight": Field(torch.float32)}
    given = batch([4, 7]) | {"weight": torch.rand(1, 11, generator=torch.Generator().manual_seed(0))}
    total = torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        logits = alone(model, given["input_ids"][0, a:b])
        each = F.cross_entropy(logits, given["labels"][0, a:b], reduction="none", ignore_index=-100)
        total = total + (each * given["weight"][0, a:b]).sum()
    torch.testing.assert_close(loss(program, model, given), total, rtol=1e-5, atol=1e-4)

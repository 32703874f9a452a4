"""The attention function that transformers calls, and what of Hugging Face models is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import (
    AttentionInterface,
    FalconConfig,
    FalconForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.huggingface import (
    ATTENTION,
    attention,
    is_causal,
    is_huggingface,
    refuse_unsupported,
    use_packed_attention,
)
from hydragraph.kernels.varlen_attention import reference
from tests.frontend.execute import batch, loss
from tests.frontend.families import difference
from tests.models import llama, randomised, tiny
from tests.thorough import only, thorough

BOUNDS = torch.tensor([0, 2, 5], dtype=torch.int32)


def test_bounds_that_a_block_does_not_hand_to_its_attention_are_found() -> None:
    torch.manual_seed(0)
    model = randomised(StableLmForCausalLM(StableLmConfig(**tiny(num_key_value_heads=2, num_hidden_layers=1))))
    given, total = batch([5, 1, 3]), torch.zeros(())
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        logits = model(input_ids=given["input_ids"][:, a:b], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits, given["labels"][0, a:b], reduction="sum")
    torch.testing.assert_close(loss(capture(model), model, given), total, rtol=1e-5, atol=1e-4)


def falcon(**changes: Any) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 101}
    return randomised(FalconForCausalLM(FalconConfig(**sizes, **changes)))


@only("changes1")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": False, "parallel_attn": False, "bias": True},
        {"attn_implementation": "eager"},  # whose layers return the probabilities, too
    ],
)
def test_layers_that_call_pytorchs_attention_are_captured(changes: dict[str, Any]) -> None:
    model = falcon(**changes)
    program = capture(model)
    assert program.layers == 1
    assert difference(program, model) is None


def gemma4(**changes: Any) -> nn.Module:
    sizes = {"head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2, "sliding_window": 8}
    plain = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 101}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    return randomised(Gemma4ForCausalLM(Gemma4TextConfig(**tiny(**sizes, **plain | kinds | changes))))


@pytest.mark.parametrize("name", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_values_from_layer_to_layer_are_refused_by_their_setting(name: str) -> None:
    layers = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    with pytest.raises(Unsupported, match=f"{name}=1: layers read .*; choose a model whose config has {name}=0"):
        capture(gemma4(**{name: 1}, **layers))
    refuse_unsupported(gemma4(**layers))


@thorough
def test_gemma_4_without_them_is_captured() -> None:
    model = gemma4()
    assert difference(capture(model), model) is None


@pytest.mark.parametrize(
    "build", [lambda: falcon(alibi=True), lambda: MptForCausalLM(MptConfig(d_model=64, n_layers=1))]
)
def test_biases_of_scores_are_refused(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"), pytest.raises(Unsupported, match=r"ALiBi.*alibi=False"):
        capture(build())


def call(module: nn.Module | None = None, **changes: Any) -> torch.Tensor:
    """Call the attention function on five tokens of four query heads and two key/value heads of size 8."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 5, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    expect_causal = changes.pop("expected", True)
    given: dict[str, Any] = {"attention_mask": None, "scaling": 0.5, "cu_seq_lens_q": BOUNDS} | changes
    out, weights = attention(module or nn.Identity(), q, k, v, **given)
    assert weights is None
    expected = reference(*(x[0].transpose(0, 1) for x in (q, k, v)), BOUNDS, expect_causal, 0.5)  # pyrefly: ignore[bad-argument-count, bad-argument-type]
    torch.testing.assert_close(out, expected[None])
    return out


def test_packed_attention_in_transformers_shapes() -> None:
    assert call(max_length_q=torch.tensor(3)).shape == (1, 5, 4, 8)


def test_who_says_whether_it_is_causal() -> None:
    module = nn.Identity()
    call(module, is_causal=False, expected=False)
    module.is_causal = False  # pyrefly: ignore[bad-argument-type]
    call(module, expected=False)
    call(module, is_causal=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cu_seq_lens_q": None},
            "attention was called without cu_seq_lens_q, so it would mix packed sequences",
        ),
        (
            {"attention_mask": torch.ones(1, 1, 5, 5)},
            "the model passes an attention mask; pack sequences instead of padding them",
        ),
        ({"position_bias": torch.ones(5, 5)}, "the attention takes a tensor 'position_bias'"),
    ],
)
def test_attention_of_other_kinds_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=f"^Identity: {re.escape(message)}"):
        call(**changes)


def test_every_config_is_told_to_use_it() -> None:
    model = llama(layers=1)
    use_packed_attention(model)
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {ATTENTION}


def test_experts_of_a_users_subclass_use_grouped_products() -> None:
    class Mine(MixtralForCausalLM):
        _can_set_experts_implementation_cached_value = False  # as transformers decides for a file of a user

    with torch.device("meta"):
        model = Mine(MixtralConfig(**tiny(num_key_value_heads=2, num_hidden_layers=1, num_local_experts=2)))
    assert model.config._experts_implementation == "eager"
    use_packed_attention(model)
    assert model.config._experts_implementation == "grouped_mm"


def test_what_counts_as_hugging_face() -> None:
    assert is_huggingface(llama(layers=1))
    assert not is_huggingface(nn.Linear(2, 2))

    class Mine(nn.Module):
        config = None

    assert not is_huggingface(Mine())


def test_masked_models_are_not_causal() -> None:
    class BertForMaskedLM(nn.Module): ...

    assert is_causal(llama(layers=1))
    assert not is_causal(BertForMaskedLM())


def test_gradient_checkpointing_is_refused() -> None:
    model = llama(layers=1)
    model.gradient_checkpointing_enable()
    with pytest.raises(
        Unsupported, match=r"LlamaForCausalLM: .*checkpointing; call model.gradient_checkpointing_disable"
    ):
        refuse_unsupported(model)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("T5ForConditionalGeneration", {"num_layers": 1, "d_model": 32}, "encoder-decoder models are not supported"),
        ("ViTForImageClassification", {"num_hidden_layers": 1}, r"it reads pixel_values, but the data are token ids"),
        ("MambaForCausalLM", {"num_hidden_layers": 1, "hidden_size": 32}, r"state-space layers \(Mamba\w+\) are not"),
    ],
)
def test_architectures_that_do_not_suit_packed_token_ids_are_refused(
    name: str, settings: dict[str, int], words: str
) -> None:
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind(kind.config_class(**settings))
    with pytest.raises(Unsupported, match=f"{name}: {words}.* choose a model with one stack of attention layers"):
        refuse_unsupported(model)


def test_the_auxiliary_router_loss_is_refused() -> None:
    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=1,
        num_local_experts=2,
        vocab_size=64,
        output_router_logits=True,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    with pytest.raises(Unsupported, match=r"router loss.*output_router_logits=False"):
        refuse_unsupported(model)


def test_terms_and_losses_that_training_would_ignore_are_refused() -> None:
    model = llama(layers=1)
    model.loss_function = lambda *given, **options: torch.zeros(())  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(Unsupported, match=r"loss_function was replaced.* pass the loss to hydragraph as loss="):
        refuse_unsupported(model)
    refuse_unsupported(model, loss=lambda outputs, batch: outputs.logits.sum())
    model = llama(layers=1)
    model.config.z_loss_coefficient = 0.5  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(Unsupported, match=r"config.z_loss_coefficient: the z-loss .* set z_loss_coefficient=0.0"):
        refuse_unsupported(model)
    del model.config.z_loss_coefficient
    nested = MixtralConfig(output_router_logits=True)
    model.config.get_text_config = lambda: nested  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(
        Unsupported, match=r"config.get_text_config\(\).output_router_logits.* set output_router_logits=False"
    ):
        refuse_unsupported(model)


def test_attention_that_a_user_registered_is_refused() -> None:
    def louder(*given: Any, **options: Any) -> Any:
        return sdpa_attention_forward(*given, **options | {"scaling": 2.0})

    AttentionInterface.register("louder", louder)
    model = llama(layers=1)
    model.config._attn_implementation = "louder"  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM: the attention is 'louder' of tests.frontend"):
        refuse_unsupported(model)
    model.set_attn_implementation("sdpa")
    refuse_unsupported(model)

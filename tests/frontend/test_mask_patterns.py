"""What models say by their masks alone: refused layer by layer, and plain attention left as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    masking_utils,
)

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.huggingface import attention
from hydragraph.frontend.mask_patterns import Marker, mask
from hydragraph.passes.graph_node import operands, varlen
from tests.models import tiny

POSITIONS = torch.tensor([[0, 1, 0, 1, 2]])


def llama4(**changes: Any) -> nn.Module:
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2}
    dense = {"num_experts_per_tok": 1, "moe_layers": [], "pad_token_id": 0, "attention_chunk_size": 8}
    return Llama4ForCausalLM(Llama4TextConfig(**tiny(**sizes, **dense, **changes)))


def qwen2_moe(**changes: Any) -> nn.Module:
    sizes = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**tiny(**sizes, shared_expert_intermediate_size=32, **changes)))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (llama4, "Llama4TextAttention of layer 0: chunks of 8, .*; choose a model whose layers attend to all"),
        (
            lambda: llama4(layer_types=["full_attention", "chunked_attention"]),
            "Llama4TextAttention of layer 1: chunks of 8, which its mask asks for",
        ),
        (
            lambda: qwen2_moe(use_sliding_window=True, sliding_window=8, max_window_layers=2),
            "Qwen2MoeAttention of layer 0: a sliding window of 8, .*use_sliding_window to False",
        ),
    ],
)
def test_what_only_the_mask_says_is_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        capture(build())


@pytest.mark.parametrize("build", [lambda: llama4(layer_types=["full_attention"] * 2), qwen2_moe])
def test_the_remedies_help(build: Callable[[], nn.Module]) -> None:
    assert capture(build()).causal


def test_models_that_look_both_ways_by_their_config_do() -> None:
    program = capture(LlamaForCausalLM(LlamaConfig(**tiny(is_causal=False))))
    calls = [n for t in program.templates.values() for n in t.graph.graph.nodes if n.target is varlen]
    assert not any(operands(n)[5] for n in calls)


def packed(pattern: Callable[..., Any]) -> Callable[..., Any]:
    together = masking_utils.packed_sequence_mask_function(POSITIONS)
    return masking_utils.and_masks(together, masking_utils.add_offsets_to_mask_function(pattern, 0, 0))


CAUSAL, BOTH = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function


@pytest.mark.parametrize("pattern", [CAUSAL, BOTH, packed(CAUSAL)])
def test_plain_patterns_need_no_mask(pattern: Callable[..., Any]) -> None:
    assert mask(mask_function=pattern) is None


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        (masking_utils.sliding_window_causal_mask_function(8), "a sliding window of 8"),
        (packed(masking_utils.sliding_window_causal_mask_function(8)), "a sliding window of 8"),
        (masking_utils.chunked_causal_mask_function(6, torch.zeros(1)), "chunks of 6"),
        (masking_utils.or_masks(CAUSAL, BOTH), r"a pattern of its own \(or_masks\)"),
        (masking_utils.and_masks(CAUSAL, lambda *_: True), r"a pattern of its own \(<lambda>\)"),
        (masking_utils.and_masks(CAUSAL, max), r"a pattern of its own \(max\)"),
    ],
)
def test_other_patterns_are_named(pattern: Callable[..., Any], kind: str) -> None:
    marker = mask(mask_function=pattern)
    assert marker is not None
    with pytest.raises(Unsupported, match=f"^here: {kind}, which its mask asks for; "):
        marker.refuse("here")


def test_a_models_own_padding_mask_is_refused() -> None:
    marker = mask(mask_function=CAUSAL, attention_mask=torch.ones(1, 5))
    assert marker is not None
    assert marker.kind == "a padding mask"


@pytest.mark.parametrize("use", [lambda m: m[:, 0], lambda m: m.shape, lambda m: m.to(torch.bool)])
def test_a_marker_can_only_be_handed_on(use: Callable[[Marker], Any]) -> None:
    marker = Marker("chunks of 8", "none")
    assert repr(marker) == repr(Marker("chunks of 8", "none"))
    with pytest.raises(Unsupported, match="chunks of 8"):
        use(marker)


def test_both_directions_are_refused_only_by_attention_that_looks_back() -> None:
    both, given = Marker("both directions", "none", both_ways=True), torch.zeros(1, 2, 5, 8)
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    attention(nn.Identity(), given, given, given, both, is_causal=False, cu_seq_lens_q=bounds)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="both directions"):
        attention(nn.Identity(), given, given, given, both, is_causal=True, cu_seq_lens_q=bounds)  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(masking_utils, "blockwise_overlay"), reason="this transformers has no such masks")
def test_masks_that_hide_nothing_are_none() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ones, none = torch.ones(x.shape), torch.full(x.shape, -1)
            blocks, vision = masking_utils.blockwise_overlay(none), masking_utils.blockwise_overlay(x.long())
            found.append(mask(mask_function=CAUSAL, attention_mask=ones.to(torch.bool)))
            found.append(mask(mask_function=masking_utils.or_masks(CAUSAL, blocks)))
            found.append(mask(mask_function=CAUSAL, attention_mask=x.ne(0)))
            found.append(mask(mask_function=masking_utils.or_masks(CAUSAL, vision)))
            return x

    found: list[Marker | None] = []
    torch.export.export(Masked(), (torch.zeros(1, 5),), strict=False)
    assert [None if one is None else one.kind for one in found] == [
        *(None, None, "a padding mask", "a pattern of its own (or_masks)")
    ]


def test_a_window_that_no_sequence_exceeds_is_plain_attention() -> None:
    for changes in ({}, {"layer_types": ["sliding_attention", "full_attention"]}):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
        name = "gemma3_text" if changes else "mistral"
        config = AutoConfig.for_model(
            name,
            **sizes,
            **changes,
            num_hidden_layers=2,
            vocab_size=64,
            head_dim=16,
            sliding_window=256,
            pad_token_id=0,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        data = [torch.arange(3, 43), torch.arange(20, 60)]
        with torch.no_grad():
            losses = [F.cross_entropy(model(input_ids=s[None]).logits[0, :-1], s[1:]) for s in data]
        exe = hg.compile(model, "<[0]x2>", lambda n: torch.optim.SGD(n, lr=0.1))
        assert exe.evaluate(data).loss == pytest.approx(float(sum(losses) / 2), rel=1e-5)
        with pytest.raises(ValueError, match=r"300 tokens, and the model.*window.*256.*cut"):
            exe.evaluate([torch.arange(300) % 60])
        exe.close()

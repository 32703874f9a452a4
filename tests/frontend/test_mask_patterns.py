"""What models say by their masks alone: refused layer by layer, and plain attention left as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
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

from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.frontend.huggingface import attention, refuse_own_mixing
from hydragraph.frontend.mask_patterns import MaskPlaceholder, is_causal, mask
from hydragraph.ir.program import Program
from hydragraph.kernels.attention_settings import AttentionSettings, visible
from hydragraph.passes.graph_node import operands, varlen
from tests.frontend.execute import batch, loss
from tests.models import tiny
from tests.thorough import only, thorough

POSITIONS = torch.tensor([[0, 1, 0, 1, 2]])


def llama4(**changes: Any) -> nn.Module:
    sizes = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2}
    dense = {"num_experts_per_tok": 1, "moe_layers": [], "pad_token_id": 0, "attention_chunk_size": 8}
    return Llama4ForCausalLM(Llama4TextConfig(**tiny(**sizes, **dense, **changes)))


def qwen2_moe(**changes: Any) -> nn.Module:
    sizes = {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**tiny(**sizes, shared_expert_intermediate_size=32, **changes)))


def calls(program: Program) -> list[tuple[Any, ...]]:
    """Return window, chunk and cap of each layer's attention, in order."""
    kinds = {name: [n for n in t.graph.graph.nodes if n.target is varlen] for name, t in program.templates.items()}
    nodes = [n for block in program.blocks for n in kinds[block.template]]
    return [(*operands(n)[7:10], None, None, None)[:3] for n in nodes]


@thorough
def test_windows_of_single_layers_are_captured() -> None:
    program = capture(qwen2_moe(use_sliding_window=True, sliding_window=8, max_window_layers=1))
    assert calls(program) == [(8, None, None), (None, None, None)]


@thorough
@pytest.mark.parametrize("build", [lambda: llama4(layer_types=["full_attention"], num_hidden_layers=1), qwen2_moe])
def test_the_remedies_help(build: Callable[[], nn.Module]) -> None:
    assert capture(build()).causal


@functools.cache
def both_ways() -> tuple[Program, nn.Module]:
    model = LlamaForCausalLM(LlamaConfig(**tiny(is_causal=False, num_hidden_layers=1)))
    return capture(model), model


def test_models_that_look_both_ways_by_their_config_do() -> None:
    program, _ = both_ways()
    calls = [n for t in program.templates.values() for n in t.graph.graph.nodes if n.target is varlen]
    assert not any(operands(n)[5] for n in calls)


@pytest.mark.parametrize(("patterns", "causal"), [([], False), (["both"], False), (["causal"], True)])
def test_a_causal_mask_makes_a_layer_causal_that_does_not_say_so(patterns: list[str], causal: bool) -> None:
    layer = nn.Module()
    layer.is_causal, layer.config = False, LlamaConfig()  # pyrefly: ignore[bad-argument-type]
    for pattern in patterns:
        assert mask(mask_function={"both": BOTH, "causal": CAUSAL}[pattern], config=layer.config) is None
    assert is_causal(layer) is causal
    assert is_causal(nn.Module())
    mask(mask_function=CAUSAL, config=layer.config)
    mask(mask_function=BOTH, config=layer.config)
    with pytest.raises(Unsupported, match="the model makes causal and other masks"):
        is_causal(layer)


def test_attention_against_the_direction_of_all_masks_is_refused() -> None:
    program, model = both_ways()
    layers = {block.name: program.templates[block.template] for block in program.blocks[1:-1]}
    refuse_own_mixing(model, layers)
    mask(mask_function=CAUSAL, config=model.config)
    with pytest.raises(
        Unsupported, match=r"layer.0: the layer attends in both directions, but the model makes only causal"
    ):
        refuse_own_mixing(model, layers)


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
        (masking_utils.or_masks(CAUSAL, BOTH), r"a custom pattern \(or_masks\)"),
        (masking_utils.and_masks(CAUSAL, lambda *_: True), r"a custom pattern \(<lambda>\)"),
        (masking_utils.and_masks(CAUSAL, max), r"a custom pattern \(max\)"),
    ],
)
def test_other_patterns_are_named(pattern: Callable[..., Any], kind: str) -> None:
    marker = mask(mask_function=pattern)
    assert marker is not None
    with pytest.raises(Unsupported, match=f"^here: packed attention does not support the mask: {kind}; "):
        marker.refuse("here")


WINDOW = masking_utils.sliding_window_causal_mask_function(8)
WINDOW_BOTH = masking_utils.sliding_window_bidirectional_mask_function(8)
CHUNKS = masking_utils.chunked_causal_mask_function(6, torch.zeros(1))


@pytest.mark.parametrize(
    ("pattern", "window", "chunk", "causal"),
    [
        (WINDOW, 8, None, True),
        (packed(WINDOW), 8, None, True),
        (WINDOW_BOTH, 9, None, False),  # transformers includes the distance that it names
        (CHUNKS, None, 6, True),
        (masking_utils.and_masks(WINDOW, CHUNKS), 8, 6, True),
    ],
)
def test_windows_and_chunks_are_supported_in_their_direction(
    pattern: Callable[..., Any], window: int | None, chunk: int | None, causal: bool
) -> None:
    marker = mask(mask_function=pattern)
    assert marker is not None
    assert (marker.window, marker.chunk) == (window, chunk)
    assert marker.supported(causal)
    assert not marker.supported(not causal)


@pytest.mark.parametrize("pattern", [WINDOW, CHUNKS])
def test_the_pattern_is_the_one_of_transformers(pattern: Callable[..., Any]) -> None:
    marker, places = mask(mask_function=pattern), torch.arange(15)
    assert marker is not None
    expected = torch.tensor([[bool(pattern(0, 0, i, j)) for j in places] for i in places])
    found = visible(places, places, AttentionSettings(True, 1.0, marker.window))
    if marker.chunk is not None:
        found &= places[:, None] // marker.chunk == places // marker.chunk
    assert torch.equal(found, expected)


def test_a_models_own_padding_mask_is_refused() -> None:
    marker = mask(mask_function=CAUSAL, attention_mask=torch.ones(1, 5))
    assert marker is not None
    assert marker.kind == "a padding mask"


@pytest.mark.parametrize("use", [lambda m: m[:, 0], lambda m: m.shape, lambda m: m.to(torch.bool)])
def test_a_marker_can_only_be_handed_on(use: Callable[[MaskPlaceholder], Any]) -> None:
    marker = MaskPlaceholder("chunks of 8", "none")
    assert repr(marker) == repr(MaskPlaceholder("chunks of 8", "none"))
    with pytest.raises(Unsupported, match="chunks of 8"):
        use(marker)


def test_both_directions_are_refused_only_by_attention_that_looks_back() -> None:
    both, given = MaskPlaceholder("both directions", "none", both_ways=True), torch.zeros(1, 2, 5, 8)
    bounds = torch.tensor([0, 5], dtype=torch.int32)
    attention(nn.Identity(), given, given, given, both, is_causal=False, cu_seq_lens_q=bounds)
    with pytest.raises(Unsupported, match="both directions"):
        attention(nn.Identity(), given, given, given, both, is_causal=True, cu_seq_lens_q=bounds)


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

    found: list[MaskPlaceholder | None] = []
    torch.export.export(Masked(), (torch.zeros(1, 5),), strict=False)
    assert [None if one is None else one.kind for one in found] == [
        *(None, None, "a padding mask", "a custom pattern (or_masks)")
    ]


LLAMA4 = {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": []}


@only("gemma2", "llama4_text")
@pytest.mark.parametrize(
    "changes",
    [
        {"name": "mistral"},
        {"name": "gemma2", "num_hidden_layers": 1, "attn_logit_softcapping": 0.5},
        {"name": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
        {"name": "llama4_text", "no_rope_layers": [1, 0], "floor_scale": 4, **LLAMA4},
    ],
    ids=lambda changes: changes["name"],
)
def test_sequences_below_at_and_beyond_the_window_equal_the_model(changes: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    name = changes.pop("name")
    settings = {"num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16, "sliding_window": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **sizes, **settings | changes), dtype=torch.float32
    ).eval()
    given = batch([4, 8, 9, 50], vocab=60)
    given["input_ids"] += 3
    given["labels"] += 3 * (given["labels"] != -100)
    with torch.no_grad():
        total = torch.zeros(())
        for a, b in pairwise(given["cu_seqlens"].tolist()):
            logits = model(input_ids=given["input_ids"][:, a:b]).logits[0]
            total = total + F.cross_entropy(logits, given["labels"][0, a:b], reduction="sum")
        found = loss(capture(model), model, given)
    torch.testing.assert_close(found, total, rtol=1e-5, atol=0)

"""Where tensor parallelism may cut: small graphs by hand, and the rules of whole model families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hydragraph.ir.parameter import ShardRule
from hydragraph.kernels.varlen_attention import varlen_attention
from hydragraph.passes.find_cuts import find_cuts, rules
from hydragraph.passes.tensor_cut import Cuts
from tests.frontend.test_capture import FAMILIES
from tests.models import captured
from tests.thorough import first

HEADS = ShardRule(0, (4,), 16, heads=True)
KV_HEADS = ShardRule(0, (2,), 16, heads=True)
HEADS_IN = ShardRule(1, (4,), 16, heads=True)
VOCABULARY = ShardRule(0, (101,))
WIDTH, WIDTH_IN = ShardRule(0, (102,)), ShardRule(1, (102,))
GATED = {"mlp.gate_proj.weight": WIDTH, "mlp.up_proj.weight": WIDTH, "mlp.down_proj.weight": WIDTH_IN}
SEPARATE = {
    "self_attn.q_proj.weight": HEADS,
    "self_attn.k_proj.weight": KV_HEADS,
    "self_attn.v_proj.weight": KV_HEADS,
    "self_attn.o_proj.weight": HEADS_IN,
}
UNTIED = {"model.embed_tokens.weight": VOCABULARY, "lm_head.weight": VOCABULARY}
EXPECTED: dict[str, tuple[dict[str, ShardRule], dict[str, ShardRule]]] = {  # per layer, and outside the layers
    "llama": (SEPARATE | GATED, UNTIED),
    "gpt2": (  # its embedding sees the ids through a view
        {
            "attn.c_attn.weight": ShardRule(1, (4, 4, 4), 16, heads=True),
            "attn.c_attn.bias": ShardRule(0, (4, 4, 4), 16, heads=True),
            "attn.c_proj.weight": ShardRule(0, (4,), 16, heads=True),
            "mlp.c_fc.weight": ShardRule(1, (256,)),
            "mlp.c_fc.bias": ShardRule(0, (256,)),
            "mlp.c_proj.weight": ShardRule(0, (256,)),
        },
        {"transformer.wte.weight": VOCABULARY},
    ),
    "phi3": (
        {
            "self_attn.qkv_proj.weight": ShardRule(0, (4, 2, 2), 16, heads=True),
            "self_attn.o_proj.weight": HEADS_IN,
            "mlp.gate_up_proj.weight": ShardRule(0, (102, 102)),
            "mlp.down_proj.weight": WIDTH_IN,
        },
        UNTIED,
    ),
    "gpt_neox": (
        {
            "attention.query_key_value.weight": ShardRule(0, (4,), 48, heads=True),
            "attention.query_key_value.bias": ShardRule(0, (4,), 48, heads=True),
            "attention.dense.weight": HEADS_IN,
            "mlp.dense_h_to_4h.weight": WIDTH,
            "mlp.dense_h_to_4h.bias": WIDTH,
            "mlp.dense_4h_to_h.weight": WIDTH_IN,
        },
        {"gpt_neox.embed_in.weight": VOCABULARY, "lm_head.weight": VOCABULARY},
    ),
    "qwen3": (SEPARATE | GATED, UNTIED),  # the per-head norms are used whole by every rank
    "opt": (
        {
            **{f"self_attn.{name}_proj.{kind}": HEADS for name in "qkv" for kind in ("weight", "bias")},
            "self_attn.out_proj.weight": HEADS_IN,
            "fc1.weight": WIDTH,
            "fc1.bias": WIDTH,
            "fc2.weight": WIDTH_IN,
        },
        {"model.decoder.embed_tokens.weight": VOCABULARY},
    ),
    "gemma": (
        SEPARATE | GATED | {f"self_attn.{n}_proj.weight": ShardRule(0, (1,), 16, heads=True) for n in "kv"},
        {"model.embed_tokens.weight": VOCABULARY},
    ),
    "qwen2": (
        SEPARATE | GATED | {"self_attn.q_proj.bias": HEADS} | {f"self_attn.{n}_proj.bias": KV_HEADS for n in "kv"},
        UNTIED,
    ),
    "mistral": (SEPARATE | GATED, UNTIED),
    "phi": (
        {
            **{f"self_attn.{name}_proj.{kind}": HEADS for name in "qkv" for kind in ("weight", "bias")},
            "self_attn.dense.weight": HEADS_IN,
            "mlp.fc1.weight": WIDTH,
            "mlp.fc1.bias": WIDTH,
            "mlp.fc2.weight": WIDTH_IN,
        },
        UNTIED | {"lm_head.bias": VOCABULARY},
    ),
    "granite": (SEPARATE | GATED, UNTIED),
    "mixtral": (
        SEPARATE
        | {
            "mlp.experts.gate_up_proj": ShardRule(1, (96, 96)),
            "mlp.experts.down_proj": ShardRule(2, (96,)),
        },
        UNTIED,
    ),
}


@pytest.mark.parametrize("name", first(("llama", "gpt2", "phi", "mixtral"), FAMILIES))
def test_the_rules_of_model_families(name: str) -> None:
    program, _ = captured(name)
    layer, outside = EXPECTED[name]
    expected = dict(outside)
    for block in program.blocks[1:-1]:
        template = program.templates[block.template]
        local = dict(zip(template.parameters, block.parameters, strict=True))
        expected |= {local[suffix]: rule for suffix, rule in layer.items()}
    assert {n: p.rule for n, p in program.parameters.items() if p.rule is not None} == expected


def analysed(
    forward: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    tokens: bool = False,
    excluded: frozenset[str] = frozenset(),
) -> tuple[Cuts, dict[str, ShardRule]]:
    """Find the cuts of `forward(x, *weights)`; the rules come by the weights' placeholders (x_1, w_1, ...)."""
    first = torch.zeros(shapes[0], dtype=torch.int64) if tokens else torch.zeros(shapes[0])
    graph = make_fx(forward, tracing_mode="fake", pre_dispatch=True)(first, *map(torch.zeros, shapes[1:])).graph
    x, *weights = [n for n in graph.nodes if n.op == "placeholder"]
    found = find_cuts(graph, set(weights), x if tokens else None, set(excluded))
    return found, {node.name: rule for node, rule in rules(found).items()}


def test_two_products_are_columns_then_rows() -> None:
    def mlp(x: Tensor, a: Tensor, bias: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, a, bias)), b)

    found, rule = analysed(mlp, (5, 32), (48, 32), (48,), (32, 48))
    assert rule == {"a_1": ShardRule(0, (48,)), "bias_1": ShardRule(0, (48,)), "b_1": ShardRule(1, (48,))}
    assert (len(found.columns), len(found.rows)) == (1, 1)


def test_transposed_weights_are_cut_along_the_other_dimension() -> None:
    def mlp(x: Tensor, a: Tensor, bias: Tensor, b: Tensor) -> Tensor:
        return torch.mm(torch.addmm(bias, x, a).relu(), b)

    assert analysed(mlp, (5, 32), (32, 48), (48,), (48, 32))[1] == {
        "a_1": ShardRule(1, (48,)),
        "bias_1": ShardRule(0, (48,)),
        "b_1": ShardRule(0, (48,)),
    }


def test_a_fused_product_has_a_segment_per_part() -> None:
    def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        gate, up = F.linear(x, a).split([40, 40], dim=-1)
        return F.linear(F.silu(gate) * up, b)

    assert analysed(gated, (5, 32), (80, 32), (32, 40))[1] == {
        "a_1": ShardRule(0, (40, 40)),
        "b_1": ShardRule(1, (40,)),
    }


def test_a_split_of_a_gated_product_splits_both_parts() -> None:
    def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        gate, up = F.linear(x, a).chunk(2, dim=-1)
        first, second = (F.silu(gate) * up).chunk(2, dim=-1)
        return F.linear(first * second, b)

    assert analysed(gated, (5, 32), (80, 32), (32, 20))[1] == {
        "a_1": ShardRule(0, (20, 20, 20, 20)),
        "b_1": ShardRule(1, (20,)),
    }


def test_a_product_that_reads_several_parts_has_their_segments() -> None:
    def both(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = F.linear(x, a)
        first, second = y.chunk(2, dim=-1)
        return F.linear(y.relu(), b) + F.linear(first * second, c)

    assert analysed(both, (5, 32), (80, 32), (32, 80), (32, 40))[1] == {
        "a_1": ShardRule(0, (40, 40)),
        "b_1": ShardRule(1, (40, 40)),
        "c_1": ShardRule(1, (40,)),
    }


def test_a_split_of_heads_that_share_keys_keeps_them_whole() -> None:
    def halves(x: Tensor, q: Tensor, k: Tensor, v: Tensor, b: Tensor, c: Tensor) -> Tensor:
        bounds = torch.tensor([0, 6], dtype=torch.int32)
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, 16)) for w in (q, k, v))
        first, second = varlen_attention(q, k, v, bounds).chunk(2, dim=1)
        return F.linear(first.flatten(1), b) + F.linear(second.flatten(1), c)

    assert analysed(halves, (6, 64), (64, 64), (32, 64), (32, 64), (64, 32), (64, 32))[1] == {}
    assert analysed(halves, (6, 64), (64, 64), (64, 64), (64, 64), (64, 32), (64, 32))[1] != {}


def test_a_value_that_takes_only_the_dtype_of_a_cut_one_is_whole() -> None:
    def typed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, a).relu()
        return F.linear(y, b) + torch.ops.aten.type_as.default(x, y)

    assert set(analysed(typed, (5, 32), (48, 32), (32, 48))[1]) == {"a_1", "b_1"}


def test_units_of_several_sizes_stay_together() -> None:
    def pooled(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        y = F.linear(x, a)
        first, second = (y.unflatten(-1, (-1, size)).amax(-1) for size in (16, 24))
        return F.linear(first, b) + F.linear(second, c)

    assert analysed(pooled, (5, 32), (768, 32), (32, 48), (32, 32))[1] == {
        "a_1": ShardRule(0, (16,), 48),
        "b_1": ShardRule(1, (16,), 3),
        "c_1": ShardRule(1, (16,), 2),
    }
    assert analysed(pooled, (5, 32), (384, 32), (32, 24), (32, 16))[1] == {}


@pytest.mark.parametrize("dim", [0, 1])
def test_squeezing_a_dimension_that_is_not_one_changes_nothing(dim: int) -> None:
    def squeezed(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(torch.ops.aten.squeeze.dim(F.linear(x, a), dim), b)

    assert set(analysed(squeezed, (5, 32), (48, 32), (32, 48))[1]) == {"a_1", "b_1"}


def test_parts_that_alternate_stay_together() -> None:
    def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = F.linear(x, a)
        return F.linear(F.silu(y[:, ::2]) * y[:, 1::2], b)

    assert analysed(gated, (5, 32), (80, 32), (32, 40))[1] == {
        "a_1": ShardRule(0, (40,), 2),
        "b_1": ShardRule(1, (40,)),
    }
    uneven = lambda x, a, b: F.linear(F.linear(x, a)[:, ::3], b)  # noqa: E731
    assert analysed(uneven, (5, 32), (80, 32), (32, 27))[1] == {}


def experts(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """Choose rows, multiply them by their experts' matrices, and add biases of the experts between."""
    ends = torch.tensor([2, 5], dtype=torch.int32)
    mine = torch.tensor([0, 0, 1, 1, 1])
    grouped = torch.ops.transformers.grouped_mm_fallback
    y = grouped(x, up, ends) + bias[mine]
    return grouped(y.relu(), down.transpose(-2, -1), ends)


def test_experts_are_cut_with_their_biases() -> None:
    shapes = ((5, 32), (2, 32, 48), (2, 48), (2, 32, 48))
    assert analysed(experts, *shapes)[1] == {
        "up_1": ShardRule(2, (48,)),
        "bias_1": ShardRule(1, (48,)),
        "down_1": ShardRule(2, (48,)),
    }
    # A part that stays whole keeps all of them whole.
    for name in ("up_1", "bias_1", "down_1"):
        assert analysed(experts, *shapes, excluded=frozenset({name}))[1] == {}


def test_a_bias_that_each_token_chooses_is_cut_like_the_values_that_it_meets() -> None:
    def chosen(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        rows = torch.tensor([[0, 2, 1, 1, 0]])
        return F.linear(F.linear(x, up)[None] + bias[rows], down)

    assert analysed(chosen, (5, 32), (48, 32), (3, 48), (32, 48))[1] == {
        "up_1": ShardRule(0, (48,)),
        "bias_1": ShardRule(1, (48,)),
        "down_1": ShardRule(1, (48,)),
    }


def test_experts_of_copied_tokens_are_cut_by_their_width() -> None:
    def copied(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, y = torch.bmm(x.repeat(3, 1).view(3, -1, 32), up).chunk(2, -1)
        return torch.bmm(gate.relu() * y, down).sum(0)

    shapes = ((5, 32), (3, 32, 96), (3, 48, 32))
    assert analysed(copied, *shapes)[1] == {"up_1": ShardRule(2, (48, 48)), "down_1": ShardRule(1, (48,))}


def test_parameters_that_a_cut_value_meets_one_to_one_are_cut_alike() -> None:
    def scaled(x: Tensor, a: Tensor, s: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.linear(x, a) * s.exp().neg(), b)

    shapes = ((5, 32), (48, 32), (48,), (32, 48))
    assert analysed(scaled, *shapes)[1] == {
        "a_1": ShardRule(0, (48,)),
        "s_1": ShardRule(0, (48,)),
        "b_1": ShardRule(1, (48,)),
    }
    assert analysed(scaled, *shapes, excluded=frozenset({"s_1"}))[1] == {}
    twice = lambda x, a, s, b: F.linear(F.linear(x, a) * s, b) + s.sum()  # noqa: E731
    assert analysed(twice, *shapes)[1] == {}
    reshaped = lambda x, a, s, b: F.linear(F.linear(x, a) * s.view(48), b)  # noqa: E731
    assert analysed(reshaped, (5, 32), (48, 32), (6, 8), (32, 48))[1] == {}


@pytest.mark.parametrize(
    ("scale", "rule"),
    [
        ((1, 16, 1, 1), ShardRule(1, (16,))),
        ((16, 1, 1), ShardRule(0, (16,))),
        ((16, 1, 4), ShardRule(0, (16,))),
        ((1, 1, 4), None),  # all heads share it
        ((1,), None),
    ],
)
def test_scales_of_heads_are_cut_with_them(scale: tuple[int, ...], rule: ShardRule | None) -> None:
    def scaled(x: Tensor, a: Tensor, s: Tensor, b: Tensor) -> Tensor:
        heads = F.linear(x, a).view(1, 5, 16, 4).transpose(1, 2) * s.tanh()
        return F.linear(heads.transpose(1, 2).reshape(1, 5, 64), b)

    found = analysed(scaled, (1, 5, 32), (64, 32), scale, (32, 64))[1]
    assert found.get("s_1") == rule


def linear_attention(
    x: Tensor, qkv: Tensor, taps: Tensor, a: Tensor, start: Tensor, b: Tensor, z: Tensor, norm: Tensor, out: Tensor
) -> Tensor:
    """Compute linear attention with 2 key and 4 value heads of 8, as Qwen3.5 does; x is [1, T, 32]."""
    tokens, bounds = x.shape[1], torch.tensor([0, 3, 5], dtype=torch.int32)
    mixed = torch.ops.hydragraph.causal_convolution(F.linear(x, qkv).flatten(0, 1), taps.squeeze(1), None, bounds)
    q, k, v = F.silu(mixed)[None].split([16, 16, 32], -1)
    q, k, v = (each.reshape(tokens, -1, 8) for each in (q, k, v))
    rates = F.softplus(F.linear(x, a) + start).flatten(0, 1)
    y = torch.ops.hydragraph.gated_delta_rule(q, k, v, bounds, -rates, F.linear(x, b).sigmoid().flatten(0, 1))
    y = y.reshape(1, tokens, 4, 8)
    rows = y.reshape(-1, 8)  # of tokens and heads
    rows = (
        norm
        * rows
        * rows.pow(2).mean(-1, keepdim=True).rsqrt()
        * F.silu(F.linear(x, z).reshape(y.shape).reshape(-1, 8))
    )
    return F.linear(rows.reshape(1, tokens, -1), out)


def test_linear_attention_is_cut_by_value_heads() -> None:
    shapes = ((1, 5, 32), (64, 32), (64, 1, 4), (4, 32), (4,), (4, 32), (32, 32), (8,), (32, 32))
    assert analysed(linear_attention, *shapes)[1] == {
        "qkv_1": ShardRule(0, (2, 2, 4), 8, heads=True),
        "taps_1": ShardRule(0, (2, 2, 4), 8, heads=True),
        "a_1": ShardRule(0, (4,), heads=True),
        "start_1": ShardRule(0, (4,), heads=True),
        "b_1": ShardRule(0, (4,), heads=True),
        "z_1": ShardRule(0, (4,), 8, heads=True),
        "out_1": ShardRule(1, (4,), 8, heads=True),
    }
    # The heads' norm stays whole; taps that stay whole keep all of it whole.
    assert analysed(linear_attention, *shapes, excluded=frozenset({"taps_1"}))[1] == {}


def test_values_joined_along_their_cut_are_convolved_and_split_again() -> None:
    def joined(x: Tensor, q: Tensor, v: Tensor, taps: Tensor, b: Tensor) -> Tensor:
        bounds = torch.tensor([0, 3, 5], dtype=torch.int32)
        both = torch.cat([F.linear(x, q), F.linear(x, v)], -1)
        one, other = torch.ops.hydragraph.causal_convolution(both, taps, None, bounds).split([48, 48], -1)
        return F.linear(one * other, b)

    shapes = ((5, 32), (48, 32), (48, 32), (96, 4), (32, 48))
    assert analysed(joined, *shapes)[1] == {
        "q_1": ShardRule(0, (48,)),
        "v_1": ShardRule(0, (48,)),
        "taps_1": ShardRule(0, (48, 48), heads=True),
        "b_1": ShardRule(1, (48,)),
    }
    assert analysed(joined, *shapes, excluded=frozenset({"taps_1"}))[1] == {}
    # Added up before they are split, the parts of a rank would not belong together.
    mixed = lambda x, q, v, taps, b: F.linear(torch.cat([F.linear(x, q), F.linear(x, v)], -1).relu(), b)  # noqa: E731
    assert analysed(mixed, (5, 32), (48, 32), (48, 32), (96, 4), (32, 96))[1] == {}


def test_pairs_of_numbers_are_complex_numbers_of_the_same_heads() -> None:
    def rotated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        pairs = F.linear(x, a).view(5, 16, 2, 2)
        return F.linear(torch.view_as_real(torch.view_as_complex(pairs) * 1j).reshape(5, 64), b)

    assert analysed(rotated, (5, 32), (64, 32), (32, 64))[1] == {
        "a_1": ShardRule(0, (16,), 4),
        "b_1": ShardRule(1, (16,), 4),
    }


def test_operators_without_a_tag_that_treat_each_element_alone_stay_cut() -> None:
    def gated(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        u = F.linear(x, a)
        waves = torch.polar(u.exp(), u)
        return F.linear(torch.where((u > 0) | (u < -1), waves.real, waves.imag), b)

    assert analysed(gated, (5, 32), (64, 32), (32, 64))[1] == {"a_1": ShardRule(0, (64,)), "b_1": ShardRule(1, (64,))}


@pytest.mark.parametrize(
    "between",
    [
        lambda y: y.view(5, 4, 12).reshape(20, 12).transpose(0, 1).reshape(5, 48),
        lambda y: y.topk(48, -1)[0],
        lambda y: y.sort(-1)[0],
        lambda y: y.softmax(-1),
        lambda y: F.layer_norm(y, (48,)),
        lambda y: y.cumsum(-1),
        lambda y: y.flip(-1),
        lambda y: y * torch.ones(48),
        lambda y: y.sum(-1, keepdim=True).expand(5, 48),
        lambda y: y.view(5, 4, 12).transpose(1, 2).reshape(5, 48),
        lambda y: torch.cat([y[:, 24:], y[:, :24]], -1),
    ],
)
def test_an_operator_that_needs_the_whole_dimension_keeps_it_whole(between: Callable[[Tensor], Tensor]) -> None:
    found, rule = analysed(lambda x, a, b: F.linear(between(F.linear(x, a)), b), (5, 32), (48, 32), (32, 48))
    assert rule == {}
    assert not found.cut


def test_what_nothing_adds_up_or_is_too_narrow_stays_whole() -> None:
    assert analysed(lambda x, a: F.linear(x, a), (5, 32), (48, 32))[1] == {}
    assert analysed(lambda x, a, b: F.linear(F.linear(x, a), b), (5, 32), (8, 32), (32, 8))[1] == {}
    assert analysed(lambda x, a, b: F.linear(F.linear(x, a), b), (5, 32), (16, 32), (32, 16))[1] != {}


def test_an_excluded_parameter_keeps_its_partners_whole() -> None:
    def mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.linear(x, a), b)

    assert set(analysed(mlp, (5, 32), (48, 32), (32, 48))[1]) == {"a_1", "b_1"}
    for name in ("a_1", "b_1"):
        assert analysed(mlp, (5, 32), (48, 32), (32, 48), excluded=frozenset({name}))[1] == {}


def test_an_embedding_is_cut_along_the_vocabulary_only_for_tokens() -> None:
    def embed(x: Tensor, a: Tensor) -> Tensor:
        return F.embedding(x, a)

    assert analysed(embed, (1, 5), (100, 32), tokens=True)[1] == {"a_1": ShardRule(0, (100,))}
    through_a_view = analysed(lambda x, a: F.embedding(x.view(-1), a), (1, 5), (100, 32), tokens=True)
    assert through_a_view[1] == {"a_1": ShardRule(0, (100,))}
    assert analysed(lambda x, a: F.embedding(x + 1, a), (1, 5), (100, 32), tokens=True)[1] == {}


@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({"reduction": "sum"}, True),
        ({"reduction": "mean"}, True),
        ({"reduction": "none"}, True),
        ({"reduction": "sum", "label_smoothing": 0.1}, True),
        ({"reduction": "sum", "ignore_index": 3}, True),
    ],
)
def test_a_loss_of_cut_logits(options: dict[str, Any], cut: bool) -> None:
    def loss(x: Tensor, a: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, a), torch.zeros(5, dtype=torch.int64), **options)

    assert analysed(loss, (5, 32), (100, 32))[1] == ({"a_1": ShardRule(0, (100,))} if cut else {})


def test_attention_is_cut_by_heads() -> None:
    def attend(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        parts = (F.linear(x, w).view(5, -1, 8) for w in (q, k, v))
        out = varlen_attention(*parts, torch.zeros(2, dtype=torch.int32))  # pyrefly: ignore[bad-argument-count]
        return F.linear(out.view(1, 5, -1), o)

    _, rule = analysed(attend, (1, 5, 32), (48, 32), (16, 32), (16, 32), (32, 48))
    assert rule == {
        "q_1": ShardRule(0, (6,), 8, heads=True),
        "k_1": ShardRule(0, (2,), 8, heads=True),
        "v_1": ShardRule(0, (2,), 8, heads=True),
        "o_1": ShardRule(1, (6,), 8, heads=True),
    }


@pytest.mark.parametrize(("computed", "cut"), [(False, True), (True, False)])
def test_sinks_are_cut_with_their_heads_unless_they_are_computed(computed: bool, cut: bool) -> None:
    def attend(x: Tensor, w: Tensor, o: Tensor, s: Tensor) -> Tensor:
        q = F.linear(x, w).view(5, 6, 8)
        out = varlen_attention(q, q, q, torch.zeros(2, dtype=torch.int32), sink=s * 2 if computed else s)
        return F.linear(out.view(1, 5, -1), o)

    _, rule = analysed(attend, (1, 5, 32), (48, 32), (32, 48), (6,))
    cuts = {"w_1": (0, 8), "o_1": (1, 8), "s_1": (0, 1)}
    assert rule == ({n: ShardRule(d, (6,), u, heads=True) for n, (d, u) in cuts.items()} if cut else {})


def test_stacked_selected_and_padded_values_stay_cut() -> None:
    def interleaved(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        heads = F.linear(x, a).unflatten(-1, (16, 4))
        turned = torch.stack((-heads[..., 1::2], heads[..., ::2]), dim=-1).flatten(-2).type_as(heads)
        whole = F.pad(turned[0], (0, 2))[..., :4]
        return F.linear(whole.flatten(-2), b)

    found, rule = analysed(interleaved, (1, 5, 32), (64, 32), (32, 64))
    assert rule == {"a_1": ShardRule(0, (16,), 4), "b_1": ShardRule(1, (16,), 4)}
    assert not found.unknown


@pytest.mark.parametrize(
    "between",
    [
        lambda y: torch.stack((y, y), 0)[..., 0].flatten(),
        lambda y: y.select(-1, 3),
        lambda y: F.pad(y, (0, 1)),
        lambda y: torch.stack((y, y.flip(0)), 1).select(1, 0).roll(1, -1),
    ],
)
def test_operators_that_need_a_whole_dimension_leave_it_whole(between: Callable[[Tensor], Tensor]) -> None:
    def forward(x: Tensor, a: Tensor) -> Tensor:
        return between(F.linear(x, a)).sum()

    assert not analysed(forward, (5, 32), (48, 32))[1]


@pytest.mark.parametrize(
    ("loss", "cut"),
    [
        (lambda y, x: F.cross_entropy(y[0], x[0, :, 0].long(), reduction="sum"), True),
        (lambda y, x: F.cross_entropy(y[0], x.repeat(1, 1, 2)[0, :, :48], reduction="sum"), False),  # probabilities
        (lambda y, x: F.cross_entropy(y.transpose(1, 2), x[..., 0].long(), reduction="sum"), False),
    ],
)
def test_a_loss_is_cut_by_classes_if_each_row_has_one_label(
    loss: Callable[[Tensor, Tensor], Tensor], cut: bool
) -> None:
    def forward(x: Tensor, a: Tensor) -> Tensor:
        return loss(F.linear(x, a), x)

    assert analysed(forward, (1, 5, 32), (48, 32))[1] == ({"a_1": ShardRule(0, (48,))} if cut else {})


def test_an_operator_without_a_rule_is_named() -> None:
    def forward(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.linear(x, a).roll(1, -1), b)

    found, rule = analysed(forward, (5, 32), (48, 32), (32, 48))
    assert not rule
    assert torch.ops.aten.roll.default in {n.target for n in found.unknown.values()}

"""Joint graphs derived from one trace for all degrees equal those of a trace of each, node by node; what falls back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hydragraph.frontend.capture import capture
from hydragraph.ir.graph_data import encode, value_of
from hydragraph.ir.program import Program
from hydragraph.passes import joint
from hydragraph.passes.graph_passes import make_variant
from hydragraph.passes.joint import RANKS, SHARE
from hydragraph.passes.recently_used import LRU
from hydragraph.passes.variant_spec import VariantSpec
from hydragraph.passes.variants import Variants
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import gpt2, llama, tiny
from tests.thorough import first, only, thorough

EVEN: dict[str, Any] = {
    **tiny(num_hidden_layers=1, num_attention_heads=8, hidden_size=128, intermediate_size=96, vocab_size=104)
}
GROUPED: dict[str, Any] = {**EVEN, "num_key_value_heads": 4}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(1, heads=8, kv=4, width=96, vocab=104),
    "gpt2": lambda: gpt2(1, heads=8, vocab=104),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GROUPED, pad_token_id=0, sliding_window=None)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**EVEN, hidden_dropout=0.0, attention_dropout=0.0)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**GROUPED)),
}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the degrees that are traced by themselves from now on; 0 for a trace for all degrees."""
    found: list[int] = []
    traced = joint._traced

    def counted(spec: VariantSpec, sharded: Any) -> Any:
        wide = any(isinstance(parameter.rule, joint._WideRule) for parameter in spec.parameters.values())
        found.append(0 if wide else spec.part.tp)
        return traced(spec, sharded)

    monkeypatch.setattr(joint, "_traced", counted)
    monkeypatch.setattr(joint, "_traces", LRU(8))
    joint._wide_trace.cache_clear()
    return found


@functools.cache
def captured(name: str) -> Program:
    return capture(MODELS[name]())


def specs(program: Program, part: StagePart, fused: bool = False) -> list[VariantSpec]:
    variants = Variants(program, added=True, fused_head=fused)
    return [variants.spec(block, part) for block in {b.template: b for b in program.blocks}.values()]


def said(spec: VariantSpec) -> tuple[Any, ...]:
    """Return all that a variant is: nodes, arguments, sizes, strides and storages as data, and its fields."""
    variant, _ = make_variant(spec)
    fields = {name: value for name, value in vars(variant).items() if name not in ("forward", "backward")}
    return encode(variant.forward, variant.backward), fields


@thorough
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", first(["llama"], MODELS))
def test_derived_graphs_equal_traced_ones(
    name: str, sequence_parallel: bool, traces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = captured(name)
    kind = StageKind(2, sequence_parallel)
    part, again = StagePart(kind, 1), StagePart(kind._replace(recompute=True), 0)
    fused = [specs(program, StagePart(kind._replace(tp=tp), 1), fused=True)[-1] for tp in (2, 4)]
    chosen = [*specs(program, part), specs(program, again)[1], *fused]
    derived = list(map(said, chosen))
    # embed, the layer once for both, the head, and the head that includes the loss once for both degrees
    assert traces == [0] * 4
    monkeypatch.setattr(joint, "_wide_trace", lambda *_: None)
    assert derived == list(map(said, chosen))


LAYERS = {
    "one key/value head on a rank": (4, 2, 96, StageKind(2)),
    "a key/value head that ranks share": (4, 1, 96, StageKind(2)),
    "an uneven width": (4, 4, 99, StageKind(2)),
    "an uneven width and split tokens": (4, 4, 99, StageKind(2, sequence_parallel=True)),
}


@thorough
@pytest.mark.parametrize("which", first(["an uneven width"], LAYERS))
def test_what_is_not_proven_is_traced(which: str, traces: list[int]) -> None:
    heads, kv, width, kind = LAYERS[which]
    layer = specs(capture(llama(1, heads, kv, width=width)), StagePart(kind))[1]
    variant, _ = make_variant(layer)
    assert traces[-1] == 2
    shapes = [layer.parameters[name].local_shape(2, 0) for name in layer.template.parameters]
    given = [n for n in variant.forward.graph.nodes if n.op == "placeholder"]
    assert [tuple(value_of(n).shape) for n in given if value_of(n) is not None][: len(shapes)] == shapes


def test_a_degree_that_leaves_one_head_to_a_rank_has_only_its_own_trace(traces: list[int]) -> None:
    make_variant(specs(captured("llama"), StagePart(StageKind(4)))[1])
    assert traces == [4]


def test_a_trace_that_fails_is_no_error(traces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "SHARE", 1 << 60)  # times the elements of a weight: more than PyTorch counts
    embed, *_ = specs(captured("gpt2"), StagePart(StageKind(2)))
    make_variant(embed)
    assert traces == [0, 2]


@only("kind1")
@pytest.mark.parametrize("kind", [StageKind(1), StageKind(2, sequence_parallel=True)])
def test_stages_that_recompute_share_the_trace(
    kind: StageKind, traces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = captured("gpt2")
    kinds = [kind, kind._replace(recompute=True), kind._replace(recompute=0.5), kind]
    layers = [specs(program, StagePart(each))[1] for each in kinds]
    shared = list(map(said, layers))
    assert traces == [1 if kind.tp == 1 else 0]
    assert shared[0] == shared[3], "a variant leaves the trace as it is"
    for layer, expected in zip(layers[1:3], shared[1:3], strict=True):
        monkeypatch.setattr(joint, "_traces", LRU(8))
        assert said(layer) == expected


@given(st.integers(1, RANKS - 1), st.sampled_from([2, 3, 4, 8]))
def test_shares_are_told_from_numbers(number: int, tp: int) -> None:
    assert joint._share(number, tp) == number
    assert joint._share(number * RANKS, tp) == number * tp
    assert joint._share(number * RANKS**2, tp) == number * tp**2
    assert joint._share(-number, tp) == -number
    if number % tp or number == tp:
        with pytest.raises(joint._NotProvenError):
            joint._share(number * SHARE, tp)
    else:
        assert joint._share(number * SHARE, tp) == number // tp
        assert joint._share(number * SHARE * RANKS, tp) == number
    with pytest.raises(joint._NotProvenError):
        joint._share(number * SHARE + 1, tp)


@pytest.mark.parametrize("units", [1, 8, 4096, 11008 * 4096])
def test_a_number_computed_from_a_share_is_seen(units: int) -> None:
    share = float(units * SHARE)
    for computed in (share, 1 / share, math.sqrt(share), -1 / math.sqrt(share)):
        with pytest.raises(joint._NotProvenError):
            joint._no_share(computed)


@pytest.mark.parametrize(
    "number",
    [1e-5, 1e-6, 1e-8, 1e-12, 0.0, 0.125, 11.3137085, 1e4, 1e-300, 1e300, torch.finfo(torch.float32).min, math.inf],
)
def test_usual_numbers_are_no_shares(number: float) -> None:
    assert joint._no_share(number) == number

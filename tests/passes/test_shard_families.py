"""Sharded graphs of more families against the whole template: per-head norms, biases, fused products, own modules."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers
from torch import nn

from hydragraph.frontend.capture import capture
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.parameter import ShardRule
from hydragraph.ir.program import Program
from hydragraph.passes.shard import gradient_kinds
from hydragraph.passes.variants import local_parameters
from hydragraph.spec.stage_kind import StageKind, StagePart
from tests.models import MODELS, bert, captured, randomised
from tests.own_models import Own, distilled, weighted
from tests.passes.test_shard import check
from tests.thorough import first, thorough

OTHERS = {
    "bert": lambda: capture_both(bert()),
    "own": lambda: capture_both(randomised(Own(layers=1))),
    "own, weighted": lambda: capture_both(
        randomised(Own(layers=1)), loss=weighted, example={"weight": torch.zeros(1, 8)}
    ),
    "own, distilled": lambda: capture_both(
        randomised(Own(layers=1)), loss=distilled, example={"teacher": torch.zeros(1, 8, 101)}
    ),
}


def latent() -> nn.Module:
    """Return a model with latent attention: heads share the part of their keys that knows the position."""
    config = transformers.MiniCPM3Config(
        vocab_size=101,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    )
    torch.manual_seed(0)
    return randomised(transformers.MiniCPM3ForCausalLM(config))


FAMILIES = [*(m for m in MODELS if m not in ("llama", "gpt2", "mixtral")), *OTHERS]


def capture_both(model: nn.Module, **given: object) -> tuple[Program, nn.Module]:
    return capture(model, **given), model  # pyrefly: ignore[bad-argument-type]


@functools.cache
def program_of(name: str) -> tuple[Program, nn.Module]:
    return OTHERS[name]() if name in OTHERS else captured(name)


CASES = [*((name, 2, True) for name in FAMILIES), *((name, 4, False) for name in ("gemma", "gpt_neox", "phi3", "own"))]


@thorough
@pytest.mark.parametrize(
    ("name", "tp", "sequence_parallel"),
    first([(name, 2, True) for name in ("gemma", "bert", "own, weighted")], CASES),
)
def test_sharded_graphs_equal_the_whole_template(name: str, tp: int, sequence_parallel: bool) -> None:
    program, model = program_of(name)
    for block in {block.template: block for block in program.blocks}.values():
        check(program, model, block, tp, sequence_parallel)


@functools.cache
def latent_program() -> tuple[Program, nn.Module]:
    if not hasattr(transformers, "MiniCPM3Config"):
        pytest.skip("this transformers has no MiniCPM3")
    return capture_both(latent())


def test_latent_attention_is_cut_by_heads() -> None:
    program, _ = latent_program()
    rules = {name.split("self_attn.")[1]: p.rule for name, p in program.parameters.items() if "self_attn." in name}
    assert rules["q_b_proj.weight"] == ShardRule(0, (6,), 24, heads=True)
    assert rules["kv_b_proj.weight"] == ShardRule(0, (6,), 28, heads=True)
    assert rules["kv_a_proj_with_mqa.weight"] is None
    template = program.templates[program.blocks[1].template]
    kinds = gradient_kinds(template, local_parameters(program, program.blocks[1], template), StagePart(StageKind(2), 0))
    kinds = {name.removeprefix("self_attn."): kind for name, kind in kinds.items()}
    assert kinds["kv_a_proj_with_mqa.weight"] is kinds["kv_a_layernorm.weight"] is GradientKind.REPLICA


@thorough
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(2, False), (3, True)])
def test_latent_attention_of_ranks_equals_the_whole(tp: int, sequence_parallel: bool) -> None:
    program, model = latent_program()
    check(program, model, program.blocks[1], tp, sequence_parallel)


@thorough
def test_one_device_computes_experts() -> None:
    program, model = captured("mixtral")
    check(program, model, program.blocks[1], 1, False)


def test_norms_of_heads_have_partial_gradients() -> None:
    program, _ = captured("qwen3")
    block = program.blocks[1]
    template = program.templates[block.template]
    local = {n: program.parameters[c] for n, c in zip(template.parameters, block.parameters, strict=True)}
    kinds = gradient_kinds(template, local, StagePart(StageKind(2), 0))
    partial = {n for n, k in kinds.items() if "norm" in n and k is GradientKind.PARTIAL}
    assert partial == {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}

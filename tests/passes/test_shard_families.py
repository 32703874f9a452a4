"""Sharded graphs of more families against the whole template: per-head norms, biases, fused products, own modules."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from hydragraph.frontend.capture import capture
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.program import Program
from hydragraph.passes.shard import gradient_kinds
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
FAMILIES = [*(m for m in MODELS if m not in ("llama", "gpt2", "mixtral")), *OTHERS]


def capture_both(model: nn.Module, **given: object) -> tuple[Program, nn.Module]:
    return capture(model, **given), model  # type: ignore[arg-type]


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

"""Sharded graphs of more families against the whole template: per-head norms, biases, fused products, own modules."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.ir.layout import GradientKind
from hydragraph.ir.program import Program
from hydragraph.passes.check_strategy import refuse_uncut
from hydragraph.passes.shard import Degree, gradient_kinds
from tests.models import MODELS, bert, captured, randomised
from tests.own_models import Own, distilled, weighted
from tests.passes.test_shard import check
from tests.thorough import first

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


@pytest.mark.parametrize(
    ("name", "tp", "sequence_parallel"),
    first([case for case in CASES if case[0] in ("gemma", "qwen3", "bert", "own", "own, weighted")], CASES),
)
def test_sharded_graphs_equal_the_whole_template(name: str, tp: int, sequence_parallel: bool) -> None:
    program, model = program_of(name)
    for block in {block.template: block for block in program.blocks}.values():
        check(program, model, block, tp, sequence_parallel)


def test_one_device_computes_experts() -> None:
    program, model = captured("mixtral")
    check(program, model, program.blocks[1], 1, False)


def test_norms_of_heads_have_partial_gradients() -> None:
    program, _ = captured("qwen3")
    block = program.blocks[1]
    template = program.templates[block.template]
    local = {n: program.parameters[c] for n, c in zip(template.parameters, block.parameters, strict=True)}
    kinds = gradient_kinds(template, local, Degree(2, 0))
    partial = {n for n, k in kinds.items() if "norm" in n and k is GradientKind.PARTIAL}
    assert partial == {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}


def two_devices(program: Program) -> None:
    refuse_uncut(program, hg.Strategy.parse("<tp2,pp1>", layers=program.layers))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_can_be_cut_is_not_refused(name: str) -> None:
    two_devices(program_of(name)[0])


def test_experts_are_refused_on_two_devices_only() -> None:
    program, _ = captured("mixtral")
    refuse_uncut(program, hg.Strategy.parse("2*<tp1,pp1>", layers=program.layers))
    message = (
        r"^model.layers.0.mlp.experts.gate_up_proj: experts \(a parameter of 3 dimensions\) in .*grouped_mm.*degree 1"
    )
    with pytest.raises(Unsupported, match=message):
        two_devices(program)
    with pytest.raises(Unsupported, match="experts"):
        hg.lower(program, hg.Strategy.parse("<tp2,pp1>", layers=program.layers), [1])


class Odd(nn.Module):
    """A block whose products meet an operator between them."""

    def __init__(self, between: object) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(32, 64), nn.Linear(64, 32), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(x)))  # type: ignore[operator]


class OddModel(nn.Module):
    def __init__(self, between: object) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(37, 32), nn.ModuleList([Odd(between) for _ in range(2)])
        self.head = nn.Linear(32, 37)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, -1)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def test_an_unknown_operator_on_a_cut_value_is_refused() -> None:
    message = r"blocks.0.up.weight: its product reaches aten.roll.default, which has no sharding rule; .*degree 1"
    with pytest.raises(Unsupported, match=message):
        two_devices(capture(OddModel(rolled)))


def test_a_block_that_cannot_be_cut_at_all_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"layer.0: none of its products .* every rank would repeat all of it"):
        two_devices(capture(OddModel(normed)))


def test_a_known_operator_is_cut() -> None:
    two_devices(capture(OddModel(torch.relu)))

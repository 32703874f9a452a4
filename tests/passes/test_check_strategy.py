"""What a strategy may ask of a model: experts and operators without a rule stay on one device, all else may be cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hydragraph as hg
from hydragraph.errors import Unsupported
from hydragraph.frontend.capture import capture
from hydragraph.ir.parameter import ShardRule
from hydragraph.ir.program import Program
from hydragraph.passes.check_strategy import check_strategy, refuse_uncut
from tests.models import captured, mixtral
from tests.passes.test_shard_families import FAMILIES, program_of
from tests.thorough import only


def two_devices(program: Program) -> None:
    refuse_uncut(program, hg.Strategy.parse("<tp2,pp1>", layers=program.layers))


@only("mistral")
@pytest.mark.parametrize("name", FAMILIES)
def test_what_can_be_cut_is_not_refused(name: str) -> None:
    two_devices(program_of(name)[0])


def test_experts_too_narrow_to_cut_are_refused_on_two_devices_only() -> None:
    program = capture(mixtral(width=4, num_hidden_layers=1))
    refuse_uncut(program, hg.Strategy.parse("2*<tp1,pp1>", layers=program.layers))
    message = r"^model.layers.0.mlp.experts.gate_up_proj: a parameter of 3 dimensions in .*grouped_mm.*degree 1"
    with pytest.raises(Unsupported, match=message):
        two_devices(program)
    with pytest.raises(Unsupported, match="experts"):
        hg.lower(program, hg.Strategy.parse("<tp2,pp1>", layers=program.layers), [1])


def test_experts_are_cut() -> None:
    two_devices(captured("mixtral")[0])


class Odd(nn.Module):
    """A block whose products meet an operator between them."""

    def __init__(self, between: object) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(32, 64), nn.Linear(64, 32), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(self.up(x)))


class OddModel(nn.Module):
    def __init__(self, between: object) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(37, 32), nn.ModuleList([Odd(between) for _ in range(2)])
        self.head = nn.Linear(32, 37)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.embed(batch["input_ids"])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x.roll(1, -1)


def normed(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(-1)


def test_an_unknown_operator_on_a_cut_value_is_refused() -> None:
    message = r"blocks.0.up.weight: its product reaches aten.roll.default, which has no sharding rule; .*degree 1"
    with pytest.raises(Unsupported, match=message):
        two_devices(capture(OddModel(rolled)))


def test_a_block_that_cannot_be_cut_at_all_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"layer.0: none of its products .* every rank would compute the whole block"):
        two_devices(capture(OddModel(normed)))


def test_a_known_operator_is_cut() -> None:
    two_devices(capture(OddModel(torch.relu)))


class Scales(nn.Module):
    """A scale of each head, and one that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.shared = nn.Parameter(torch.ones(1, 1, 16, 1)), nn.Parameter(torch.ones(1, 1, 1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.unflatten(-1, (16, 4)) * self.heads * self.shared).flatten(-2)


def test_a_vector_of_many_dimensions_may_stay_whole() -> None:
    model = OddModel(None)
    for block in model.blocks:
        block.between = Scales()
    program = capture(model)
    two_devices(program)
    rules = {name: p.rule for name, p in program.parameters.items() if name.startswith("blocks.0.between")}
    assert rules == {"blocks.0.between.heads": ShardRule(2, (16,)), "blocks.0.between.shared": None}


def test_a_strategy_fits_the_layers_the_ranks_and_the_heads() -> None:
    program, _ = captured("llama")
    check_strategy(program, hg.Strategy.parse("<tp2,pp1>", layers=program.layers), 2)
    with pytest.raises(ValueError, match="layers"):
        check_strategy(program, hg.Strategy.parse("<tp1,pp1>", layers=program.layers + 1), 1)
    with pytest.raises(ValueError, match="rank"):
        check_strategy(program, hg.Strategy.parse("<[5]x2>", layers=program.layers), 2)
    with pytest.raises(ValueError, match="head"):
        check_strategy(program, hg.Strategy.parse("<tp3,pp1>", layers=program.layers), 3)

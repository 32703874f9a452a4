"""Dropout in captured graphs: numbered in the order of its calls, and refused where no dimension has the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hydragraph as hg
from hydragraph.ir.placeholders import DROPOUT_BLOCK, DROPOUT_KEYS
from hydragraph.passes.graph_node import dropout, operands
from tests.thorough import thorough


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.drop = nn.Dropout(0.25)
        self.mix = nn.Linear(16, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = x + self.drop(self.mix(x))
        if self.kind == "weight":
            return x + F.linear(x, F.dropout(self.up.weight[:16], 0.5))
        if self.kind == "row":
            return x * F.dropout(torch.ones(x.shape[:-1], device=x.device), 0.5).unsqueeze(-1)
        if self.kind == "whole tokens":
            return x * F.dropout(torch.ones(*x.shape[:-1], 1, device=x.device), 0.5)
        if self.kind == "channels":
            return x + F.dropout1d(x, 0.5)
        up = F.dropout(self.up(x).relu(), 0.0 if self.kind == "none" else 0.5)
        down = self.down(F.dropout(up, 0.5, training=False))
        return x + (F.dropout(down.clone(), 0.125, inplace=True) if self.kind == "in place" else down)


class Model(nn.Module):
    def __init__(self, kind: str = "plain", layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(layers))
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = F.dropout(self.table(input_ids), 0.1, self.training)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.head(F.dropout(x, 0.2, self.training))


def calls(program: hg.Program, block: int) -> list[tuple[Any, ...]]:
    template = program.templates[program.blocks[block].template]
    return [operands(n)[4:6] for n in template.graph.graph.nodes if n.target is dropout]


def test_calls_are_numbered_within_blocks_and_around_them() -> None:
    program = hg.capture(Model(layers=2))  # checked against the model with the same masks
    inside = [(0.25, 0), (0.5, 1)]
    assert [calls(program, i) for i in range(4)] == [[(0.1, 0)], inside, inside, [(0.2, 1)]]
    assert program.blocks[1].template == program.blocks[2].template
    assert [program.number_of(block) for block in program.blocks] == [0, 1, 2, 0]
    assert program.drops
    assert {DROPOUT_KEYS, DROPOUT_BLOCK} <= set(program.templates[program.blocks[1].template].inputs)


def test_dropout_in_place_is_captured() -> None:
    assert calls(hg.capture(Model("in place")), 1) == [(0.25, 0), (0.5, 1), (0.125, 2)]


def test_whole_tokens_may_be_dropped() -> None:
    assert calls(hg.capture(Model("whole tokens")), 1) == [(0.25, 0), (0.5, 1)]


def test_a_model_in_evaluation_has_only_what_it_asks_for() -> None:
    assert calls(hg.capture(Model().eval(), check="off"), 1) == [(0.5, 0)]
    assert not hg.capture(Model("none").eval(), check="off").drops


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "weight",
            r"layer.0: dropout is applied to a value of shape \['16', '16'\], .*; set that dropout probability to 0",
        ),
        pytest.param(
            "row",
            r"a value of shape \['1', '\w+'\], .*; .* or apply dropout to values with one row per token",
            marks=thorough,
        ),
        (
            "channels",
            "draws random numbers, which would differ between ranks; use torch.nn.functional.dropout",
        ),
    ],
)
def test_dropout_without_tokens_is_refused(kind: str, message: str) -> None:
    with pytest.raises(hg.Unsupported, match=message):
        hg.capture(Model(kind), check="off")

"""Parameters that are read in several ways: each is cut for all its readers alike, or stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hydragraph.frontend.capture import capture
from tests.frontend import execute
from tests.models import randomised
from tests.passes.test_shard import check
from tests.thorough import only, thorough

VOCABULARY, WIDTH = 102, 32
Use = Callable[[Any, Tensor, Tensor], Tensor]  # (layer, its result, its input) -> its result

IN_LAYER: dict[str, Use] = {
    "the norm of a column weight": lambda m, y, _: y / m.up.weight.norm(),
    "the norm of a row weight": lambda m, y, _: y / m.down.weight.norm(),
    "the mean of a column bias": lambda m, y, _: y * (1 + m.up.bias.mean()),
    "the mean of a row bias": lambda m, y, _: y * (1 + m.down.bias.mean()),
    "one row": lambda m, y, _: y + m.up.weight[0],
    "the transpose": lambda m, y, x: y + F.linear(F.relu(F.linear(x, m.up.weight)), m.up.weight.t()),
    "a cast": lambda m, y, x: y + m.down(F.relu(F.linear(x.double(), m.up.weight.double()).float())),
    "a column and a row weight": lambda m, y, x: y + F.linear(F.linear(x, m.square.weight).relu(), m.square.weight),
    "two columns": lambda m, y, x: y + m.down(m.up(x).sigmoid() * m.up(x)),
    "a bias of two products": lambda m, y, x: y + m.down(F.gelu(F.linear(x, m.other.weight, m.up.bias))),
    "a bias of a column and a row": lambda m, y, x: (
        y + F.linear(F.gelu(F.linear(x, m.square.weight, m.down.bias)), m.square.weight, m.down.bias)
    ),
    "heads and plain columns": lambda m, y, x: y + m.down(m.up(x).unflatten(-1, (-1, 4)).softmax(-1).flatten(-2)),
    "the weight as the input of a product": lambda m, y, _: y + m.square(m.up.weight).mean(0),
}


class Layer(nn.Module):
    def __init__(self, uses: tuple[str, ...]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.other, self.square = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        for use in self.uses:
            y = IN_LAYER[use](self, y, x)
        return x + y


class Model(nn.Module):
    """A model whose parameters are read in the ways that its attributes say."""

    def __init__(self, uses: tuple[str, ...] = (), embed: str = "", head: str = "", tied: bool = False) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Layer(uses) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.how, self.end = embed, head
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        match self.how:
            case "a row":
                x = x + self.embed.weight[0]
            case "a second lookup":
                x = x + self.embed((input_ids + 1) % VOCABULARY)
            case "two tables":
                x = x + self.positions(input_ids)
            case "the same lookup twice":
                x = x * self.embed(input_ids.view(-1)).unsqueeze(0)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        match self.end:
            case "the head's norm":
                logits = logits / self.head.weight.norm()
            case "the embedding's norm":
                logits = logits / self.embed.weight.norm()
            case "the embedding":
                logits = logits + F.linear(x, self.embed.weight)
        return logits


def right(
    model: nn.Module,
    tp: int = 2,
    sequence_parallel: bool = False,
    blocks: tuple[str, ...] = ("embed", "layer.0", "layer.1", "head"),
) -> None:
    """Compare a captured model with itself, and what its ranks compute of some blocks with that."""
    randomised(model)
    program = capture(model)
    batch = execute.batch([5, 4, 3])
    logits = model(batch["input_ids"])[0]
    alone = F.cross_entropy(logits, batch["labels"][0], ignore_index=-100, reduction="sum")
    torch.testing.assert_close(execute.loss(program, model, batch), alone, rtol=1e-5, atol=0)
    for block in {block.template: block for block in program.blocks if block.name in blocks}.values():
        check(program, model, block, tp, sequence_parallel)


@only("the mean of a column bias")
@pytest.mark.parametrize("use", list(IN_LAYER))
def test_readers_within_a_layer(use: str) -> None:
    right(Model((use,)), blocks=("layer.0",))


@only("a second lookup")
@pytest.mark.parametrize("embed", ["a row", "a second lookup", "two tables", "the same lookup twice"])
def test_readers_of_the_embedding(embed: str) -> None:
    right(Model(embed=embed), blocks=("embed",))


@only("the head's norm-untied")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head", ["the head's norm", "the embedding's norm", "the embedding"])
def test_readers_in_other_blocks(head: str, tied: bool) -> None:
    right(Model(head=head, tied=tied), blocks=("embed", "head"))


@thorough
@settings(max_examples=8)
@given(
    st.lists(st.sampled_from(list(IN_LAYER)), min_size=2, max_size=3, unique=True),
    st.sampled_from([2, 3]),
    st.booleans(),
)
def test_readers_in_any_combination(uses: list[str], tp: int, sequence_parallel: bool) -> None:
    right(Model(tuple(uses)), tp, sequence_parallel)


def test_what_is_read_alike_is_still_cut() -> None:
    program = capture(Model(("two columns",), embed="two tables", tied=True))
    cut = {name for name, parameter in program.parameters.items() if parameter.rule is not None}
    layers = {f"blocks.{i}.{name}" for i in range(2) for name in ("up.weight", "up.bias", "down.weight")}
    assert cut == {"embed.weight", "positions.weight"} | layers

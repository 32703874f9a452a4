"""Templates of blocks: shared by equal layers, and equal to the model's own block for any number of tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hydragraph.frontend.blocks import meta_copy
from hydragraph.frontend.private import symbol_name
from hydragraph.frontend.templates import capture_template
from tests.frontend.execute import batch, run, with_aux
from tests.frontend.test_skeleton import Layer, Model, skeleton
from tests.models import captured


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_equal_layers_share_one_template(name: str) -> None:
    program, _ = captured(name)
    assert program.layers == 2
    assert len({block.template for block in program.blocks[1:-1]}) == 1
    assert len({block.template for block in program.blocks}) == 3


@pytest.mark.parametrize("lengths", [[2], [1, 1], [3], [1, 5, 1], [120, 79, 1]])
def test_a_template_computes_what_the_models_block_computes(lengths: list[int]) -> None:
    program, model = captured("llama")
    given, generator = batch(lengths), torch.Generator().manual_seed(1)
    hidden = torch.randn(1, sum(lengths), 64, generator=generator)
    block = program.blocks[2]
    inputs = program.templates[block.template].inputs
    aux = run(program, model, program.aux, given)
    (found,) = run(program, model, block, with_aux(block, given | {"hidden": hidden}, aux, inputs))
    for a, b in pairwise(given["cu_seqlens"].tolist()):
        positions = torch.arange(b - a)[None]
        rotary = model.model.rotary_emb(hidden, positions)
        mask = torch.full((b - a, b - a), float("-inf")).triu(1)[None, None]
        alone = model.model.layers[1](hidden[:, a:b], attention_mask=mask, position_embeddings=rotary)
        torch.testing.assert_close(found[:, a:b], alone[0] if isinstance(alone, tuple) else alone, rtol=1e-5, atol=1e-5)


class Indexed(Layer):
    """A block that scales by its own depth."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden: Tensor, positions: Tensor, flag: bool = True) -> Tensor:
        return hidden + self.linear(hidden) / (self.layer_idx + 1)


def last_template(model: Model) -> tuple[str, bool]:
    """Capture a model's last block; return the template's name and whether it stands alone."""
    _, sites = skeleton(meta_copy(model, torch.float32))
    symbols = {symbol_name(size) for tensor in sites[-1].inputs for size in tensor.shape} - {None}
    template, alone = capture_template(sites[-1], dict.fromkeys(symbols, 64))
    return template.name, alone


def test_a_block_that_computes_with_its_index_stands_alone() -> None:
    first, alone = last_template(Model(Indexed(0)))
    second, also = last_template(Model(Indexed(0), Indexed(1)))
    assert alone
    assert also
    assert first != second


def test_a_plain_block_stands_for_all_its_like() -> None:
    assert last_template(Model(Layer())) == last_template(Model(Layer(), Layer()))
    assert not last_template(Model(Layer()))[1]
